"""Every operator over inputs that nobody should send: indices out of range, cycles, NaN, odd sizes.

None of it may touch memory of others; what the operators answer is the business of other tests. `_WILD` numbers stand
where an index is expected, so that a missing bound shows as an access far outside. docs/kernels.md says how to run
these tests under a memory checker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import ops
from outrider.kernels.attention.rotary_store import rotary_store
from outrider.kernels.attention.slot_updates import gather_slot_rows, store_positions
from outrider.kernels.linear.gated_activation import gated_activation
from outrider.kernels.linear.residual_norm import residual_norm
from outrider.kernels.linear.skinny import gated_linear, linear, linear_parts

_WILD = (2**62, -(2**62), 2**63 - 1, -(2**63), 2**31, 2**32 + 1)
_WILD_INT32 = (2**31 - 1, -(2**31), 2**31 - 100, -5)
_SHAPES = ((2, 1), (3, 12), (2, 64), (2, 129))  # batch, nodes
_VOCABULARIES = (1, 111, 9001)


class Inputs:
    """Random tensors of one device, from one seed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def integers(self, *shape: int, below: int) -> torch.Tensor:
        """int64 in [0, below)."""
        return torch.randint(below, shape, generator=self._generator).to(self.device)

    def wild(self, *shape: int, below: int) -> torch.Tensor:
        """int64, most of them just in or out of [0, below), one in ten far out."""
        near = torch.randint(-3, below + 3, shape, generator=self._generator)
        far = torch.tensor(_WILD)[torch.randint(len(_WILD), shape, generator=self._generator)]
        return torch.where(torch.rand(shape, generator=self._generator) < 0.1, far, near).to(self.device)

    def floats(self, *shape: int) -> torch.Tensor:
        """float32, normal."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self._generator).to(self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """An output."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def walk_outputs(self, batch: int, nodes: int, most: int) -> list[torch.Tensor]:
        """predicts, accept_index and accept_token_num of a walk."""
        shapes = ((batch * nodes,), (batch, most), (batch,))
        return [self.zeros(*shape, dtype=torch.int32) for shape in shapes]

    def links(self, batch: int, nodes: int) -> list[torch.Tensor]:
        """retrive_index, retrive_next_token and retrive_next_sibling, cycles among them."""
        return [self.wild(batch, nodes, below=below) for below in (batch * nodes, nodes, nodes)]

    def sampling(self, rows: int, *, top_k: int, top_p: float, min_p: float) -> list[torch.Tensor]:
        """seeds, positions, temperature, top_k, top_p and min_p of a batch of rows."""
        columns = [
            self.wild(rows, below=2**40),
            self.integers(rows, below=999),
            self.zeros(rows, dtype=torch.float32) + 1,
        ]
        columns.append(torch.full((rows,), top_k, dtype=torch.int32, device=self.device))
        return columns + [torch.full((rows,), value, device=self.device) for value in (top_p, min_p)]


def trees(make: Inputs) -> None:
    """Trees built from pools and masks that are none."""
    topk, depth = 3, 4
    lengths = [(5, 5, 5)]
    if make.device.type != "cpu":
        lengths.append((-900, 128, _WILD[0]))  # on the CPU the size of a full mask is checked against them
    for batch, nodes in _SHAPES:
        pool = topk + (depth - 1) * topk**2
        for mode in ops.TreeMaskMode if nodes <= 64 else list(ops.TreeMaskMode)[:2]:
            for committed in lengths:
                cells = (batch * nodes * (nodes + 5), batch * nodes * nodes, batch * nodes)[mode]
                ops.build_tree_kernel_efficient(
                    make.wild(batch, topk * (depth - 1) + 1, below=pool),
                    make.wild(batch, nodes - 1, below=pool),
                    torch.tensor(committed[:batch], device=make.device),
                    make.zeros(cells, dtype=torch.int64 if mode == ops.TreeMaskMode.PACKED else torch.bool),
                    *(make.zeros(batch, nodes) for _ in range(4)),
                    topk=topk,
                    depth=depth,
                    draft_token_num=nodes,
                    tree_mask_mode=mode,
                )
        noise = make.uniform(batch * nodes * nodes) < 0.3
        outputs = [make.zeros(batch, nodes, dtype=torch.int32) for _ in range(4)]
        ops.reconstruct_indices_from_tree_mask(
            noise, make.integers(batch, below=9), *outputs, batch_size=batch, draft_token_num=nodes
        )
    bits, packed = make.zeros(20, dtype=torch.bool) | True, make.zeros(16, dtype=torch.uint8)
    for _ in range(6 if make.device.type != "cpu" else 0):  # on the CPU both are checked first
        ops.segment_packbits(bits, make.wild(9, below=20), make.wild(9, below=16), packed, 8)


def walks(make: Inputs) -> None:
    """Greedy and coupled walks over links that lead anywhere."""
    for batch, nodes in _SHAPES:
        for most in (1, 5, nodes + 3):
            outputs = make.walk_outputs(batch, nodes, most)
            candidates, chosen = make.integers(batch, nodes, below=2), make.integers(batch, nodes, below=2)
            tree = [candidates, *make.links(batch, nodes)]
            ops.verify_tree_greedy(*outputs, *tree, target_predict=chosen)
        names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
        logits = make.floats(batch * nodes, 111)
        logits[0, 0] = float("nan")
        results = dict(
            zip(("predicts", "accept_index", "accept_token_num"), make.walk_outputs(batch, nodes, 5), strict=True)
        )
        ops.verify_coupled(
            logits,
            *make.sampling(batch * nodes, top_k=0, top_p=1.0, min_p=0.0),
            candidates=make.wild(batch, nodes, below=111),
            **dict(zip(names, make.links(batch, nodes), strict=True)),
            **results,
        )


def probabilities(make: Inputs) -> None:
    """Trees and chains judged by probabilities, with tokens outside the vocabulary."""
    for batch, nodes in _SHAPES[:3]:
        for vocabulary in _VOCABULARIES:
            target = make.uniform(batch, nodes, vocabulary).softmax(dim=-1)
            for draft in (None, torch.zeros_like(target)):
                coins, finals = make.uniform(batch, nodes), make.uniform(batch)
                inputs = [make.wild(batch, nodes, below=vocabulary), *make.links(batch, nodes), coins, finals, target]
                outputs = make.walk_outputs(batch, nodes, 4)
                ops.tree_speculative_sampling_target_only(*outputs, *inputs, draft_probs=draft)
            drafts = nodes - 1
            ops.chain_speculative_sampling(
                target[:, :drafts].contiguous(), make.wild(batch, drafts, below=vocabulary), target, seed=1
            )


def choices(make: Inputs) -> None:
    """Choices and rankings under every filter, NaN and infinite logits among them."""
    for vocabulary in _VOCABULARIES:
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0),
            (min(50, vocabulary), 0.9, 0.0),
            (0, 0.5, 0.1),
            (2**31 - 1, 1.0, 0.0),
        ):
            logits = make.floats(4, vocabulary)
            logits[0, 0], logits[1, -1], logits[2] = float("nan"), float("inf"), float("-inf")
            columns = make.sampling(4, top_k=top_k, top_p=top_p, min_p=min_p)
            ops.coupled_choice(logits, *columns, choice_index=make.integers(4, below=16))
            ops.coupled_topk(logits, *columns, k=min(8, vocabulary))
            ops.coupled_topk_scored(logits, *columns, k=1)
            ops.filtered_probs(logits, *columns[2:])
    ops.philox_uint32(make.wild(4, below=9), make.wild(4, below=9), make.wild(4, 7, below=9))
    ops.gumbel_noise(make.wild(4, below=9), make.wild(4, below=9), 111)


def processors(make: Inputs) -> None:
    """Penalties, bias, allowed and banned lists whose tokens, lists and sessions lie outside."""
    rows, sessions, vocabulary = 5, 2, 9001
    lists = {}
    for name, owners in (
        ("count", sessions),
        ("path", rows),
        ("bias", sessions),
        ("allowed", sessions),
        ("banned", rows),
    ):
        lists[f"{name}_start"] = torch.arange(owners + 1, device=make.device, dtype=torch.int32) * 3
        lists[f"{name}_tokens"] = make.wild(3 * owners, below=vocabulary).int()
    penalty = make.uniform(sessions) + 0.5
    ops.apply_processors(
        make.floats(rows, vocabulary),
        ops.ProcessorBatch(
            row_session=make.wild(rows, below=sessions),
            repetition_penalty=penalty,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            count_output=make.integers(3 * sessions, below=3).int(),
            bias_values=make.floats(3 * sessions),
            **lists,
        ),
    )


def draft_inputs(make: Inputs) -> None:
    """The inputs of a draft from lengths and tables that contradict each other."""
    for batch in (1, 7, 130):
        rows, vocabulary = batch + 4, 9
        ops.eagle_step_update_slot_mapping_and_metadata(
            make.wild(batch, below=90), make.integers(batch, 3, below=99), make.wild(batch, below=90), 16, 100,
            make.zeros(batch), make.zeros(rows), rows,
        )  # fmt: skip
        outputs = [make.zeros(batch) for _ in range(2)]
        counts, drafts = make.wild(batch, below=9), make.wild(batch, below=9)
        ops.eagle_prepare_inputs_padded(counts, drafts, make.wild(batch + 1, below=9), *outputs)
        sampled, backup = make.wild(batch, 5, below=9), make.wild(batch, below=9)
        ops.eagle_prepare_next_token_padded(
            sampled, make.integers(batch, below=2).bool(), backup, *outputs, vocab_size=vocabulary
        )
        for shift in (True, False):
            tokens, padding = 3 * batch, 2
            written = tokens + batch * padding
            ops.copy_and_expand_eagle_inputs(
                make.integers(tokens, below=9), make.integers(tokens, below=9), make.integers(batch, below=9),
                make.wild(batch + 1, below=tokens), make.wild(batch, below=tokens), 0, 1, padding, shift,
                make.zeros(written), make.zeros(written), make.zeros(written, dtype=torch.bool),
                make.zeros(written, dtype=torch.bool), make.zeros(batch * padding), make.zeros(tokens),
            )  # fmt: skip


def attention(make: Inputs) -> None:
    """Trees and chunks with slots, lengths and starts out of range, each on its own and all together."""
    sessions, committed, heads, kv_heads = 2, 200, 8, 2
    dtype = torch.float32 if make.device.type == "cpu" else torch.bfloat16
    wild_slots = torch.tensor(_WILD_INT32, dtype=torch.int32, device=make.device)
    for nodes in (1, 16, 40):
        length = committed + nodes
        table = make.integers(sessions, length, below=sessions * length).int()
        broken_table = table.clone()
        broken_table[:, :4], broken_table[:, -1] = wild_slots, wild_slots[0]
        batch = ops.TreeAttentionBatch(
            slot_table=table,
            query_start=torch.arange(sessions + 1, device=make.device, dtype=torch.int32) * nodes,
            tree_start=torch.full((sessions,), committed, device=make.device, dtype=torch.int32),
            prefix_len=torch.full((sessions * nodes,), committed, device=make.device, dtype=torch.int32),
            key_len=torch.full((sessions,), length, device=make.device, dtype=torch.int32),
            tree_mask=make.wild(sessions * nodes, 1, below=2**40),
            max_query_len=nodes,
            max_key_len=length,
        )
        changes = {
            "slot_table": broken_table,
            "key_len": wild_slots[:sessions],
            "tree_start": wild_slots[1:3],
            "query_start": wild_slots[:3],
            "prefix_len": wild_slots[:sessions].repeat(nodes),
        }
        for head_dim in (64, 128):
            query = make.floats(sessions * nodes, heads, head_dim).to(dtype)
            keys, values = (make.floats(sessions * length, kv_heads, head_dim).to(dtype) for _ in range(2))
            for change in ({}, *({name: value} for name, value in changes.items()), changes):
                for softcap in (0.0, 3.0):
                    ops.tree_attention(
                        query, keys, values, dataclasses.replace(batch, **change), scale=0.1, softcap=softcap
                    )


def step_kernels(make: Inputs) -> None:
    """Run the kernels of a step beside attention: slot tables, norms, activations, products of odd sizes."""
    table = make.zeros(4, 60, dtype=torch.int32)
    gather_slot_rows(table, make.wild(5, below=4), make.wild(5, below=60), make.zeros(5, 70, dtype=torch.int32))
    store_positions(make.zeros(40, dtype=torch.int32), make.wild(50, below=40), make.integers(50, below=99).int())
    dtype = torch.float32 if make.device.type == "cpu" else torch.bfloat16
    for rows, head_dim in ((1, 64), (37, 128)):
        caches = [make.zeros(40, 2, head_dim, dtype=dtype) for _ in range(2)]
        slots, places = make.wild(rows, below=40), make.wild(rows, below=99)
        projected, angles = make.floats(1, rows, 12 * head_dim).to(dtype), make.floats(99, 2, head_dim // 2)
        rotary_store(projected, angles, places, slots, *caches, heads=8)
    for rows, width in ((1, 4096), (3, 1152), (70, 768)):
        hidden, weight = make.floats(rows, width).to(dtype), make.floats(width).to(dtype)
        residual_norm(hidden, make.floats(3, rows, width), weight, eps=1e-5)
        gated_activation(hidden, activation="silu")
    if make.device.type == "cpu":
        return  # the streaming products are for CUDA alone
    for rows, outputs, inner in ((1, 64, 64), (5, 1000, 776), (72, 520, 136)):
        inputs, weight = make.floats(rows, inner).to(dtype), make.floats(2 * outputs, inner).to(dtype)
        linear(inputs, weight)
        linear_parts(inputs, weight)
        linear_parts(inputs, weight, fixed=True)
        gated_linear(inputs, weight, activation="silu")


GROUPS: dict[str, Callable[[Inputs], None]] = {
    group.__name__: group
    for group in (trees, walks, probabilities, choices, processors, draft_inputs, attention, step_kernels)
}


def test_every_operator_is_among_them():
    source = Path(__file__).read_text(encoding="utf-8")
    # Two of the names compute nothing on the device.
    operators = {name for name in ops.__all__ if name[0].islower()} - {
        "create_config_for_draft_model",
        "extend_all_queries_by_N",
    }
    assert not {name for name in operators if f"ops.{name}(" not in source}


@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("group", GROUPS)
def test_references_and_kernels_survive_them(group: str, device: torch.device):
    GROUPS[group](Inputs(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
