"""Sessions that say who takes part in a round: those in sync mode, and those that run alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds import driving
from tests.target_worker.rounds.ahead import AheadProgram
from tests.target_worker.rounds.driving import (
    PROMPT,
    Tree,
    loop_of,
    make_runner,
    open_request,
    oracle_tree,
)

from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.observer import RoundObserver
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT

FOR_EVER_MS = 10**9


@pytest.fixture(params=["one by one", "ahead", pytest.param("cuda", marks=pytest.mark.gpu)])
def loop(request, monkeypatch, checkpoint) -> RoundLoop:
    """Rounds whose device runs one at a time, or ahead of what has been read, as a GPU does."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        monkeypatch.setattr(driving, "DEVICE", "cuda")
    kind = AheadProgram if request.param == "ahead" else RoundProgram
    return loop_of(make_runner(checkpoint), kind=kind, chunk=3)


class Rounds(RoundObserver):
    """Sessions with results of each round, and how many took part."""

    def __init__(self, loop: RoundLoop) -> None:
        self.seen: list[tuple[set[int], int]] = []
        loop.observer = self

    def reported(self, report: RoundReport, results: Sequence[SessionResult], **sizes: int) -> None:
        numbers = {result.key[1] for result in results if result.tokens}
        # The last chunk of a prompt may be verified in the same round.
        rows = {report.opening(column)[0] for column in range(report.sessions + report.chunks)}
        self.seen.append((numbers, len(rows)))


def turn(loop: RoundLoop) -> list[SessionResult]:
    """Let the device get on, and turn."""
    if loop.is_busy:
        loop.wait()
    return loop.turn()


def finish(loop: RoundLoop) -> dict[int, list[int]]:
    """Turn until all sessions have ended; returns their tokens."""
    tokens: dict[int, list[int]] = {}
    for _ in range(5000):
        for result in turn(loop):
            assert result.fault is None
            tokens.setdefault(result.key[1], []).extend(result.tokens)
        if not loop.session_count and not loop.has_work:
            return tokens
    raise AssertionError("sessions do not end")


class Trees:
    """Grows trees, with node ids of their own."""

    def __init__(self, loop: RoundLoop) -> None:
        self._loop, self._next = loop, 1

    def grow(self, number: int, tree: Tree, *, as_of: int, **options: Any) -> None:
        tokens, parents = tree
        ids = [0, *range(self._next, self._next + len(tokens))]
        self._next += len(tokens)
        # Less than a node has to be worth in other modes.
        acceptances = [0.001] * len(tokens)
        self._loop.grow(
            Growth.of_session(
                (7, number), 1, 0, as_of, ids[1:], [ids[parent] for parent in parents], tokens, acceptances, **options
            )
        )


def test_in_sync_mode_exactly_one_round_verifies_a_whole_tree(loop, reference_model):
    spec = SamplingSpec(temperature=1.0, seed=3, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    other = replace(spec, seed=4, max_new_tokens=40)
    loop.open(replace(open_request(1, spec), mode=SpeculationMode.SYNC, sync_wait_ms=FOR_EVER_MS))
    loop.forget((7, 1), 1, 0)
    loop.open(open_request(2, other))
    trees, tokens, beside = Trees(loop), list[int](), list[int]()
    chance = random.Random(1)

    def take(results: list[SessionResult]) -> list[SessionResult]:
        for result in results:
            (tokens if result.key[1] == 1 else beside).extend(result.tokens)
        return [result for result in results if result.key[1] == 1]

    while (7, 1) in loop.keys:
        length = len(PROMPT) + len(tokens)
        tree = oracle_tree(chance, plain[len(tokens) :][:5])
        half = ([*tree[0][:3]], [*tree[1][:3]])
        trees.grow(1, half, as_of=length)
        # A tree for another length is none.
        if tokens:
            trees.grow(1, ([tokens[-1], 60], [0, 1]), as_of=length - 1, is_complete=True)
        for _ in range(6):
            assert not take(turn(loop)), "a round has not waited for the tree"
        trees.grow(1, tree, as_of=length, is_complete=True)
        results: list[SessionResult] = []
        while not results:
            results = take(turn(loop))
        (result,) = results
        room = len(PROMPT) + spec.max_new_tokens - length - 1
        assert result.selected == 2 * min(room, len(tree[0]) // 2)
    assert tokens == plain
    rest = finish(loop)
    assert beside + rest.get(2, []) == plain_decode(reference_model, PROMPT, other).tokens
    assert loop.kv.slots.used == 0


@pytest.mark.parametrize("ends", ["time", "place"])
def test_a_session_in_sync_mode_goes_on_when_there_is_no_tree_to_wait_for(ends, loop, reference_model):
    spec = SamplingSpec(max_new_tokens=8)
    wait_ms = 1 if ends == "time" else FOR_EVER_MS
    loop.open(replace(open_request(1, spec), mode=SpeculationMode.SYNC, sync_wait_ms=wait_ms))
    loop.forget((7, 1), 1, 2)
    loop.forget((7, 1), 1, 3)
    loop.leave((7, 1), 1, 3)
    if ends == "place":
        while loop.has_work:
            assert not turn(loop)
        assert loop.due_s is not None
        loop.leave((7, 1), 1, 2)
    assert finish(loop) == {1: plain_decode(reference_model, PROMPT, spec).tokens}
    assert loop.due_s is None


def test_a_session_whose_choices_need_the_host_waits_for_its_tree(loop):
    spec = SamplingSpec(temperature=0.8, max_new_tokens=8, verification=VerificationRule.TARGET_ONLY)
    loop.open(replace(open_request(1, spec), mode=SpeculationMode.SYNC, sync_wait_ms=1))
    loop.forget((7, 1), 1, 0)
    assert len(finish(loop)[1]) == spec.max_new_tokens


def test_a_preempted_session_in_sync_mode_asks_for_its_tree_again(checkpoint, reference_model):
    loop = loop_of(make_runner(checkpoint, num_slots=36))
    spec = SamplingSpec(max_new_tokens=20)
    loop.open(open_request(1, replace(spec, max_new_tokens=28)))
    loop.open(replace(open_request(2, spec), mode=SpeculationMode.SYNC, sync_wait_ms=FOR_EVER_MS))
    loop.forget((7, 2), 1, 0)
    trees, tokens, asked = Trees(loop), {1: list[int](), 2: list[int]()}, 0
    trees.grow(2, ([], []), as_of=len(PROMPT), is_complete=True)
    for _ in range(2000):
        for result in turn(loop):
            number = result.key[1]
            tokens[number] += result.tokens
            if number == 2 and result.finish is Finish.NONE:
                asked += not result.tokens and bool(result.lost)
                trees.grow(2, ([], []), as_of=len(PROMPT) + len(tokens[2]), is_complete=True)
        if not loop.session_count:
            break
    assert (loop.session_count, loop.preemptions > 0, asked > 0) == (0, True, True)
    assert tokens[2] == plain_decode(reference_model, PROMPT, spec).tokens


@pytest.mark.parametrize("marked", ["at first", "later", "as they open"])
def test_a_session_that_is_alone_shares_no_round_and_all_go_on(marked, loop, reference_model):
    specs = {number: SamplingSpec(temperature=1.0, seed=number, max_new_tokens=14) for number in range(1, 6)}
    prompts = {number: [*PROMPT, *range(number, number + 9)] for number in specs}
    rounds = Rounds(loop)
    alone = {2, 5}

    def separate() -> None:
        for number in alone:
            loop.separate((7, number), 1, is_alone=True)

    opens = marked == "as they open"
    for number in specs.keys() - (alone if opens else set()):
        loop.open(open_request(number, specs[number], prompt=prompts[number]))
    results: list[SessionResult] = []
    if marked == "later" or opens:
        for _ in range(12):
            results += turn(loop)
    if opens:
        # The rounds under way are those of others.
        for number in alone:
            loop.open(replace(open_request(number, specs[number], prompt=prompts[number]), is_alone=True))
        first = len(rounds.seen)
    else:
        separate()
        if loop.is_busy:
            results += loop.drain()
        first = len(rounds.seen)
    tokens = finish(loop)
    for number, spec in specs.items():
        before = [token for result in results if result.key[1] == number for token in result.tokens]
        assert before + tokens.get(number, []) == plain_decode(reference_model, prompts[number], spec).tokens
    shared = [seen for seen in rounds.seen[first:] if seen[0] & alone]
    assert len(shared) >= 4
    assert all(len(numbers) == count == 1 for numbers, count in shared)
    assert any(len(numbers) > 1 for numbers, _ in rounds.seen[first:])
    # In turn: none waits for another's end.
    turns = [min(numbers & alone, default=0) for numbers, _ in rounds.seen[first:] if numbers]
    last = {turn: place for place, turn in enumerate(turns)}
    assert max(turns.index(turn) for turn in last) < min(last.values())
    assert loop.kv.slots.used == 0


def test_a_session_joins_the_others_again_and_is_held_like_any_other(loop, reference_model):
    spec = SamplingSpec(max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    rounds = Rounds(loop)
    for number in (1, 2):
        loop.open(open_request(number, spec))
    loop.separate((7, 1), 1, is_alone=True)
    loop.limit((7, 1), 1, 0)
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(20):
        for result in turn(loop):
            tokens[result.key[1]] += result.tokens
    assert not tokens[1]
    loop.limit((7, 1), 1, WITHOUT_LIMIT)
    loop.separate((7, 1), 1, is_alone=False)
    for number, found in finish(loop).items():
        tokens[number] += found
    assert tokens == {1: plain, 2: plain}
    assert loop.kv.slots.used == 0
    assert rounds.seen
