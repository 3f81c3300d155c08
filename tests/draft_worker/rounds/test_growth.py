"""Growth as columns: what belongs to which session and to which owner."""

from tests.draft_worker.session_growth import sessions_of
from tests.draft_worker.table_model import session_start

from outrider.draft_worker.rounds.growth import Growth
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.growth_source import GrowthSource


def test_growth_is_split_between_sessions_and_owners():
    one, other = object(), object()
    q = DraftDistribution.quantised([4, 5], [0.5, 0.5])
    growth = Growth(GrowthSource.NGRAM, step_ns=7, forward_ns=5, rows=9, num_sessions=4)
    growth.add(session_start(1, owner=one), 3, [2, 4], [0, 2], [8, 9], [0.5, 0.25])
    growth.add(session_start(2, owner=other, epoch=6), 5, [2], [0], [4], [0.75], distributions=[q])
    growth.add(session_start(3, owner=one), 3, [], [], [], [], complete=True)
    first, second, third = sessions_of(growth)
    assert (first.owner, first.session_id, first.epoch, first.as_of, first.complete) == (one, 1, 1, 3, False)
    assert (first.node_ids, first.parents, first.tokens, first.acceptance) == ([2, 4], [0, 2], [8, 9], [0.5, 0.25])
    assert (first.distributions, second.distributions, third.distributions) == ([None, None], [q], [])
    assert (second.owner, second.epoch, third.session_id, third.complete) == (other, 6, 3, True)
    parts = dict(growth.by_owner())
    assert [sessions_of(parts[owner]) for owner in (one, other)] == [[first, third], [second]]
    for part in parts.values():
        assert (part.source, part.step_ns, part.forward_ns) == (GrowthSource.NGRAM, 7, 5)
        assert (part.rows, part.num_sessions) == (9, 4)
    # Nothing is copied where there is one owner.
    assert next(parts[other].by_owner())[1] is parts[other]


def test_steps_that_follow_each_other_are_joined():
    owner = object()
    first, following = (
        Growth(step_ns=ns, forward_ns=ns - 1, rows=ns - 2, num_sessions=number) for ns, number in ((7, 2), (5, 1))
    )
    first.add(session_start(1, owner=owner), 3, [2, 4], [0, 2], [8, 9], [0.5, 0.25])
    first.add(session_start(2, owner=owner), 5, [2], [0], [4], [0.75])
    following.add(session_start(1, owner=owner, epoch=6), 4, [5], [0], [7], [0.125])
    before = sessions_of(first) + sessions_of(following)
    assert first.can_be_joined and following.can_be_joined
    first.join(following)
    assert sessions_of(first) == before
    assert (first.steps, first.step_ns, first.forward_ns, first.rows, first.num_sessions) == (2, 12, 10, 8, 3)


def test_growth_that_says_more_than_its_nodes_is_not_joined():
    q = DraftDistribution.quantised([4, 5], [0.5, 0.5])
    others = [
        Growth(GrowthSource.NGRAM, rows=1),
        Growth(),
        Growth(rows=1, complete=[False, True]),
        Growth(rows=1, forgot=[True]),
        Growth(rows=1, again=[True]),
        Growth(rows=1, distributions=[q]),
    ]
    assert Growth(rows=1, complete=[False], forgot=[False], again=[False]).can_be_joined
    assert not any(growth.can_be_joined for growth in others)
