"""Trees of a head or block drafter in the target's rounds: its own guesses from the target's hidden states alone."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.outrider.engine.plain_eagle import plain_head
from tests.outrider.engine.random_eagle import write_random_eagle
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    Driver,
    FixedSteps,
    make_runner,
    no_tree,
    open_request,
    rounds_of,
)
from tests.target_worker.tiny_head import TAPS, hidden_states, write_tiny_head
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.kernels.pool.columns import RowState
from outrider.models import embedded_block_path, embedded_eagle_path, embedded_target_path, held_out_prompts
from outrider.sampling import SamplingSpec
from outrider.target_worker.drafters.loading import load_draft
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram

pytestmark = pytest.mark.usefixtures("device")
BRANCHING = 3
# Logits of float32 and of float64 arithmetic differ by less.
NEAR = 2e-3


class WatchedProgram(RoundProgram):
    """Lets a test look at the trees before a round."""

    watch: Callable[[], None] = staticmethod(lambda: None)

    def launch(self, *arguments: Any, **options: Any) -> None:
        if self.device.type == "cuda":
            # This round is launched while the one before still runs.
            torch.cuda.synchronize(self.device)
        self.watch()
        super().launch(*arguments, **options)


def watched(target: Path, folder: Path) -> tuple[RoundLoop, WatchedProgram]:
    """Rounds with three steps of a head before each."""
    runner = make_runner(target)
    draft = load_draft(runner, folder, branching=BRANCHING, most_steps=3)
    loop, program = rounds_of(runner, kind=WatchedProgram, chunk=5, draft=draft)
    program.drafter.pace = FixedSteps(3)
    return loop, program


class Watcher:
    """Holds the trees of one session against the head in plain torch.

    Args:
        program: whose trees.
        model: the target.
        target: its folder.
        folder: of the head.
    """

    def __init__(self, program: WatchedProgram, model: LlamaForCausalLM, target: Path, folder: Path) -> None:
        assert program.drafter is not None
        self._theirs, self._mine = program.pool, program.drafter.pool
        self._model, self._plain = model, plain_head(folder, target)
        self.nodes = self.depth = self.waited = 0
        program.watch = self._look

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        if self._plain.is_third:
            return hidden_states(self._model, ids)[0][0]
        with torch.no_grad():
            return self._model.model(ids).last_hidden_state[0]

    def _look(self) -> None:
        mine, theirs = self._mine, self._theirs
        for row in torch.nonzero(mine.state != RowState.EMPTY)[:, 0].tolist():
            if theirs.state[row] == RowState.PREFILL:
                assert mine.cached[row] == mine.count[row] == 0
                self.waited += 1
                continue
            tokens = mine.history[row, : mine.length[row]].tolist()
            features, paths = self._features(tokens)[:-1], list[list[int]]()
            count = int(mine.count[row])
            for token, parent in zip(mine.token[row, :count].tolist(), mine.parent[row, :count].tolist(), strict=True):
                above = paths[parent] if parent >= 0 else []
                paths.append([*above, token])
                logits = self._plain.path(features, tokens[1:], above)
                assert logits[token] >= logits.topk(BRANCHING).values[-1] - NEAR
                self.depth = max(self.depth, len(above) + 1)
            self.nodes += count


HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"layout": "eagle1"},
    "eagle3, fewer tokens": {"draft_vocab_size": 40, "taps": TAPS},
    "block": {"taps": TAPS, "block_size": 4},
    "block, fewer tokens": {"draft_vocab_size": 40, "taps": TAPS, "block_size": 3},
}


@pytest.mark.parametrize("kind", ["trained", *HEADS])
def test_trees_are_the_heads_guesses_from_the_targets_hidden_states(
    checkpoint: Path, reference_model: LlamaForCausalLM, tmp_path: Path, kind: str
):
    spec = replace(SPECS["greedy"], max_new_tokens=20)
    wanted = plain_decode(reference_model, PROMPT, spec).tokens
    if kind == "trained":
        write_tiny_head(tmp_path, checkpoint, reference_model, [[*PROMPT, *wanted]])
    else:
        write_random_eagle(tmp_path, checkpoint, **HEADS[kind])
    loop, program = watched(checkpoint, tmp_path)
    watcher, driver = Watcher(program, reference_model, checkpoint, tmp_path), Driver(loop)
    # The second one begins while the first runs, in the prefix cache, and goes on in chunks.
    prompts = list(PROMPT), [*PROMPT, *wanted[:12], *[7, 8, 9] * 3]
    for number, prompt in enumerate(prompts):
        expected = plain_decode(reference_model, prompt, spec).tokens
        driver.open(number, spec, expected, no_tree, prompt=prompt)
        for _ in range(3 if number == 0 else 100):
            driver.turn()
        assert driver.decoded[number].tokens == expected[: len(driver.decoded[number].tokens)]
    assert [len(decoded.tokens) for decoded in driver.decoded.values()] == [20, 20]
    cached = [decoded.results[0].cached_tokens for decoded in driver.decoded.values()]
    assert cached == [0, len(PROMPT) - 1]
    assert watcher.nodes > 40 and watcher.depth == 3 and watcher.waited > 1
    if kind == "trained":
        assert sum(result.accepted for result in driver.decoded[0].results) > 8


@pytest.mark.parametrize("kind", ["eagle1", "block", "block, fewer tokens"])
def test_trees_are_guesses_with_the_weights_that_a_reload_has_brought(
    checkpoint: Path, reference_model: LlamaForCausalLM, tmp_path: Path, kind: str
):
    other, folder = tmp_path / "other", tmp_path / "head"
    shutil.copytree(checkpoint, other)
    torch.manual_seed(4)
    model = LlamaForCausalLM(reference_model.config).eval()
    model.save_pretrained(other)
    write_random_eagle(folder, checkpoint, **HEADS[kind])
    loop, program = watched(checkpoint, folder)
    loop.reload(other)
    watcher, driver = Watcher(program, model, other, folder), Driver(loop)
    spec = replace(SPECS["greedy"], max_new_tokens=8)
    driver.open(1, spec, plain_decode(model, PROMPT, spec).tokens, no_tree)
    driver.run()
    assert watcher.nodes > 20 and watcher.depth == 3


@pytest.mark.parametrize("name", ["greedy", "coupled", "penalties"])
def test_one_guess_a_round(checkpoint: Path, reference_model: LlamaForCausalLM, tmp_path: Path, name: str):
    wanted = plain_decode(reference_model, PROMPT, SPECS[name]).tokens
    write_tiny_head(tmp_path, checkpoint, reference_model, [[*PROMPT, *wanted]])
    runner = make_runner(checkpoint)
    draft = load_draft(runner, tmp_path, branching=1, most_steps=1)
    loop, program = rounds_of(runner, draft=draft)
    program.drafter.pace = FixedSteps(1)
    driver = Driver(loop)
    decoded = driver.open(1, SPECS[name], wanted, no_tree)
    driver.run()
    assert decoded.tokens == wanted
    assert {result.selected for result in decoded.results} <= {0, 1}
    assert sum(result.accepted for result in decoded.results) > len(wanted) / 4


@pytest.mark.parametrize(("folder", "least"), [(embedded_eagle_path(), 2), (embedded_block_path(), 1.8)])
def test_what_ships_is_often_right(device: str, folder: Path, least: float):
    runner = ModelRunner(EngineConfig(model_path=embedded_target_path(), num_slots=1024, max_num_seqs=4, device=device))
    draft = load_draft(runner, folder)
    loop, program = rounds_of(runner, draft=draft)
    program.drafter.pace = FixedSteps(4)
    tokenizer = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
    for number, text in enumerate(held_out_prompts()[:3]):
        prompt = tokenizer.encode(text).ids
        loop.open(open_request(number, SamplingSpec(max_new_tokens=40), prompt=prompt))
    rounds = tokens = 0
    while loop.has_work:
        for result in loop.turn():
            rounds, tokens = rounds + 1, tokens + len(result.tokens)
    assert tokens == 3 * 40
    assert tokens / rounds > least
