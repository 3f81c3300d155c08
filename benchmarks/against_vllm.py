"""vLLM's engine under end_to_end.py's load: its prompts, and sessions that begin their next request when one ends.

    python benchmarks/against_vllm.py --target FOLDER --draft FOLDER --draft-tokens 4 --prompt-tokens 1024

`outrider widen` writes checkpoints that vLLM loads too. The engine runs on the first GPU that CUDA_VISIBLE_DEVICES
names. Two replicas are two of these commands at the same time, a GPU and half the sessions each, and their sum. vLLM is
no dependency of this project: install it beside, in an environment of its own if its PyTorch is another.
"""

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

# Of this folder only the packages below are meant: transformers looks for a package called kernels.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# With the engine in a process of its own, the time of a step would not be that of the tokens it returns.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from benchmarks import results
from benchmarks.end_bench.prompts import Answer, Prompts, by_category, conversations_of, prompts_of
from transformers import GenerationConfig

_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the figures as JSON; return 1 where vLLM is not installed."""
    options = _parser().parse_args(arguments)
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        sys.stderr.write(f"error: vLLM cannot be imported ({error}): pip install vllm, or leave this benchmark out\n")
        return 1
    if options.prompts is None:
        prompts, stops = prompts_of(options.prompt_tokens, options.target), []
    else:
        ends = GenerationConfig.from_pretrained(options.target).eos_token_id
        prompts, stops = conversations_of(options.prompts, options.target), ends if isinstance(ends, list) else [ends]
    bench = Bench(
        vllm=vllm,
        engine=_engine(vllm, options, max(map(len, prompts.token_ids))),
        prompts=prompts,
        stop_token_ids=stops,
        max_new_tokens=options.max_new_tokens,
        warm_up_s=options.warm_up,
        measure_s=options.measure,
    )
    bench.prefill()
    cells = itertools.product(options.temperatures, options.sessions)
    document = results.provenance("against_vllm.py", sys.argv[1:] if arguments is None else arguments)
    document["versions"]["vllm"] = vllm.__version__
    document |= {
        "machine": results.machine("cuda" if torch.cuda.is_available() else "cpu"),
        "draft_tokens": options.draft_tokens if options.draft else 0,
        "cells": [bench.measure(temperature, sessions) for temperature, sessions in cells],
        "categories": bench.categories,
    }
    results.write(document, options.output_json)
    return 0


@dataclass(kw_only=True)
class _Request:
    """A request under way: number of its prompt, when it began, its tokens so far and the steps that brought them."""

    number: int
    began_s: float
    tokens: int = 0
    steps: int = 0


@dataclass(kw_only=True)
class Bench:
    """An engine of the module `vllm`, with statistics on, and the prompts that its requests take in turn.

    Attributes:
        stop_token_ids: that end an answer; none where it goes on for as long as is asked.
        categories: for each category of each cell that was measured, a row of figures.
    """

    vllm: ModuleType
    engine: Any
    prompts: Prompts
    stop_token_ids: Sequence[int] = ()
    max_new_tokens: int
    warm_up_s: float
    measure_s: float
    clock: Callable[[], float] = time.perf_counter
    categories: list[dict[str, Any]] = field(default_factory=list)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def prefill(self) -> None:
        """Bring every prompt into the prefix cache, where end_to_end.py's cells find theirs."""
        for number in range(len(self.prompts.token_ids)):
            self._add(number, 0.0, 2)
        self._finish()

    def measure(self, temperature: float, sessions: int) -> dict[str, Any]:
        """Return the figures of one cell, counted from the first step that ends after the warm-up."""
        running: dict[str, _Request] = {}

        def begin(number: int) -> None:
            request_id = self._add(number, temperature, self.max_new_tokens)
            running[request_id] = _Request(number=number, began_s=self.clock())

        # As in end_to_end.py, each session goes on with the prompts after its first.
        for session in range(sessions):
            begin(session)
        warm_s = self.clock() + self.warm_up_s
        began_s, now_s, tokens, steps, before, answers = None, self.clock(), 0, 0, (0, 0), list[Answer]()
        while began_s is None or now_s < began_s + self.measure_s:
            outputs = self.engine.step()
            now_s, steps = self.clock(), steps + 1
            for output in outputs:
                request, length = running[output.request_id], len(output.outputs[0].token_ids)
                tokens += length - request.tokens
                request.steps += length > request.tokens
                request.tokens = length
                if output.finished:
                    del running[output.request_id]
                    answers += self._answers(request, now_s)
                    begin(request.number + 1)
            if began_s is None and now_s >= warm_s:
                began_s, tokens, steps, before, answers = now_s, 0, 0, self._speculation(), []
        drafts, accepted = (late - early for late, early in zip(self._speculation(), before, strict=True))
        self.engine.abort_request(list(running))
        self._finish()
        seconds, cell = now_s - began_s, {"temperature": temperature, "sessions": sessions}
        self.categories += [cell | asdict(figures) for figures in by_category(answers)]
        return {
            **cell,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "step_ms": 1e3 * seconds / steps,
        }

    def _answers(self, request: _Request, now_s: float) -> list[Answer]:
        """The answer to a prompt, if that belongs to a category."""
        categories = self.prompts.categories
        return [
            Answer(category, request.tokens, request.steps, now_s - request.began_s)
            for category in categories[request.number % len(self.prompts.token_ids) :][:1]
        ]

    def _add(self, number: int, temperature: float, max_tokens: int) -> str:
        seed = next(self._ids)
        sampling = self.vllm.SamplingParams(
            temperature=temperature, max_tokens=max_tokens, stop_token_ids=list(self.stop_token_ids),
            ignore_eos=not self.stop_token_ids, detokenize=False, seed=seed,
        )  # fmt: skip
        token_ids = self.prompts.token_ids
        prompt = self.vllm.TokensPrompt(prompt_token_ids=token_ids[number % len(token_ids)])
        request_id = f"r{seed}"
        self.engine.add_request(request_id, prompt, sampling)
        return request_id

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _speculation(self) -> tuple[int, int]:
        counters = {one.name: one.value for one in self.engine.get_metrics() if hasattr(one, "value")}
        return counters.get(_DRAFTS, 0), counters.get(_ACCEPTED, 0)


def _engine(vllm: ModuleType, options: argparse.Namespace, prompt_tokens: int) -> Any:
    length = prompt_tokens + options.max_new_tokens + options.draft_tokens
    speculation = {
        "method": "draft_model",
        "model": str(options.draft),
        "num_speculative_tokens": options.draft_tokens,
        "max_model_len": length,
    }
    engine_options = vllm.EngineArgs(
        model=str(options.target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=max(options.sessions),
        enable_prefix_caching=True,
        speculative_config=speculation if options.draft else None,
        disable_log_stats=False,
        seed=0,
    )
    return vllm.LLMEngine.from_engine_args(engine_options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="FOLDER")
    add("--draft", type=Path, metavar="FOLDER", help="default none: plain decoding")
    add("--draft-tokens", type=int, default=4, help="that the draft guesses a step, vLLM's num_speculative_tokens")
    add("--sessions", type=int, nargs="+", default=[1, 16, 64], help="that run at a time")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--prompts", type=Path, metavar="FILE", help="conversations, as end_to_end.py takes them")
    add("--prompt-tokens", type=int, help="without --prompts: length of prompts, made of several; default as they are")
    add("--max-new-tokens", type=int, default=128)
    add("--warm-up", type=float, default=2.0, help="seconds of a cell that do not count")
    add("--measure", type=float, default=5.0, help="seconds that do")
    add("--output-json", type=Path, metavar="FILE", help="default standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
