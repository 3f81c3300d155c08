"""Usual steps, over columns, give the results of planned ones; what is unusual is left to those."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.compiled import IS_COMPILED
from outrider.engine import kv_slots, step_trees
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker import tree_step
from outrider.target_worker.sessions import Code, OpenRequest, Outcome, SessionFault, TreeRequest, TreeResult
from outrider.target_worker.tree_step import TreeStep
from outrider.target_worker.unpacking import unpack
from outrider.target_worker.verifier import Verifier
from outrider.v1 import target_pb2

SPECS = [
    SamplingSpec(max_new_tokens=25),
    SamplingSpec(max_new_tokens=60, stop_token_ids=(3, 17, 40)),
    SamplingSpec(temperature=1.0, seed=4, max_new_tokens=60, stop_token_ids=(9,)),
    SamplingSpec(temperature=0.7, seed=-5, top_k=12, top_p=0.9, max_new_tokens=40),
    SamplingSpec(
        temperature=1.0, seed=6, max_new_tokens=40, verification=VerificationRule.SYNTHETIC,
        synthetic_rates=(0.9, 0.7, 0.6), stop_token_ids=(11,),
    ),
    SamplingSpec(
        seed=7, max_new_tokens=33, verification=VerificationRule.SYNTHETIC, synthetic_rates=(0.5,),
    ),
]  # fmt: skip
# Its log probabilities are read from the logits: no step with it is usual.
READER = (1, len(SPECS))
READER_SPEC = SamplingSpec(logprobs=0, max_new_tokens=80)
PROMPT = 7


def make_verifier(folder: Path, specs: Sequence[SamplingSpec]) -> Verifier:
    config = EngineConfig(
        model_path=folder, dtype="float32", num_slots=1200, max_num_seqs=8, max_tree_nodes=12, max_model_len=96,
        torch_threads=1,
    )  # fmt: skip
    verifier = Verifier(ModelRunner(config, decoder=True), max_step_tokens=200)
    for number, spec in enumerate(specs):
        verifier.open(OpenRequest(key=(1, number), epoch=1, prompt=[number + 1] * PROMPT, output=[], sampling=spec))
    while verifier.prefill():
        pass
    return verifier


def random_tree(chance: random.Random, expected: Sequence[int]) -> tuple[list[int], list[int]]:
    """Some nodes, among them a path of tokens that plain decoding would take."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path = 0
    for number in range(1, 1 + chance.choice([0, 0, 2, 5, 12])):
        depth = parents_depth(parents, on_path)
        if depth < len(expected) and chance.random() < 0.5:
            tokens.append(expected[depth])
            parents.append(on_path)
            on_path = number
        else:
            tokens.append(chance.randrange(60))
            parents.append(chance.randrange(number))
    return tokens, parents


def parents_depth(parents: Sequence[int], node: int) -> int:
    depth = 0
    while node:
        node, depth = parents[node - 1], depth + 1
    return depth


def told(result: TreeResult) -> tuple[object, ...]:
    return result.outcome, list(result.accepted_nodes), list(result.token_ids), result.cached_tokens, result.ended


def run(verifier: Verifier, trees: Sequence[TreeRequest]) -> tuple[bool, list[TreeResult]]:
    """Whether the step was a usual one, and its results."""
    pending = verifier.begin(trees)
    return isinstance(pending.forward, TreeStep), verifier.finish(pending).results


def plain_outputs(folder: Path) -> list[list[int]]:
    verifier, lengths = make_verifier(folder, SPECS), [PROMPT] * len(SPECS)
    outputs: list[list[int]] = [[] for _ in SPECS]
    for _ in range(20):
        live = [number for number in range(len(SPECS)) if len(outputs[number]) < 20]
        trees = [TreeRequest(key=(1, n), epoch=1, length=lengths[n], tokens=(), parents=()) for n in live]
        for number, result in zip(live, verifier.step(trees).results, strict=True):
            outputs[number] += result.token_ids
            lengths[number] += len(result.token_ids)
    return outputs


@pytest.mark.parametrize("is_compiled", [True, False] if IS_COMPILED else [False])
def test_usual_steps_give_the_results_of_planned_ones(
    checkpoint: Path, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kv_slots, step_trees, tree_step):
        monkeypatch.setattr(module, "IS_COMPILED", is_compiled)
    expected = plain_outputs(checkpoint)
    usual, planned = make_verifier(checkpoint, SPECS), make_verifier(checkpoint, [*SPECS, READER_SPEC])
    chance = random.Random(3)
    outputs: list[list[int]] = [[] for _ in SPECS]
    live, reader_length, accepted = set(range(len(SPECS))), PROMPT, 0
    while live:
        numbers = [number for number in sorted(live) if chance.random() < 0.8]
        if not numbers:
            continue
        trees = []
        for number in numbers:
            tokens, parents = random_tree(chance, expected[number][len(outputs[number]) :])
            length = PROMPT + len(outputs[number])
            trees.append(TreeRequest(key=(1, number), epoch=1, length=length, tokens=tokens, parents=parents))
        was_usual, results = run(usual, trees)
        reader = TreeRequest(key=READER, epoch=1, length=reader_length, tokens=(), parents=())
        also_usual, [*others, read] = run(planned, [*trees, reader])
        assert was_usual and not also_usual
        assert [told(result) for result in results] == [told(result) for result in others]
        reader_length += len(read.token_ids)
        # What lies before the reader's root.
        assert planned.slots_used - usual.slots_used == reader_length - 1
        for number, result in zip(numbers, results, strict=True):
            outputs[number] += result.token_ids
            accepted += len(result.accepted_nodes)
            if result.ended:
                live.discard(number)
                for verifier in (usual, planned):
                    verifier.close((1, number), 1)
    assert accepted > 30
    assert usual.slots_used == 0


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(temperature=1.0, seed=4)])
@pytest.mark.parametrize("others", [0, 1])
def test_a_session_ends_in_the_middle_of_an_accepted_path(checkpoint: Path, spec: SamplingSpec, others: int) -> None:
    """At a stop token, at its last token, and at both; alone in the step, and beside a session that goes on."""
    verifier = make_verifier(checkpoint, [spec])
    chain: list[int] = []
    for _ in range(5):
        chain += verifier.step([asked(0, PROMPT + len(chain), tokens=[], parents=[])]).results[0].token_ids
    ends = next(place for place in (2, 3, 4, 1) if chain[place - 1] not in chain[: place - 1])
    stops = (chain[ends - 1],)
    for ending in (
        replace(spec, stop_token_ids=stops),
        replace(spec, max_new_tokens=ends),
        replace(spec, stop_token_ids=stops, max_new_tokens=ends),
    ):
        verifier = make_verifier(checkpoint, [ending] + [spec] * others)
        trees = [asked(number, tokens=chain, parents=[0, 1, 2, 3, 4]) for number in range(1 + others)]
        was_usual, [result, *_] = run(verifier, trees)
        assert was_usual and result.ended
        assert list(result.token_ids) == chain[:ends]
        assert list(result.accepted_nodes) == list(range(1, ends + 1)), "what lies past the end was not accepted"


def asked(number: int, length: int = PROMPT, **given: object) -> TreeRequest:
    wanted: dict[str, object] = {"key": (1, number), "epoch": 1, "length": length, "tokens": [5, 6], "parents": [0, 1]}
    return TreeRequest(**(wanted | given))  # pyright: ignore[reportArgumentType]


REFUSED = TreeResult(outcome=Outcome.ERROR, fault=SessionFault(Code.FAILED_PRECONDITION, "as it was settled"))


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (asked(1, tokens=[5, 1000]), Code.INVALID_ARGUMENT),
        (asked(1, tokens=[-1, 5]), Code.INVALID_ARGUMENT),
        (asked(1, parents=[0, 2]), Code.INVALID_ARGUMENT),
        (asked(1, parents=[-1, 0]), Code.INVALID_ARGUMENT),
        (asked(1, parents=[0]), Code.INVALID_ARGUMENT),
        (asked(1, PROMPT + 1), Code.FAILED_PRECONDITION),
        (asked(1, PROMPT - 1), Code.INVALID_ARGUMENT),
        (asked(1, epoch=0), Code.FAILED_PRECONDITION),
        (asked(1, epoch=2), Code.NOT_FOUND),
        (asked(9), Code.NOT_FOUND),
        (asked(1, settled=REFUSED), Code.FAILED_PRECONDITION),
    ],
)
def test_a_fault_is_its_sessions_own(checkpoint: Path, wrong: TreeRequest, code: Code) -> None:
    verifier = make_verifier(checkpoint, SPECS)
    was_usual, [first, second, third] = run(verifier, [asked(0), wrong, asked(2)])
    assert not was_usual
    assert first.outcome is third.outcome is Outcome.ACCEPTED
    assert second.fault is not None and second.fault.code is code
    assert run(verifier, [asked(0, PROMPT + len(first.token_ids))])[0], "the others go on"


def test_what_a_coordinator_sends_is_usual(checkpoint: Path) -> None:
    trees = target_pb2.TreeBatch(
        session_ids=[0, 2], epochs=[1, 1], lengths=[PROMPT, PROMPT], node_counts=[2, 0], tokens=[5, 6], parents=[0, 1]
    )
    batch, _ = unpack(target_pb2.VerifyRequest(incarnation=1, step=1, trees=trees))
    assert list(batch.trees) == [asked(0), asked(2, tokens=[], parents=[])]
    assert run(make_verifier(checkpoint, SPECS), batch.trees)[0]


def test_a_session_that_stands_twice_is_refused(checkpoint: Path) -> None:
    was_usual, results = run(make_verifier(checkpoint, SPECS), [asked(0), asked(0)])
    assert not was_usual
    assert [result.outcome for result in results] == [Outcome.ERROR] * 2


def test_what_has_ended_is_told_beside_the_others(checkpoint: Path) -> None:
    ended = TreeResult(outcome=Outcome.ENDED)
    was_usual, results = run(make_verifier(checkpoint, SPECS), [asked(0), asked(1, settled=ended), asked(2)])
    assert was_usual
    assert [result.outcome for result in results] == [Outcome.ACCEPTED, Outcome.ENDED, Outcome.ACCEPTED]


def test_prompts_go_along_with_the_trees_of_others(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, SPECS)
    verifier.open(OpenRequest(key=(1, 6), epoch=1, prompt=[8] * 9, output=[], sampling=SamplingSpec()))
    was_usual, [result] = run(verifier, [asked(0)])
    assert not was_usual and result.outcome is Outcome.ACCEPTED
    assert not verifier.has_pending_prefill


def test_a_session_that_is_closed_during_its_step_is_closed_at_the_end(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, SPECS)
    pending = verifier.begin([asked(0), asked(1)])
    assert isinstance(pending.forward, TreeStep)
    assert verifier.is_in_flight((1, 0))
    verifier.close((1, 0), 1)
    verifier.finish(pending)
    assert verifier.session_count == len(SPECS) - 1
    assert not verifier.is_in_flight((1, 1))


def test_trees_that_are_too_many_for_the_slots_are_cut(checkpoint: Path) -> None:
    config = EngineConfig(
        model_path=checkpoint, dtype="float32", num_slots=14, max_num_seqs=2, max_tree_nodes=12, max_model_len=96,
        torch_threads=1, enable_prefix_caching=False,
    )  # fmt: skip
    verifier = Verifier(ModelRunner(config, decoder=True), max_step_tokens=200)
    verifier.open(OpenRequest(key=(1, 0), epoch=1, prompt=[1] * PROMPT, output=[], sampling=SPECS[0]))
    while verifier.prefill():
        pass
    chain = [5] * 10
    was_usual, [result] = run(verifier, [asked(0, tokens=chain, parents=list(range(10)))])
    assert not was_usual and len(result.token_ids) == 1
