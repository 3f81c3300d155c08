"""Sessions whose draft never leaves the target: what is sent of them, what comes back, and what is counted."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.coordinator.answers import check_verification
from outrider.coordinator.messages import (
    ResidentCount,
    SessionVerdict,
    SpeculationMode,
    TreeSubmission,
    VerifyResult,
)
from outrider.coordinator.one_graph_answers import RESIDENT, counted_apart, expected_counts
from outrider.coordinator.verdicts import Verdicts
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.v1 import target_pb2


def make_one_graph(bench, target, follow):
    """Lets a fake target draft one token for each resident session, which is right after every other length."""
    bench.scheduler._lanes["target"].one_graph = True
    verdict_of, stepped = target._verdict, target._step

    def verdict(tree: TreeSubmission, *, deferred: bool) -> SessionVerdict:
        if tree.resident:
            assert not tree.tokens
            tokens = target.sessions[tree.session_id][1]
            guess = follow(tokens, SamplingSpec(max_new_tokens=1))[0] if len(tokens) % 2 else 0
            tree = tree._replace(tokens=[guess], parents=[0])
        return verdict_of(tree, deferred=deferred)

    async def step(trees: Sequence[TreeSubmission]) -> VerifyResult:
        return counted_apart(await stepped(trees), {tree.session_id: 1 for tree in trees if tree.resident})

    target._verdict, target._step = verdict, step


async def test_resident_sessions_send_nothing_and_get_what_the_target_drafts(
    bench, expect_output, make_request, assert_idle
):
    target = bench.add_target(step_s=0.001, ahead=False)
    make_one_graph(bench, target, expect_output)
    requests = [make_request(number) for number in range(1, 5)]
    results = await asyncio.gather(*(bench.generate(request) for request in requests))
    for request, (outputs, result) in zip(requests, results, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
        counts = result.speculation
        assert counts.verify_steps + counts.accepted_tokens == 40
        assert counts.accepted_tokens > 5
        # A session of which one token is missing is not drafted for.
        assert counts.verify_steps - 1 <= counts.drafted_tokens <= counts.verify_steps
        (source,) = counts.sources
        assert source.source is GrowthSource.EAGLE
        assert (source.submitted, source.accepted) == (counts.drafted_tokens, counts.accepted_tokens)
    totals = bench.scheduler.totals
    assert totals.accepted_tokens == sum(result.speculation.accepted_tokens for _, result in results)
    assert_idle(bench)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": SpeculationMode.OFF},
        {"mode": SpeculationMode.SYNC},
        {"sources": frozenset({GrowthSource.NGRAM})},
        {"sampling": SamplingSpec(max_new_tokens=6, temperature=1.0, verification=VerificationRule.REJECTION)},
        {"sampling": SamplingSpec(max_new_tokens=6, grammar="root ::= [a-z]+", grammar_end_ids=(1,))},
        {"sampling": SamplingSpec(max_new_tokens=1)},
    ],
    ids=str,
)
async def test_others_are_verified_as_ever(bench, expect_output, make_request, changes):
    target = bench.add_target(ahead=False)
    make_one_graph(bench, target, expect_output)
    request = make_request(**{"sampling": SamplingSpec(max_new_tokens=6)} | changes)
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert not any(tree.resident for batch in target.batches for tree in batch)
    assert result.speculation.accepted_tokens == 0


async def test_nodes_of_other_sources_are_not_sent_for_resident_sessions(bench, expect_output, make_request):
    target = bench.add_target(step_s=0.002, ahead=False)
    draft = bench.add_draft(accuracy=1.0)
    make_one_graph(bench, target, expect_output)
    request = make_request()
    outputs, _ = await bench.generate(request)
    assert not draft.closed, "it was opened where nobody asks for nodes"
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    sent = [tree for batch in target.batches for tree in batch]
    assert not any(tree.tokens for tree in sent)
    # All but a last one that needs no draft.
    assert sum(tree.resident for tree in sent) >= len(sent) - 1
    # Whoever wants another source has it.
    request = make_request(sources=frozenset({GrowthSource.MODEL}))
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert draft.closed
    assert result.speculation.accepted_tokens > 0


def answer(**changes: Any) -> target_pb2.VerifyResponse:
    columns: dict[str, Any] = {
        "session_ids": [7, 8, 9], "accepted_counts": [1, 0, 2], "accepted_nodes": [1, 1, 4],
        "token_counts": [2, 1, 3], "tokens": [1, 2, 3, 4, 5, 6], "drafted_counts": [3, 0, 6],
        "outcomes": [target_pb2.OUTCOME_ACCEPTED] * 3,
    }  # fmt: skip
    return target_pb2.VerifyResponse(**columns | changes)


def test_drafted_counts_bound_what_may_be_accepted():
    counts, own = expected_counts(answer(), {7: RESIDENT, 8: 2, 9: RESIDENT})
    assert counts == {7: 3, 8: 2, 9: 6}
    assert own == {7: 3, 9: 6}
    check_verification(answer(), counts, vocab_size=10)
    fewer = answer(drafted_counts=[3, 0, 2])
    counts, _ = expected_counts(fewer, {7: RESIDENT, 8: 2, 9: RESIDENT})
    with pytest.raises(ValueError, match=r"nodes \[1, 4\] accepted of a tree of 2"):
        check_verification(fewer, counts, vocab_size=10)


def test_an_answer_without_counts_means_that_nothing_was_drafted():
    counts, own = expected_counts(answer(drafted_counts=[]), {7: RESIDENT, 8: 0, 9: RESIDENT})
    assert own == {7: 0, 9: 0}
    assert counts == {7: 0, 8: 0, 9: 0}


@pytest.mark.parametrize("drafted", [[1, 2], [1, 2, 65]])
def test_counts_that_cannot_be_end_the_stream(drafted):
    with pytest.raises(ValueError, match="drafted_counts"):
        expected_counts(answer(drafted_counts=drafted), {7: RESIDENT, 8: RESIDENT, 9: RESIDENT})


def test_accepted_nodes_become_counts():
    verdicts = [SessionVerdict(7, 1, accepted_nodes=[1], token_ids=[1, 2]), SessionVerdict(8, 1, accepted_nodes=[2])]
    result = VerifyResult(step=1, verdicts=verdicts, step_ns=1, forward_ns=1, step_tokens=4)
    told = counted_apart(result, {7: 3})
    assert told.resident == {7: ResidentCount(3, 1)}
    assert [verdict.accepted_nodes for verdict in told.verdicts] == [(), [2]]
    # They stay columns on their way to the commit.
    assert isinstance(told.verdicts, Verdicts)
    assert counted_apart(result, {}) is result
