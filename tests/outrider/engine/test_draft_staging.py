"""The columns of a growth step pack into the bytes that its forward would be staged as, and sampling beside them."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.compiled import IS_COMPILED
from outrider.engine import growth_kernels
from outrider.engine.buckets import Bucket
from outrider.engine.draft_buckets import words_per_mask
from outrider.engine.draft_staging import GrowthRows, RankedChildren, pack_columns, stage_growth
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepLayout
from outrider.engine.step_staging import stage_step
from outrider.sampling import SamplingSpec

COLD = SamplingSpec()
HOT = SamplingSpec(temperature=0.5, seed=2**64 - 3, top_k=7, top_p=0.75, min_p=0.25, choice_index=3)


def make_slots() -> SlotTable:
    slots = SlotTable(num_slots=400, max_rows=4, max_row_len=150)
    for count in (20, 5, 90):
        slots.extend(slots.acquire_row(), count)
    for row in range(3):
        slots.take_changes([row])
    slots.extend(0, 3)
    slots.extend(1, 4)
    slots.retain(2, 10, [5, 3, 70])
    slots.extend(2, 70)
    return slots


def make_rows() -> GrowthRows:
    rows = GrowthRows()
    rows.add_chain(1, [7, 8, 9], 5, None)
    # Offsets beyond one word.
    rows.add_tree(
        2, tree_start=13, first_index=80, token_ids=[3, 4], positions=[14, 16], masks=[1 << 67, 1 << 68 | 1 << 67 | 5],
        record=HOT.record,
    )  # fmt: skip
    rows.add_chain(0, [1, 2, 3], 20, COLD.record)
    return rows


def staged(words: int = 2, least: int | None = None) -> tuple[StagedStep, dict[str, np.ndarray]]:
    buckets: list[Bucket] = []

    def choose(need: Bucket) -> Bucket:
        buckets.append(need)
        return Bucket(
            tokens=12, sessions=4, keys=150, query_len=12, logit_rows=6, nodes=0, words=words, children=need.children
        )

    buffer = StepBuffer(torch.device("cpu"))
    step = stage_growth(make_rows(), children=3, words=least or words, slots=make_slots(), choose=choose, buffer=buffer)
    assert buckets == [
        Bucket(tokens=8, sessions=3, keys=82, query_len=3, logit_rows=3, nodes=0, words=words, children=3)
    ]
    return step, StepLayout.of(step.bucket).arrays(step.data)


def test_columns_pack_as_the_forward_would():
    step, arrays = staged()
    slots = make_slots()
    bucket = Bucket(tokens=12, sessions=4, keys=150, query_len=12, logit_rows=6, nodes=0, words=2)
    batch = make_rows().batch()
    expected = stage_step(batch, None, slots=slots, choose=lambda _: bucket, buffer=StepBuffer(torch.device("cpu")))
    theirs = StepLayout.of(bucket).arrays(expected.data)
    for name, values in theirs.items():
        if name.startswith("update"):
            # There is more room for them: a draft's commits move more.
            assert len(arrays[name]) > len(values)
            np.testing.assert_array_equal(arrays[name][: len(values)], values)
            assert (arrays[name][len(values) :] == -1).all()
        else:
            np.testing.assert_array_equal(arrays[name], values, err_msg=name)
    assert (step.logit_rows, step.more_updates.size) == (3, 0)


def test_sampling_stands_beside_the_rows_that_want_children():
    _, arrays = staged()
    assert arrays["logit_rows"][:3].tolist() == [3, 4, 7]
    assert arrays["choice_positions"].tolist() == [15, 17, 23, 0, 0, 0]
    assert arrays["seeds"].view(np.uint64).tolist() == [HOT.seed, HOT.seed, 0, 0, 0, 0]
    assert arrays["temperature"].tolist() == [0.5, 0.5, COLD.temperature, 0, 0, 0]
    assert arrays["top_k"].tolist()[:2] == [7, 7]
    assert arrays["top_p"].tolist() == [0.75, 0.75, 1, 1, 1, 1]
    assert arrays["min_p"].tolist()[:2] == [0.25, 0.25]
    assert arrays["choice_index"].tolist()[:3] == [3, 3, 0]


def test_masks_take_the_words_that_every_step_has():
    _, arrays = staged(words=4)
    np.testing.assert_array_equal(arrays["tree_mask"][:, 2:], 0)
    assert arrays["tree_mask"][4].tolist() == [5, 1 << 3 | 1 << 4, 0, 0]
    # A tree that is larger all the same, as that of a sync round may be, takes more.
    _, arrays = staged(words=2, least=1)
    assert arrays["tree_mask"][4].tolist() == [5, 1 << 3 | 1 << 4]
    assert [make_rows().batch(words).tree_mask.shape for words in (1, 4)] == [(8, 2), (8, 4)]
    assert [words_per_mask(nodes) for nodes in (1, 64, 65, 128, 129, 256)] == [1, 1, 2, 2, 4, 4]


def test_an_answer_is_read_back_by_row():
    step, _ = staged()
    tokens = np.arange(18, dtype=np.int32).reshape(6, 3)
    floats = np.linspace(-3, 3, 36, dtype=np.float32).reshape(2, 6, 3)
    answer: Any = np.concatenate([tokens.ravel(), floats.ravel().view(np.int32)])
    found = RankedChildren(answer, step)
    answer[:] = 0
    np.testing.assert_array_equal(found.tokens, tokens[:3])
    np.testing.assert_array_equal(found.log_q, floats[0, :3])
    np.testing.assert_array_equal(found.scores, floats[1, :3])


def random_rows(chance: np.random.Generator, slots: SlotTable) -> GrowthRows:
    rows = GrowthRows()
    for row in chance.permutation(4)[: chance.integers(1, 5)].tolist():
        length, count = slots.length(row), int(chance.integers(1, 6))
        slots.extend(row, count)
        if chance.random() < 0.3:
            rows.add_chain(row, list(range(count)), length, HOT.record if chance.random() < 0.7 else None)
            continue
        masks = [int(chance.integers(1, 1 << 62)) << int(chance.integers(0, 60)) for _ in range(count)]
        rows.add_tree(
            row, tree_start=max(length - 9, 0), first_index=length, token_ids=chance.integers(-9, 99, count).tolist(),
            positions=chance.integers(0, 500, count).tolist(), masks=masks,
            record=COLD.record if chance.random() < 0.5 else HOT.record,
        )  # fmt: skip
    return rows


# Of long rows that were never sent, more has changed than a step has room for.
@pytest.mark.parametrize(("lengths", "has_more"), [((20, 5, 60, 0), False), ((130, 140, 120, 140), True)])
def test_the_loop_packs_what_numpy_does(lengths: tuple[int, ...], has_more: bool):
    bucket = Bucket(tokens=24, sessions=4, keys=150, query_len=24, logit_rows=24, nodes=0, words=2, children=3)
    found_more = False
    for seed in range(60):
        steps = []
        for way in ("loop", "numpy"):
            chance = np.random.default_rng(seed)
            slots = SlotTable(num_slots=800, max_rows=4, max_row_len=150)
            for count in lengths:
                slots.extend(slots.acquire_row(), count)
            rows, buffer = random_rows(chance, slots), StepBuffer(torch.device("cpu"))
            buffer.views(StepLayout.of(bucket).nbytes).data[:] = 7
            if way == "numpy":
                steps.append(pack_columns(rows, StepLayout.of(bucket), slots, buffer))
            else:
                step = stage_growth(rows, children=3, words=2, slots=slots, choose=lambda _: bucket, buffer=buffer)
                steps.append((step.data, step.more_updates))
        (data, more), (expected, expected_more) = steps
        arrays = StepLayout.of(bucket).arrays(data)
        for name, values in StepLayout.of(bucket).arrays(expected).items():
            np.testing.assert_array_equal(arrays[name], values, err_msg=name)
        np.testing.assert_array_equal(more, expected_more)
        found_more = found_more or more.size > 0
    assert found_more == has_more


def test_a_row_without_its_slot_is_found_out():
    slots = SlotTable(num_slots=9, max_rows=1, max_row_len=9)
    slots.extend(slots.acquire_row(), 2)
    rows, buffer = GrowthRows(), StepBuffer(torch.device("cpu"))
    rows.add_chain(0, [1, 2, 3], 0, COLD.record)
    with pytest.raises(AssertionError, match="not reserved"):
        stage_growth(rows, children=3, words=1, slots=slots, choose=lambda need: need, buffer=buffer)


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")
def test_no_step_waits_for_the_compiler():
    growth_kernels.warm_up()
    kernel: Any = growth_kernels.pack_growth
    before = list(kernel.signatures)
    staged()
    staged(words=4)
    # Other tests have compiled what steps need: one signature says that the warm-up's is the same.
    assert kernel.signatures == before
    assert len(before) == 1
