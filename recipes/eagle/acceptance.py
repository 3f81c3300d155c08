"""Tokens of a round with each drafter of the embedded target, in the target's own rounds, by drafting steps.

    python recipes/eagle/acceptance.py --output-json FILE

The rounds run on a CPU in float32, one session after the other, on held-out prompts. Before each round a given number
of steps runs, and all nodes that have grown are verified, up to 32: no figure depends on how fast the machine is.
A step of the draft model and of the head is a forward pass; a block drafter has one pass a round, its further steps
read.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outrider.drafting.config import GrowthConfig
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.models import (
    embedded_block_path,
    embedded_draft_path,
    embedded_eagle_path,
    embedded_target_path,
    held_out_prompts,
)
from outrider.sampling import SamplingSpec
from outrider.target_worker.drafters.loading import load_draft
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.draft_steps import DraftSteps, RoundRates
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.round_times import LearnedTimes
from outrider.target_worker.rounds.step_cost import StepCost
from outrider.target_worker.sessions.requests import OpenRequest

STEPS, TEMPERATURES, NODES = (1, 2, 4, 6, 8), (0.0, 1.0), 32


class GivenSteps(DraftSteps):
    """Fixed number of steps before every round, whatever they bring."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._given = steps

    def choose(self, sessions: int, times_ns: Sequence[float], rates: RoundRates) -> int:
        """See `DraftSteps`."""
        return self._given


class AllNodes(LearnedTimes):
    """Every node is worth its row."""

    @property
    def least_value(self) -> float:
        """See `RoundTimes`."""
        return 0.0


def measure(
    drafter: Path, prompts: Sequence[Sequence[int]], *, steps: int, temperature: float, new_tokens: int, branching: int
) -> float:
    """Return the tokens that a round commits.

    Args:
        drafter: checkpoint folder.
        prompts: to continue, token ids.
        steps: before a round.
        temperature: of the requests; their seeds are the numbers of the prompts.
        new_tokens: of each.
        branching: children of a node.
    """
    engine = EngineConfig(model_path=embedded_target_path(), num_slots=4096, max_num_seqs=1, max_tree_nodes=NODES + 1)
    runner = ModelRunner(engine)
    config = RoundConfig(
        max_sessions=1, max_model_len=runner.info.max_model_len, max_session_rows=NODES + 1, least_value=0.0
    )
    program = RoundProgram.of_runner(runner, config, draft=load_draft(runner, drafter, branching=branching))
    assert program.drafter is not None
    program.drafter.pace = GivenSteps(steps)
    (bucket,) = program.buckets
    times = AllNodes(bucket, StepCost(slowdown=config.prefill_slowdown, prior_rows=32))
    loop = RoundLoop(runner, config, times=times, program=program)
    rounds = tokens = 0
    for number, prompt in enumerate(prompts):
        sampling = SamplingSpec(max_new_tokens=new_tokens, temperature=temperature, seed=number)
        loop.open(OpenRequest(key=(1, number), epoch=1, prompt=prompt, output=(), sampling=sampling))
        while loop.has_work:
            for result in loop.turn():
                rounds, tokens = rounds + 1, tokens + len(result.tokens)
    return tokens / rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen drafters, and write one row for each number of steps and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--branching", type=int, default=GrowthConfig.branching)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--block", type=Path, default=embedded_block_path(), help="folder of the block drafter")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in held_out_prompts()[: options.prompts]]
    drafters = {"model": embedded_draft_path(), "head": embedded_eagle_path(), "block": options.block}
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        for steps in options.steps:
            for name, folder in drafters.items():
                found = measure(
                    folder, prompts, steps=steps, temperature=temperature, new_tokens=options.new_tokens,
                    branching=options.branching,
                )  # fmt: skip
                passes = 1 if name == "block" else steps
                row = {"drafter": name, "temperature": temperature, "steps": steps, "passes": passes}
                rows.append({**row, "tokens_per_round": round(found, 2)})
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
    if options.output_json is not None:
        command = shlex.join(["python", *sys.argv])
        document = {"command": command, "prompts": len(prompts), "new_tokens": options.new_tokens, "rows": rows}
        options.output_json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
