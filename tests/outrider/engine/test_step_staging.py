"""A step's bytes hold the step: unpacked they say what was packed, filled up with nothing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.engine.batch import BatchBuilder, ForwardBatch, TreeChoices
from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepBuffers, StepLayout
from outrider.engine.step_program import answer_len
from outrider.engine.step_staging import StepAnswer, stage_step
from outrider.engine.step_trees import read_answer
from outrider.tree import ancestor_masks

BUCKET = Bucket(tokens=12, sessions=4, keys=32, query_len=12, logit_rows=8, nodes=5, words=2)
CPU = torch.device("cpu")


def table_with(lengths: list[int]) -> SlotTable:
    """Rows whose slots interleave."""
    slots = SlotTable(num_slots=200, max_rows=6, max_row_len=32)
    rows = [slots.acquire_row() for _ in lengths]
    for step in range(max(lengths)):
        for row, length in zip(rows, lengths, strict=True):
            if step < length:
                slots.extend(row, 1)
    return slots


def chain_and_tree() -> ForwardBatch:
    """Row 1: a chain of three, whose last logits are wanted; row 0: a chain of one and a tree of four behind 7 keys."""
    builder = BatchBuilder()
    builder.add_chain(1, [21, 22, 23], 2, True)
    builder.add_chain(0, [31], 7, False)
    builder.add_tree(
        0,
        tree_start=8,
        token_ids=[40, 41, 42, 43],
        positions=[8, 9, 9, 10],
        masks=ancestor_masks([0, 0, 1]),
        write_indices=range(8, 12),
    )
    return builder.build()


def choices() -> TreeChoices:
    rows = np.arange(5, dtype=np.int32)
    links = np.arange(8, dtype=np.int32).reshape(2, 4)
    return TreeChoices(
        seeds=rows.astype(np.int64) - (1 << 62),
        positions=rows + 10,
        temperature=rows.astype(np.float32),
        top_p=(rows / 8).astype(np.float32),
        min_p=(rows / 16).astype(np.float32),
        top_k=rows + 20,
        choice_index=rows + 30,
        candidates=links,
        tree_rows=links + 10,
        first_child=links + 20,
        next_sibling=links + 30,
    )


def stage(batch: ForwardBatch, slots: SlotTable, picked: TreeChoices | None = None, **options: bool) -> StagedStep:
    bucket = BUCKET if not options.get("unrolled") else Bucket(**{**vars(BUCKET), "sessions": 12, "paths": 128})
    return stage_step(batch, picked, slots=slots, choose=lambda _need: bucket, buffer=StepBuffer(CPU), **options)


def unpacked(staged: StagedStep) -> dict[str, np.ndarray]:
    """Through bytes, as another process gets them."""
    copy = np.frombuffer(staged.data.tobytes(), dtype=np.uint8)
    tensors = StepLayout.of(staged.bucket).tensors(torch.from_numpy(copy.copy()))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_arrays_of_a_step_come_back_filled_up_with_nothing() -> None:
    slots, batch, picked = table_with([12, 5]), chain_and_tree(), choices()
    table = slots.table.copy()
    arrays = unpacked(stage(batch, slots, picked))
    for name in ("token_ids", "positions", "prefix_len"):
        assert arrays[name][:8].tolist() == getattr(batch, name).tolist()
    assert arrays["write_slots"].tolist() == [*table[1, 2:5], *table[0, 7:12], -1, -1, -1, -1]
    assert arrays["tree_mask"][:8, 0].tolist() == batch.tree_mask[:, 0].tolist()
    assert not arrays["tree_mask"][8:].any() and not arrays["tree_mask"][:, 1].any()
    assert arrays["rows"].tolist() == [1, 0, -1, -1]
    assert arrays["query_start"].tolist() == [0, 3, 8, 8, 8]
    assert arrays["key_len"].tolist() == [5, 12, 0, 0]
    assert arrays["tree_start"].tolist() == [5, 8, 0, 0]
    assert arrays["logit_rows"].tolist() == [2, 4, 5, 6, 7, 0, 0, 0]
    for name in ("seeds", "temperature", "top_p", "min_p", "top_k", "choice_index"):
        assert arrays[name][:5].tolist() == getattr(picked, name).tolist()
    assert arrays["choice_positions"].tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
    assert arrays["temperature"][5:].tolist() == [0, 0, 0]
    for name in ("candidates", "tree_rows", "first_child", "next_sibling"):
        assert arrays[name][:2, :4].tolist() == getattr(picked, name).tolist()
        assert (arrays[name][2:] == -1).all() and (arrays[name][:, 4] == -1).all()


def test_the_device_s_table_follows_the_host_s() -> None:
    slots, chance = table_with([12, 5]), np.random.default_rng(0)
    copy = np.full((6, 32), -7)
    buffer, more = StepBuffer(CPU), 0
    bucket = Bucket(tokens=1, sessions=1, keys=32, query_len=1, logit_rows=0, nodes=0, words=1)
    assert StepLayout.of(bucket).updates > 60
    for _ in range(300):
        row = int(chance.integers(2))
        length = slots.length(row)
        if length > 4 and chance.random() < 0.5:
            start = int(chance.integers(1, length - 1))
            slots.retain(row, start, chance.permutation(length - start)[: chance.integers(1, 4)].tolist())
        elif length < 30:
            slots.extend(row, int(chance.integers(1, 3)))
        builder = BatchBuilder()
        builder.add_chain(row, [1], slots.length(row) - 1, False)
        staged = stage_step(builder.build(), None, slots=slots, choose=lambda _need: bucket, buffer=buffer)
        arrays = StepLayout.of(bucket).arrays(staged.data)
        kept = arrays["update_rows"] >= 0
        copy[arrays["update_rows"][kept], arrays["update_columns"][kept]] = arrays["update_slots"][kept]
        more += staged.more_updates.shape[1]
        assert (copy[row, : slots.length(row)] == slots.table[row, : slots.length(row)]).all()
    assert more == 0


def test_entries_that_find_no_place_travel_beside() -> None:
    slots = SlotTable(num_slots=900, max_rows=1, max_row_len=800)
    slots.extend(slots.acquire_row(), 700)
    builder = BatchBuilder()
    builder.add_chain(0, [1], 699, False)
    bucket = Bucket(tokens=1, sessions=1, keys=800, query_len=1, logit_rows=0, nodes=0, words=1)
    staged = stage_step(builder.build(), None, slots=slots, choose=lambda _need: bucket, buffer=StepBuffer(CPU))
    placed = StepLayout.of(bucket).arrays(staged.data)
    columns = [*placed["update_columns"], *staged.more_updates[1]]
    assert columns == list(range(700))
    assert [*placed["update_slots"], *staged.more_updates[2]] == slots.table[0, :700].tolist()
    assert not staged.more_updates[0].any()


def test_unrolled_tree_rows_have_their_path_alone() -> None:
    slots, batch = table_with([12, 5]), chain_and_tree()
    staged = stage(batch, slots, unrolled=True)
    arrays, table = unpacked(staged), slots.table
    assert arrays["query_start"].tolist() == [0, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8]
    assert arrays["rows"][:6].tolist() == [1, 0, 0, 0, 0, 0]
    assert arrays["key_len"][:6].tolist() == [5, 8, 9, 10, 10, 11]
    assert arrays["prefix_len"][:8].tolist() == [3, 4, 5, 8, 9, 10, 10, 11]
    assert not arrays["tree_mask"].any()
    seen = np.full((6, 12), -1)
    for session, row in enumerate(arrays["rows"][:6]):
        seen[session, : arrays["key_len"][session]] = table[row, : arrays["key_len"][session]]
    kept = arrays["path_rows"] >= 0
    seen[arrays["path_rows"][kept], arrays["path_columns"][kept]] = arrays["path_slots"][kept]
    # Node 2 is the root's second child, node 3 the first one's child.
    assert seen[4].tolist() == [*table[0, :9], table[0, 10], -1, -1]
    assert seen[5].tolist() == [*table[0, :9], table[0, 9], table[0, 11], -1]


def test_writing_where_nothing_was_reserved_is_noticed() -> None:
    builder = BatchBuilder()
    builder.add_chain(1, [1, 2], 4, True)
    with pytest.raises(AssertionError, match="not reserved"):
        stage(builder.build(), table_with([12, 5]))


@pytest.mark.parametrize("read", [StepAnswer.of, read_answer], ids=["columns", "one loop"])
def test_an_answer_is_paths_and_their_tokens(read: Callable[..., StepAnswer]) -> None:
    staged = stage(chain_and_tree(), table_with([12, 5]), choices())
    words = np.full(answer_len(BUCKET), 99, dtype=np.int32)
    words[:8] = [50, 51, 52, 53, 54, 0, 0, 0]
    words[8:28].reshape(4, 5)[:2, :3] = [[0, 99, 99], [1, 2, 4]]
    words[28:30] = [0, 2]
    answer = read(words, staged)
    assert answer.accepted.tolist() == [0, 2]
    assert answer.rows[1].tolist() == [1, 2, 4]
    assert answer.tokens[0, 0] == 50
    assert answer.tokens[1].tolist() == [51, 52, 54]


def test_buffers_are_taken_in_turns_and_grow() -> None:
    ring = StepBuffers(CPU, count=3)
    taken = [ring.take() for _ in range(6)]
    assert taken[:3] == taken[3:] and len(set(map(id, taken))) == 3
    large = StepLayout(Bucket(tokens=40_000, sessions=1, keys=9, query_len=9, logit_rows=0, nodes=0, words=1))
    for layout in (StepLayout.of(BUCKET), large, StepLayout.of(BUCKET)):
        data, arrays = taken[0].step(layout)
        assert (data == layout.template).all()
        arrays["token_ids"][:] = 7
        assert (
            StepLayout.of(layout.bucket).arrays(taken[0].step_tensor(layout.nbytes).numpy())["token_ids"] == 7
        ).all()
