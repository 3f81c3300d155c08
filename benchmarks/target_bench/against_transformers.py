"""Outrider's services and transformers' `generate` in turns; see benchmarks/against_transformers.py."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.end_bench.checkpoints import widen
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from outrider.client import Client
from outrider.local import LocalService
from outrider.models import held_out_prompts

BASELINE = "transformers generate"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt's.

    Attributes:
        token_ids: new ones.
        seconds: from the call to its end.
        tpot_ms: (latency - time to the first token) / (tokens - 1).
        ttft_ms: time to the first token.
        steps: forwards of the target that emitted tokens.
    """

    token_ids: list[int]
    seconds: float
    tpot_ms: float
    ttft_ms: float
    steps: int


Contender = Callable[[list[int]], Generation]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contender, medians over the turns.

    Attributes:
        contender: its name.
        tokens_per_second: of all prompts together.
        ratio: to transformers' generate.
        tpot_ms, ttft_ms: medians over the prompts.
        tokens_per_step: emitted by a forward of the target.
        same_tokens: share of the prompts with the tokens that transformers' generate gives.
    """

    contender: str
    tokens_per_second: float
    ratio: float
    tpot_ms: float
    ttft_ms: float
    tokens_per_step: float
    same_tokens: float


class _Arrivals(BaseStreamer):
    """When tokens came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with what each step gives."""
        del value
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Called once, after the last."""


class TransformersContender:
    """`generate` of one model, on its own or with an assistant.

    Args:
        model: the target.
        max_new_tokens: every generation has so many.
        more: further arguments of `generate`.
    """

    def __init__(self, model: Any, *, max_new_tokens: int, **more: Any) -> None:
        self._model, self._count, self._more = model, max_new_tokens, more

    def __call__(self, prompt: list[int]) -> Generation:
        """Generates greedily, end-of-text tokens like any others."""
        arrivals = _Arrivals()
        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._count,
            do_sample=False,
            streamer=arrivals,
            **self._more,
        )
        seconds = time.perf_counter() - began
        token_ids = output[0, len(prompt) :].tolist()
        first = arrivals.seconds[1] - began
        return Generation(
            token_ids=token_ids,
            seconds=seconds,
            ttft_ms=1e3 * first,
            tpot_ms=1e3 * (seconds - first) / max(len(token_ids) - 1, 1),
            steps=len(arrivals.seconds) - 1,
        )


class OutriderContender:
    """One mode of a running service."""

    def __init__(self, client: Client, mode: str, *, max_new_tokens: int) -> None:
        self._client, self._mode, self._count = client, mode, max_new_tokens

    def __call__(self, prompt: list[int]) -> Generation:
        """Generates greedily, end-of-text tokens like any others."""
        began = time.perf_counter()
        output = self._client.generate(
            prompt,
            max_new_tokens=self._count,
            temperature=0,
            ignore_eos=True,
            speculation=self._mode,  # type: ignore[arg-type]
        )
        return Generation(
            token_ids=list(output.token_ids),
            seconds=time.perf_counter() - began,
            ttft_ms=output.timings.ttft_ms,
            tpot_ms=output.timings.tpot_ms,
            steps=output.speculation.verify_steps,
        )


def measure(
    contenders: dict[str, Contender], prompts: Sequence[list[int]], *, repeats: int, say: Callable[[str], None]
) -> list[Measurement]:
    """All contenders over all prompts, taking turns; the first turn warms caches, graphs and cost models."""
    turns: list[dict[str, list[Generation]]] = []
    for repeat in range(repeats + 1):
        try:
            turn = {name: [contender(prompt) for prompt in prompts] for name, contender in contenders.items()}
        except KeyboardInterrupt:
            if not turns:
                raise
            say("interrupted: what follows is of the turns before")
            break
        say(f"turn {repeat}: " + ", ".join(f"{name} {_rate(turn[name]):.1f}/s" for name in turn))
        if repeat:
            turns.append(turn)
    return [_summary(name, turns) for name in contenders]


def _rate(generations: Sequence[Generation]) -> float:
    """Tokens a second."""
    return sum(len(one.token_ids) for one in generations) / sum(one.seconds for one in generations)


def _summary(name: str, turns: Sequence[dict[str, list[Generation]]]) -> Measurement:
    ones = [one for turn in turns for one in turn[name]]
    baseline = [one for turn in turns for one in turn[BASELINE]]
    same = [one.token_ids == other.token_ids for one, other in zip(ones, baseline, strict=True)]
    return Measurement(
        contender=name,
        tokens_per_second=statistics.median(_rate(turn[name]) for turn in turns),
        ratio=statistics.median(_rate(turn[name]) / _rate(turn[BASELINE]) for turn in turns),
        tpot_ms=statistics.median(one.tpot_ms for one in ones),
        ttft_ms=statistics.median(one.ttft_ms for one in ones),
        tokens_per_step=sum(len(one.token_ids) for one in ones) / sum(one.steps for one in ones),
        same_tokens=sum(same) / len(same),
    )


def load(folder: Path, arguments: argparse.Namespace) -> Any:
    """A checkpoint in transformers, which never stops at end-of-text."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, arguments.dtype), use_safetensors=True, local_files_only=True
    )
    torch.nn.Module.to(model, arguments.device)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def transformers_contenders(target: Path, draft: Path, arguments: argparse.Namespace) -> dict[str, Contender]:
    """Both models in this process."""
    model, assistant = load(target, arguments), load(draft, arguments)
    count = arguments.max_new_tokens
    found: dict[str, Contender] = {
        BASELINE: TransformersContender(model, max_new_tokens=count),
        "transformers assisted": TransformersContender(model, max_new_tokens=count, assistant_model=assistant),
    }
    if arguments.compiled:
        found["transformers generate, static cache, compiled"] = TransformersContender(
            model, max_new_tokens=count, cache_implementation="static"
        )
    return found


def print_table(measurements: Sequence[Measurement], title: str) -> None:
    """The table on the terminal."""
    table = Table(title=title)
    for heading in ("", "tokens/s", "ratio", "TPOT ms", "TTFT ms", "tokens a step", "same tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in measurements:
        table.add_row(
            row.contender,
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
            f"{row.tpot_ms:.2f}",
            f"{row.ttft_ms:.1f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.same_tokens:.0%}",
        )
    Console(file=sys.stderr, width=130).print(table)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; both folders or none."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/against_transformers.py", description="Outrider's services beside transformers' generate."
    )
    parser.add_argument("--shapes", nargs=2, default=["1b", "160m"], metavar=("TARGET", "DRAFT"), help="to widen to")
    parser.add_argument("--target", type=Path, metavar="FOLDER", help="a checkpoint instead of a shape")
    parser.add_argument("--draft", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--scratch", type=Path, help="where widened checkpoints are written; default a temporary folder"
    )
    parser.add_argument("--device", default="cuda", help="of all models: cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=["off", "sync", "async"], choices=("off", "sync", "async"))
    parser.add_argument("--compiled", action="store_true", help="also generate with a static cache, which compiles")
    parser.add_argument("--kv-bytes", type=int, default=4 << 30, help="KV memory of each of Outrider's workers")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft: give both folders or none")
    return options


def run(arguments: argparse.Namespace, console: Console) -> list[Measurement]:
    """Loads everything, measures, and stops it."""
    with ExitStack() as stack:
        target, draft = arguments.target, arguments.draft
        if target is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.scratch)))
            target = widen("target", arguments.shapes[0], folder / "target")
            draft = widen("draft", arguments.shapes[1], folder / "draft")
        worker_args = ["--device", arguments.device, "--dtype", arguments.dtype, "--kv-bytes", str(arguments.kv_bytes)]
        # One request at a time: fewer graphs to capture before it starts.
        worker_args += ["--max-num-seqs", "4"]
        service = stack.enter_context(
            LocalService(
                drafts=1,
                target_model=target,
                draft_model=draft,
                target_args=worker_args,
                draft_args=worker_args,
                start_timeout_s=300,
            )
        )
        client = stack.enter_context(Client(service.endpoint))
        contenders = transformers_contenders(target, draft, arguments)
        for mode in arguments.modes:
            contenders[f"Outrider, {mode}"] = OutriderContender(client, mode, max_new_tokens=arguments.max_new_tokens)
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        prompts = [tokenizer.encode(text).ids for text in held_out_prompts()[: arguments.prompts]]
        return measure(
            contenders, prompts, repeats=arguments.repeats, say=lambda text: console.print(text, markup=False)
        )


def main(given: Sequence[str]) -> int:
    """Table on standard error, JSON on standard output (and in a file, if asked); returns the exit code."""
    arguments = parse(given)
    console = Console(file=sys.stderr, width=130)
    measurements = run(arguments, console)
    models = arguments.shapes if arguments.target is None else [arguments.target.name, arguments.draft.name]
    print_table(
        measurements, f"target {models[0]}, draft {models[1]}, {arguments.device}, one request at a time, greedy"
    )
    report = json.dumps(
        {
            "settings": {name: str(value) for name, value in vars(arguments).items()} | {"torch": torch.__version__},
            "measurements": [asdict(measurement) for measurement in measurements],
        },
        indent=2,
    )
    sys.stdout.write(report + "\n")
    if arguments.output_json is not None:
        arguments.output_json.write_text(report + "\n", encoding="utf-8")
    return 0
