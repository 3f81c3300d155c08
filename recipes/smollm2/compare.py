"""Hold the service's outputs at temperature 0 against transformers' greedy generation, token by token.

    python recipes/smollm2/compare.py MODEL [--new-tokens 64] [--prompts 54] [--output-json FILE]

The service runs the model in float32 on the CPU and answers every prompt of `outrider bench` three times: without
speculation, with n-grams that know the prompt, and again when they know the answer too (long paths are accepted then).
An output may differ where two logits are nearly equal: each of its tokens must be within 1e-4 of transformers' largest
logit, given the tokens before it. Such outputs are counted. Any other difference makes the exit status 1.
"""

import argparse
import logging
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from chat import ChatPrompt, read_chat_prompts
from transformers import LlamaForCausalLM

from outrider.client import Client
from outrider.client.outputs import GenerationOutput
from outrider.local import LocalService

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import results

logger = logging.getLogger("compare")

NEAR_TIE = 1e-4
# Requests of the service under way.
_CONCURRENCY = 6
PASSES: dict[str, Literal["off", "async"]] = {"off": "off", "n-grams": "async", "n-grams, answer known": "async"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output of the service beside transformers' own.

    Attributes:
        prompt: id of the prompt.
        category: of the prompt.
        way: key of PASSES.
        tokens: of the output.
        acceptance_length: mean tokens that a verification committed.
        differs_at: first token that differs; None of equal outputs.
        shortfall: how far the logit of any token of a differing output is below the largest, at most.
    """

    prompt: str
    category: str
    way: str
    tokens: int
    acceptance_length: float
    differs_at: int | None
    shortfall: float

    @property
    def is_near_tie(self) -> bool:
        """The outputs differ, but transformers' logits allow both."""
        return self.differs_at is not None and self.shortfall <= NEAR_TIE


@torch.inference_mode()
def reference_output(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return the tokens of transformers' greedy generation, the end token included."""
    tokens = torch.tensor([prompt])
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new_tokens)
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def largest_shortfall(model: Any, prompt: Sequence[int], output: Sequence[int], *, is_whole: bool) -> float:
    """Return how far below the largest logit the logit of any output token is, at most; infinite if a token is missing.

    Args:
        model: transformers'.
        prompt: of the output.
        output: tokens that the service has chosen.
        is_whole: the output has all tokens that were asked for, or ends with an end token.
    """
    if not is_whole:
        return float("inf")
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    return (logits.max(-1).values - chosen).max().item()


def compare_outputs(
    model: Any, client: Client, prompts: Sequence[ChatPrompt], expected: Sequence[list[int]]
) -> list[Comparison]:
    """Return a comparison for every pass and prompt.

    Args:
        model: transformers'.
        client: of the service.
        prompts: to answer.
        expected: transformers' output for each, of one length unless an end token came first.
    """
    new_tokens, found = max(map(len, expected)), []
    for way, mode in PASSES.items():

        def answer(prompt: ChatPrompt, mode: Literal["off", "async"] = mode) -> GenerationOutput:
            return client.generate(prompt.token_ids, temperature=0.0, max_new_tokens=new_tokens, speculation=mode)

        with ThreadPoolExecutor(_CONCURRENCY) as requests:
            outputs = list(requests.map(answer, prompts))
        for prompt, output, theirs in zip(prompts, outputs, expected, strict=True):
            own, differs_at, shortfall = list(output.token_ids), None, 0.0
            if own != theirs:
                shorter = min(len(own), len(theirs))
                differs_at = next((place for place in range(shorter) if own[place] != theirs[place]), shorter)
                is_whole = output.finish_reason == "stop" or len(own) == new_tokens
                shortfall = largest_shortfall(model, prompt.token_ids, own, is_whole=is_whole)
            comparison = Comparison(
                prompt=prompt.id,
                category=prompt.category,
                way=way,
                tokens=len(own),
                acceptance_length=output.speculation.acceptance_length,
                differs_at=differs_at,
                shortfall=shortfall,
            )
            found.append(comparison)
            if differs_at is not None:
                logger.info("%s", comparison)
        equal = sum(each.differs_at is None for each in found if each.way == way)
        logger.info("%s: %d of %d outputs are equal", way, equal, len(prompts))
    return found


def summary(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return one row for each category and pass, then one for each pass over all categories."""
    groups = [(category, way) for category in dict.fromkeys(each.category for each in found) for way in PASSES]
    rows = []
    for category, way in [*groups, *(("all", way) for way in PASSES)]:
        group = [each for each in found if each.way == way and category in (each.category, "all")]
        rows.append(
            {
                "category": category,
                "speculation": way,
                "outputs": len(group),
                "tokens": sum(each.tokens for each in group),
                "equal": sum(each.differs_at is None for each in group),
                "near ties": sum(each.is_near_tie for each in group),
                "wrong": sum(each.differs_at is not None and not each.is_near_tie for each in group),
                "acceptance length": round(sum(each.acceptance_length for each in group) / max(1, len(group)), 2),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder that recipes/smollm2/fetch.py has written")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each output, at most")
    parser.add_argument("--prompts", type=int, help="only so many, spread over the file; default: all")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    measured_commit = results.commit()
    prompts = read_chat_prompts(options.model)
    prompts = prompts[:: max(1, len(prompts) // (options.prompts or len(prompts)))][: options.prompts]
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    # The draft reads the tokenizer alone.
    expected = []
    for number, prompt in enumerate(prompts, start=1):
        expected.append(reference_output(model, prompt.token_ids, options.new_tokens))
        logger.info("transformers: %d of %d", number, len(prompts))
    with (
        LocalService(
            target_model=options.model, draft_model=options.model, draft_args=["--source", "ngram"]
        ) as service,
        Client(service.endpoint) as client,
    ):
        found = compare_outputs(model, client, prompts, expected)
    different = [each for each in found if each.differs_at is not None]
    report = {
        "command": f"python recipes/smollm2/compare.py MODEL --new-tokens {options.new_tokens}",
        "commit": measured_commit,
        "machine": results.machine("cpu"),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "notes": f"{options.model.resolve().name} in float32 on a CPU at temperature 0, chat template; equal to "
        f"transformers' greedy generation; near ties: every token within {NEAR_TIE} of the largest logit",
        "outputs": summary(found),
        "differences": [asdict(each) for each in different],
    }
    results.write(report, options.output_json)
    return int(any(not each.is_near_tie for each in different))


if __name__ == "__main__":
    sys.exit(main())
