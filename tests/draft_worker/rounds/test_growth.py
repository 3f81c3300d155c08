"""Growth as columns: what belongs to which session and to which owner."""

from tests.draft_worker.session_growth import sessions_of
from tests.draft_worker.table_model import session_start

from outrider.draft_distribution import DraftDistribution
from outrider.draft_worker.rounds.growth import Growth
from outrider.growth_source import GrowthSource


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
