"""Steps of random rows, as a drafter packs them."""

from __future__ import annotations

import numpy as np
import torch

from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import COMMITTED, PADDING, ROOT, Packed
from outrider.kernels.sampling.rows import PARAMETERS
from outrider.sampling import SamplingSpec

SESSIONS, MOST_ROWS = 9, 60


class RandomStep:
    """A step of random rows: four sessions, each with committed tokens, its root or none, and entries; then padding."""

    def __init__(self, seed: int, device: torch.device, *, rows: int = MOST_ROWS) -> None:
        chance = np.random.default_rng(seed)
        self.pool = Pool.allocate(
            sessions=SESSIONS, max_len=90, capacity=16, places=1, trail=2, node_slots=64, device=device
        )
        self.pool.length.copy_(torch.from_numpy(chance.integers(1, 80, SESSIONS)))
        assert self.pool.nodes is not None
        self.pool.nodes.free_head.fill_(17)
        self.pool.nodes.free_tail.fill_(2**33)
        self.packed = Packed.allocate(self.pool, (rows, 4, 30, 30), scrap_slot=63)
        entries, sessions, starts = [], [], [0]
        for session in range(4):
            own = [*[COMMITTED] * chance.integers(3), *[ROOT] * chance.integers(2), *range(chance.integers(1, 6))]
            entries, sessions = entries + own, sessions + [session] * len(own)
            starts.append(len(entries))
        self.used = len(entries)
        entries += [PADDING] * (rows - self.used)
        sessions += [-1] * (rows - self.used)
        columns = {
            "entries": entries, "sessions": sessions, "query_start": starts,
            "positions": chance.integers(0, 80, rows), "pool_rows": chance.permutation(SESSIONS)[:4],
        }  # fmt: skip
        for name, column in columns.items():
            getattr(self.packed, name).copy_(torch.from_numpy(np.array(column)))
        self.specs = [
            SamplingSpec(
                seed=int(chance.integers(2**63)) * 2 + 1, temperature=chance.choice([0, 0.5, 3e38]), top_k=number - 1,
                top_p=0.1 * number, min_p=0.01 * number, choice_index=number,
            )
            for number in range(SESSIONS)
        ]  # fmt: skip
        records = np.array([np.frombuffer(spec.record, np.int32) for spec in self.specs])
        records[:, -1] = np.arange(SESSIONS) % 2
        assert records.shape == (SESSIONS, PARAMETERS)
        self.parameters = torch.from_numpy(records).to(device)
