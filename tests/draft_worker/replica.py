"""A replica of a session's trees: a pool as a target has one, with a place for each drafter of a worker."""

import torch
from tests.draft_worker.session_growth import SessionGrowth

from outrider.drafting.growth_source import GrowthSource
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import Records

LONGEST = 700
PLACES = {GrowthSource.MODEL: 0, GrowthSource.NGRAM: 1}

Tree = dict[tuple[int, ...], tuple[list[int], float, float]]


class Replica:
    """A session of a target's pool."""

    def __init__(self, tokens: list[int]) -> None:
        self.pool = Pool.allocate(sessions=1, max_len=LONGEST, places=len(PLACES))
        self.pool.history[0, : len(tokens)] = torch.tensor(tokens)
        records = Records()
        records.open(0, 1, length=len(tokens), cached=len(tokens) - 1, end=LONGEST, allow=LONGEST)
        self._graft(records)

    def take(self, source: GrowthSource, own: SessionGrowth) -> list[int]:
        """Graft a session's growth; return the verdicts on its nodes."""
        records = Records()
        for place in PLACES.values() if own.forgot else ():
            records.forget(0, 1, place=place)
        forgotten = len(records)
        columns = own.node_ids, own.parents, own.tokens, own.acceptance
        for node_id, parent, token, acceptance in zip(*columns, strict=True):
            records.growth(
                0, 1, place=PLACES[source], node_id=node_id, parent_id=parent, as_of=own.as_of, token=token,
                acceptance=acceptance,
            )  # fmt: skip
        return self._graft(records)[forgotten:]

    def commit(self, tokens: list[int]) -> None:
        records = Records()
        records.commit(0, 1, tokens)
        self._graft(records)

    def _graft(self, records: Records) -> list[int]:
        commits, num_commits = torch.zeros(1, LONGEST, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        verdicts, count = torch.zeros(len(records), dtype=torch.int32), torch.tensor([len(records)], dtype=torch.int32)
        graft(self.pool, torch.from_numpy(records.array()), count, verdicts, commits, num_commits)
        re_root(self.pool, commits, num_commits)
        return verdicts.tolist()

    @property
    def tree(self) -> Tree:
        """Ids, acceptance and value of every node, by its path."""
        pool, paths = self.pool, dict[int, tuple[int, ...]]({-1: ()})
        columns = (column[0].tolist() for column in (pool.parent, pool.token, pool.ids, pool.acceptance, pool.value))
        found: Tree = {}
        rows = zip(*columns, strict=True)
        for entry, (parent, token, ids, acceptance, value) in zip(range(int(pool.count[0])), rows):  # noqa: B905 - the first `count` entries
            paths[entry] = (*paths[parent], token)
            found[paths[entry]] = ids, acceptance, value
        return found

    def tree_of(self, *sources: GrowthSource) -> dict[tuple[int, ...], list[int]]:
        """Paths and ids of the nodes of some drafters."""
        ids = {path: [ids[PLACES[source]] for source in sources] for path, (ids, _, _) in self.tree.items()}
        return {path: found for path, found in ids.items() if any(found)}
