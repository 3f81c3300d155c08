"""Batches of tree attention: sessions with a tree or a chunk of a prompt, their keys in slots of random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from outrider.kernels.tree_attention import TreeAttentionBatch


@dataclass(frozen=True)
class Session:
    """`committed` keys in the prefix, then a tree of `nodes` or of given `parents`, or `rows` of a prompt's chunk."""

    committed: int
    nodes: int = 0
    rows: int = 0
    parents: Sequence[int] = ()

    @property
    def query_len(self) -> int:
        return len(self.parents) or self.nodes or self.rows


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
        if parents := session.parents or random_tree(session.nodes):
            bits = ancestor_bits(parents)
            at += [session.committed + row.bit_count() - 1 for row in bits]
            masks += [[(row >> (64 * word)) & (2**64 - 1) for word in range(words)] for row in bits]
            prefix_len += [session.committed] * len(parents)
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


def random_tree(nodes: int, depth: int = 9) -> list[int]:
    """Parents among the `depth` nodes before: deep for a small number, bushy for a large one; the root's is -1."""
    return [int(torch.randint(max(0, node - depth), node, ())) if node else -1 for node in range(nodes)]


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """The mask of every node: itself, its parent, and so on."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((1 << node) | (masks[parent] if parent >= 0 else 0))
    return masks


def attention_tensors(
    rows: int,
    num_slots: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries and both caches, for heads of queries and of keys."""
    query = torch.randn(rows, heads[0], head_dim, device=device)
    key, value = torch.randn(2, num_slots, heads[1], head_dim, device=device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def on(device: torch.device | str, batch: TreeAttentionBatch) -> TreeAttentionBatch:
    """Return the batch on a device."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    moved = {name: column.to(device) for name, column in columns.items() if isinstance(column, torch.Tensor)}
    return replace(batch, **moved)
