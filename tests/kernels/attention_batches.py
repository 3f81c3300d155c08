"""Batches of tree attention: sessions with a tree or a chunk of a prompt, their keys in slots of random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from outrider.kernels.tree_attention import TreeAttentionBatch


@dataclass(frozen=True)
class Session:
    """`committed` keys in the prefix, then a tree of `nodes` or, at 0 nodes, a chunk of `rows` prefill rows."""

    committed: int
    nodes: int = 0
    rows: int = 0

    @property
    def query_len(self) -> int:
        return self.nodes or self.rows


def make_batch(
    sessions: Sequence[Session], *, num_slots: int, free_rows: int = 0, **changes: Any
) -> TreeAttentionBatch:
    """The sessions' batch, with rows of no session behind them; `changes` are columns and bounds by name."""
    query_len = [session.query_len for session in sessions]
    key_len = [session.committed + rows for session, rows in zip(sessions, query_len, strict=True)]
    words = max(1, -(-max(query_len) // 64))
    order, table = torch.randperm(num_slots).int(), torch.full((len(sessions), max(key_len) + 3), -1).int()
    slot_positions = torch.zeros(num_slots, dtype=torch.int32)
    prefix_len, positions, masks, taken = [], [], [], 0
    for number, (session, keys) in enumerate(zip(sessions, key_len, strict=True)):
        table[number, :keys] = order[taken : taken + keys]
        taken += keys
        at = list(range(session.committed))
        if session.nodes:
            bits, depths = random_tree(session.nodes)
            at += [session.committed + depth for depth in depths]
            masks += [[(row >> (64 * word)) & (2**64 - 1) for word in range(words)] for row in bits]
            prefix_len += [session.committed] * session.nodes
        else:
            at += range(session.committed, keys)
            masks += [[0] * words] * session.rows
            prefix_len += range(session.committed + 1, keys + 1)
        positions += at[session.committed :]
        slot_positions[table[number, :keys].long()] = torch.tensor(at, dtype=torch.int32)
    assert taken <= num_slots
    signed = [[word - 2**64 if word >= 2**63 else word for word in row] for row in masks]
    columns: dict[str, Any] = {
        "slot_table": table,
        "query_start": torch.tensor([0, *query_len]).cumsum(0).int(),
        "tree_start": torch.tensor([session.committed for session in sessions]).int(),
        "prefix_len": torch.tensor([*prefix_len, *[5] * free_rows]).int(),
        "key_len": torch.tensor(key_len).int(),
        "tree_mask": torch.tensor([*signed, *[[-1] * words] * free_rows]),
        "max_query_len": max(query_len),
        "max_key_len": max(key_len),
        "positions": torch.tensor([*positions, *[0] * free_rows]).int(),
        "slot_positions": slot_positions,
    }
    return TreeAttentionBatch(**{**columns, **changes})


def random_tree(nodes: int) -> tuple[list[int], list[int]]:
    """Ancestor bits (self included) and depths of a random tree whose first node is the root."""
    bits, depths = [1], [0]
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 9), node, ()))
        bits.append(bits[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return bits, depths


def on(device: torch.device | str, batch: TreeAttentionBatch) -> TreeAttentionBatch:
    """Return the batch on a device."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    moved = {name: column.to(device) for name, column in columns.items() if isinstance(column, torch.Tensor)}
    return replace(batch, **moved)
