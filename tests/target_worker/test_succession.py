"""Batches sent ahead: what becomes of them at the end of the step that they follow."""

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.succession import addition_from_proto, succession_from_proto
from outrider.target_worker.sessions import DEFERRED, Code, Outcome, SessionFault, TreeRequest, TreeResult
from outrider.target_worker.succession import StreamSteps, Successor
from outrider.target_worker.unpacking import unpack, unpack_addition
from outrider.v1 import target_pb2
from outrider.wire import floats_to_bytes

Nodes = Sequence[tuple[int, int]]
"""(token, parent) of each."""


def batch(follows: int, *sessions: tuple[int, int, Nodes]) -> target_pb2.TreeBatch:
    """Of (number, length, nodes); a successor where it follows a step."""
    nodes = [node for _, _, own in sessions for node in own]
    trees = target_pb2.TreeBatch(
        session_ids=[number for number, _, _ in sessions],
        epochs=[1] * len(sessions),
        lengths=[length for _, length, _ in sessions],
        node_counts=[len(own) for _, _, own in sessions],
        tokens=[token for token, _ in nodes],
        parents=[parent for _, parent in nodes],
        follows=follows,
    )
    if follows:
        trees.values = floats_to_bytes([1.0] * len(nodes))
        trees.max_nodes.extend([8] * len(sessions))
        trees.max_depths.extend([8] * len(sessions))
        trees.max_total_nodes = 64
    return trees


def successor(*sessions: tuple[int, int, Nodes], follows: int = 1, epoch: int = 1) -> Successor:
    """Of (number, length, nodes), all nodes as good as certain."""
    return Successor(
        follows=follows,
        keys=[(1, number) for number, _, _ in sessions],
        epochs=[epoch] * len(sessions),
        lengths=[length for _, length, _ in sessions],
        trees=succession_from_proto(batch(follows, *sessions)),
    )


def stream_after(result: TreeResult, *, tokens: Sequence[int] = (), resident: bool = False) -> StreamSteps:
    """After step 1 of session 1, of 10 tokens and a chain."""
    steps = StreamSteps()
    parents = list(range(len(tokens)))
    asked = TreeRequest(key=(1, 1), epoch=1, length=10, tokens=tokens, parents=parents, resident=resident)
    steps.ends(1, [asked], [result])
    return steps


def accepted(nodes: Sequence[int], tokens: Sequence[int], **fields: Any) -> TreeResult:
    return TreeResult(outcome=Outcome.ACCEPTED, accepted_nodes=nodes, token_ids=tokens, **fields)


def test_the_tree_is_what_hangs_below_the_emitted_tokens() -> None:
    steps = stream_after(accepted([1], [5, 7]), tokens=[5, 6])
    # Below node 1 the tokens 7 and 8, below node 2 the token 7; only the first has happened.
    sent = successor((1, 10, [(8, 1), (7, 1), (7, 2), (3, 4), (2, 5), (4, 3), (9, 6)]))
    (tree,) = steps.trees_of(sent)
    assert (tree.key, tree.epoch, tree.length, tree.settled) == ((1, 1), 1, 12, None)
    assert (list(tree.tokens), list(tree.parents)) == ([3, 9], [0, 1])


def test_a_miss_is_a_plain_step() -> None:
    (tree,) = stream_after(accepted([], [7])).trees_of(successor((1, 10, [(8, 0), (3, 1)])))
    assert (tree.length, list(tree.tokens), tree.settled) == (11, [], None)


@pytest.mark.parametrize(
    "result",
    [
        accepted([], [7], ended=True),
        TreeResult(outcome=Outcome.ENDED),
        TreeResult(outcome=Outcome.ERROR, fault=SessionFault(Code.NOT_FOUND, "gone")),
    ],
    ids=["stop token", "ended before", "error"],
)
def test_after_its_last_step_a_session_has_ended(result: TreeResult) -> None:
    (tree,) = stream_after(result).trees_of(successor((1, 10, [(7, 0), (3, 1)])))
    assert tree.settled is not None
    assert tree.settled.outcome is Outcome.ENDED


def test_a_deferred_session_runs_from_its_root_without_a_tree() -> None:
    (tree,) = stream_after(DEFERRED, tokens=[5]).trees_of(successor((1, 10, [(7, 0), (3, 2)])))
    assert (tree.length, list(tree.tokens), tree.settled) == (10, [], None)


def test_below_nodes_that_were_never_sent_nothing_hangs() -> None:
    result = accepted([1], [5, 7], drafted=3)
    (tree,) = stream_after(result, resident=True).trees_of(successor((1, 10, [(7, 1), (3, 1)])))
    assert (tree.length, list(tree.tokens)) == (12, [])


@pytest.mark.parametrize("epoch", [1, 2])
def test_sessions_outside_the_step_are_verified_as_they_stand(epoch: int) -> None:
    """Of those that are opened again as well."""
    steps = stream_after(accepted([], [7]))
    first, other = steps.trees_of(successor((1, 10, [(7, 0), (3, 1)]), (2, 4, [(7, 0), (3, 1)]), epoch=epoch))
    assert (other.length, list(other.tokens), list(other.parents)) == (4, [7, 3], [0, 1])
    assert (first.length, list(first.tokens)) == ((11, [3]) if epoch == 1 else (10, [7, 3]))


def test_what_does_not_fit_the_step_is_that_session_s_fault() -> None:
    steps = StreamSteps()
    asked = [TreeRequest(key=(1, number), epoch=1, length=10, tokens=[5], parents=[0]) for number in (1, 2, 3)]
    steps.ends(1, asked, [accepted([], [7])] * 3)
    trees = steps.trees_of(successor((1, 11, [(7, 0), (3, 2)]), (2, 10, [(7, 0), (3, 3)]), (3, 10, [(7, 0), (3, 2)])))
    faults = [None if tree.settled is None else tree.settled.fault for tree in trees]
    assert [None if fault is None else fault.code for fault in faults] == [
        Code.FAILED_PRECONDITION,
        Code.INVALID_ARGUMENT,
        None,
    ]
    assert list(trees[2].tokens) == [3]


def addition(step: int, *sessions: Nodes) -> target_pb2.TreeAddition:
    """Nodes more of each session of a successor, all as good as certain."""
    nodes = [node for own in sessions for node in own]
    return target_pb2.TreeAddition(
        step=step,
        node_counts=list(map(len, sessions)),
        tokens=[token for token, _ in nodes],
        parents=[parent for _, parent in nodes],
        values=floats_to_bytes([1.0] * len(nodes)),
    )


def add(steps: StreamSteps, *sessions: Nodes) -> None:
    steps.add(addition_from_proto(addition(2, *sessions)))


ASKED = TreeRequest(key=(1, 1), epoch=1, length=10, tokens=(), parents=())


def expecting(sent: Successor) -> StreamSteps:
    """While step 1 of session 1 runs, of a root alone."""
    steps = StreamSteps()
    steps.expect(sent)
    return steps


@pytest.mark.parametrize("is_answered_first", [True, False])
def test_what_is_added_before_the_step_is_looked_at_counts_and_later_ones_do_not(is_answered_first: bool) -> None:
    sent = successor((1, 10, [(7, 0)]))
    steps = expecting(sent)
    add(steps, [(3, 1)])
    add(steps, [(4, 2), (8, 0)])
    steps.ends(1, [ASKED], [accepted([], [7])])
    # The step has ended, but neither the one nor the other end has looked at what follows.
    add(steps, [(5, 3)])
    if is_answered_first:
        assert steps.answers(1) == 3
        add(steps, [(6, 5)])
        (tree,) = steps.trees_of(sent)
    else:
        (tree,) = steps.trees_of(sent)
        add(steps, [(6, 5)])
        assert steps.answers(1) == 3
    assert (list(tree.tokens), list(tree.parents)) == ([3, 4, 5], [0, 1, 2])
    assert sent.settle().additions == 3


def test_a_successor_that_comes_after_the_answer_gets_none() -> None:
    """It said so."""
    steps, sent = StreamSteps(), successor((1, 10, [(7, 0), (3, 1)]))
    steps.ends(1, [ASKED], [accepted([], [7])])
    assert steps.answers(1) == 0
    steps.expect(sent)
    add(steps, [(4, 2)])
    (tree,) = steps.trees_of(sent)
    assert list(tree.tokens) == [3]


def test_additions_are_the_successor_s_alone() -> None:
    """Neither a plain batch takes any, nor does an answer tell of those to another one."""
    steps, sent = StreamSteps(), successor((1, 10, [(7, 0)]), follows=2)
    steps.expect(None)
    add(steps, [(3, 1)])
    steps.expect(sent)
    add(steps, [(3, 1)])
    assert steps.answers(1) == 0
    steps.ends(2, [ASKED], [accepted([], [7])])
    assert steps.answers(2) == 1
    (tree,) = steps.trees_of(sent)
    assert list(tree.tokens) == [3]


@pytest.mark.parametrize("follows", [0, 2], ids=["a plain one", "a successor"])
def test_an_answer_tells_of_a_successor_that_has_begun_whatever_has_come_behind_it(follows: int) -> None:
    steps, sent = StreamSteps(), successor((1, 10, [(7, 0)]))
    steps.expect(sent)
    add(steps, [(3, 1)])
    steps.ends(1, [ASKED], [accepted([], [7])])
    (tree,) = steps.trees_of(sent)
    steps.expect(successor((1, 10, []), follows=follows) if follows else None)
    assert (list(tree.tokens), steps.answers(1)) == ([3], 1)


def test_an_answer_and_the_trees_agree_where_the_next_batch_has_come_before_either() -> None:
    steps, sent = StreamSteps(), successor((1, 10, [(7, 0)]))
    steps.expect(sent)
    add(steps, [(3, 1)])
    steps.expect(successor((1, 10, []), follows=2))
    steps.ends(1, [ASKED], [accepted([], [7])])
    told = steps.answers(1)
    (tree,) = steps.trees_of(sent)
    assert len(tree.tokens) == told


@pytest.mark.parametrize("prepared", range(5))
def test_whoever_checks_what_was_added_finds_the_same(prepared: int) -> None:
    """The step thread, before or after any of the additions, or the reader's; torn parents are one session's fault."""
    asked = [TreeRequest(key=(1, number), epoch=1, length=10, tokens=[5], parents=[0]) for number in (1, 2, 3)]
    sent = successor(*((number, 10, [(7, 0)]) for number in (1, 2, 3)))
    steps = expecting(sent)
    # Session 2's node hangs below one that never comes; session 1's below one that comes with it.
    for turn, more in enumerate([([(3, 2)], [], [(4, 2)]), ([], [(3, 9)], [(8, 3)]), ([(9, 3)], [(1, 2)], [])]):
        if turn == prepared:
            steps.prepare(sent, 1, asked)
        add(steps, *more)
    if prepared == 3:
        steps.prepare(sent, 1, asked)
    steps.ends(1, asked, [accepted([], [7])] * 3)
    trees = steps.trees_of(sent)
    faults = [None if tree.settled is None or tree.settled.fault is None else tree.settled.fault.code for tree in trees]
    assert faults == [None, Code.INVALID_ARGUMENT, None]
    found = [(list(trees[place].tokens), list(trees[place].parents)) for place in (0, 2)]
    assert found == [([3, 9], [0, 1]), ([4, 8], [0, 1])]


def test_an_addition_that_has_torn_parents_after_the_check_is_found_torn() -> None:
    """And one that comes too late is nobody's fault."""
    for is_late in (False, True):
        sent = successor((1, 10, [(7, 0), (3, 1)]))
        steps = expecting(sent)
        steps.prepare(sent, 1, [ASKED])
        if is_late:
            steps.ends(1, [ASKED], [accepted([], [7])])
            assert steps.answers(1) == 0
            add(steps, [(4, 3)])
        else:
            add(steps, [(4, 3)])
            steps.ends(1, [ASKED], [accepted([], [7])])
        (tree,) = steps.trees_of(sent)
        assert (tree.settled is None) == is_late


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": 1}, "addition.step"),
        ({"step": 3}, "addition.step"),
        ({"node_counts": [1]}, "addition.node_counts"),
        ({"node_counts": [2, 1]}, "addition.tokens"),
        ({"tokens": [3]}, "addition.tokens"),
        ({"parents": [1]}, "addition.parents"),
        ({"values": b"1234567"}, "addition.values"),
        ({"values": floats_to_bytes([0.5, 1.5])}, "addition.values"),
        ({"values": floats_to_bytes([-0.5, 0.5])}, "addition.values"),
        ({"values": floats_to_bytes([0.5, float("nan")])}, "addition.values"),
    ],
    ids=str,
)
def test_an_addition_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    sent, right = successor((1, 10, [(7, 0)]), (2, 10, [(7, 0)])), addition(2, [(3, 1)], [(4, 1)])
    assert unpack_addition(right, sent, 2).counts.tolist() == [1, 1]
    for name in changes:
        right.ClearField(name)  # pyright: ignore[reportArgumentType]
    right.MergeFrom(target_pb2.TreeAddition(**changes))
    with pytest.raises(InvalidRequest) as caught:
        unpack_addition(right, sent, 2)
    assert field in [violation.field for violation in caught.value.violations]


def test_nothing_is_added_to_a_batch_that_follows_none() -> None:
    with pytest.raises(InvalidRequest, match=r"addition\.step: 2 given"):
        unpack_addition(addition(2), None, 2)


@pytest.mark.parametrize(
    "beside", [{"step": 3}, {"close_session_ids": [1], "close_epochs": [1]}], ids=["a step", "a close"]
)
def test_an_addition_comes_by_itself(beside: dict[str, Any]) -> None:
    message = target_pb2.VerifyRequest(incarnation=1, addition=addition(2), **beside)
    with pytest.raises(InvalidRequest, match="addition: given with a step"):
        unpack(message, last_step=2)
