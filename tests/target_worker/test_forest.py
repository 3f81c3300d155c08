"""All trees of a step at once give what each alone gives."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from outrider.compiled import IS_COMPILED
from outrider.engine import slot_kernels, step_trees, tree_kernels
from outrider.engine.buckets import BucketLadder
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StepBuffer, StepLayout
from outrider.engine.step_program import answer_len
from outrider.engine.step_staging import stage_step
from outrider.engine.step_trees import need_of_trees, stage_trees
from outrider.kernels.tree_links import links_of_parents
from outrider.sampling import SamplingSpec
from outrider.target_worker.forest import Forest
from outrider.target_worker.forward_step import _batch, _columns, _node_rows
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.planning import Work
from outrider.target_worker.sessions import Session, TreeRequest
from outrider.tree import ancestor_masks, node_depths


def rows_of(number: int, parents: list[int]) -> NodeRows:
    spec = SamplingSpec(
        temperature=0.5 + number, top_k=number - 1, top_p=0.75, min_p=0.125 * number, seed=-number, choice_index=number
    )
    session = Session(
        key=(0, number), epoch=1, order=0, row=0, tokens=[3] * (number + 2), prompt_len=2, sampling=spec, limit=100
    )
    return NodeRows.of(session, [number + place for place in range(len(parents))], parents)


def test_a_forest_is_its_trees() -> None:
    chance = random.Random(2)
    for most in (0, 3, 20, 90):
        trees = []
        for number in range(5):
            count = chance.randint(0, most)
            shape = chance.choice(["any", "chain", "star"])
            pick = {"any": lambda n: chance.randint(0, n), "chain": lambda n: n, "star": lambda _: 0}[shape]
            trees.append(rows_of(number, [pick(node) for node in range(count)]))
        forest = Forest(trees)
        choices = forest.choices()
        for place, tree in enumerate(trees):
            rows, count = forest.rows_of(place), tree.count
            assert forest.tokens[rows].tolist() == [3, *tree.tokens]
            assert forest.depths[rows].tolist() == node_depths(tree.parents).tolist() == tree.depths.tolist()
            words = forest.masks.shape[1]
            assert np.array_equal(forest.masks[rows], ancestor_masks(tree.parents, words=words))
            child, sibling = links_of_parents(torch.tensor([[-1, *tree.parents]]))
            assert choices.first_child[place, :count].tolist() == child[0].tolist()
            assert choices.next_sibling[place, :count].tolist() == sibling[0].tolist()
            assert choices.candidates[place, :count].tolist() == [-1, *tree.tokens]
            assert choices.tree_rows[place, :count].tolist() == list(range(rows.start, rows.stop))
            for name in ("first_child", "next_sibling", "candidates", "tree_rows"):
                assert (getattr(choices, name)[place, count:] == -1).all()
            spec = tree.session.sampling
            assert set(choices.seeds[rows].view(np.uint64).tolist()) == {spec.seed & (1 << 64) - 1}
            for name in ("temperature", "top_k", "top_p", "min_p", "choice_index"):
                assert set(getattr(choices, name)[rows].tolist()) == {getattr(spec, name)}, name
            assert choices.positions[rows].tolist() == (tree.session.root_index + 1 + tree.depths).tolist()


@pytest.mark.parametrize("is_compiled", [True, False] if IS_COMPILED else [False])
def test_trees_alone_are_staged_as_any_batch_is(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trees, "IS_COMPILED", is_compiled)
    chance = random.Random(3)
    ladder = BucketLadder(max_tokens=512, max_sessions=8, row_len=120, max_nodes=90, group=2)
    for most in (1, 6, 63, 80):
        tables = [SlotTable(num_slots=2000, max_rows=8, max_row_len=120) for _ in range(2)]
        works = []
        for number in range(6):
            parents = [chance.randint(0, node) for node in range(chance.randint(1, most))]
            tree = rows_of(number, parents)
            for slots in tables:
                tree.session.row = slots.acquire_row()
                slots.extend(tree.session.row, tree.session.root_index + tree.count)
            request = TreeRequest(key=(0, number), epoch=1, length=9, tokens=tree.tokens, parents=parents)
            works.append(Work(session=tree.session, tree=request, verifies=True, nodes=len(parents)))
        trees = [_node_rows(work) for work in works]
        forest = Forest(trees)
        expected = stage_step(
            _batch(works, forest, tables[0]), forest.choices(), slots=tables[0], choose=ladder.bucket,
            buffer=StepBuffer(torch.device("cpu")),
        )  # fmt: skip
        columns = _columns(trees)
        staged = stage_trees(
            columns, slots=tables[1], bucket=ladder.bucket(need_of_trees(columns)),
            buffer=StepBuffer(torch.device("cpu")),
        )  # fmt: skip
        assert staged.bucket == expected.bucket
        wanted, given = (StepLayout.of(step.bucket).arrays(step.data) for step in (expected, staged))
        for name, values in wanted.items():
            assert np.array_equal(values, given[name]), name
        assert (staged.trees, staged.logit_rows) == (expected.trees, expected.logit_rows)


@pytest.mark.parametrize("is_compiled", [True, False] if IS_COMPILED else [False])
def test_roots_alone_are_staged_as_beside_a_tree(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trees, "IS_COMPILED", is_compiled)
    ladder = BucketLadder(max_tokens=512, max_sessions=8, row_len=120, max_nodes=90, group=2)
    staged = []
    for parents in ([], [0]):
        slots = SlotTable(num_slots=2000, max_rows=8, max_row_len=120)
        trees = [rows_of(number, parents if number == 4 else []) for number in range(5)]
        for tree in trees:
            tree.session.row = slots.acquire_row()
            slots.extend(tree.session.row, tree.session.root_index + tree.count)
        columns = _columns(trees)
        columns.decided = [(0, 0)]
        bucket = ladder.bucket(need_of_trees(columns))
        step = stage_trees(columns, slots=slots, bucket=bucket, buffer=StepBuffer(torch.device("cpu")))
        staged.append(StepLayout.of(step.bucket).arrays(step.data))
        assert (step.trees, step.logit_rows) == (5, 5 + len(parents))
    alone, beside = staged
    # The first four trees are the same, and their rows are the first ones.
    for name, values in beside.items():
        count = 5 if name == "query_start" else 4
        assert np.array_equal(alone[name][:count], values[:count]), name
    assert alone["query_start"][4:].tolist() == [4] + [5] * (len(alone["query_start"]) - 5)
    assert alone["positions"][:5].tolist() == [1, 2, 3, 4, 5]
    assert alone["choice_positions"][:5].tolist() == [2, 3, 4, 5, 6]
    assert alone["tree_mask"][:5, 0].tolist() == [1] * 5 and not alone["tree_mask"][5:].any()
    assert alone["tree_rows"][:5, 0].tolist() == [0, 1, 2, 3, 4] and (alone["first_child"] == -1).all()


@pytest.mark.parametrize("is_compiled", [True, False] if IS_COMPILED else [False])
def test_what_finds_no_place_in_a_step_is_sent_beside_it(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prompt does that came out of the prefix cache."""
    monkeypatch.setattr(step_trees, "IS_COMPILED", is_compiled)
    ladder = BucketLadder(max_tokens=512, max_sessions=8, row_len=120, max_nodes=90, group=2)
    slots, trees = SlotTable(num_slots=2000, max_rows=8, max_row_len=120), [rows_of(0, []), rows_of(40, [0])]
    for tree in trees:
        tree.session.tokens = [7] * 100
        tree.session.limit = 120
        tree.session.row = slots.acquire_row()
        slots.extend(tree.session.row, tree.session.root_index + tree.count)
    columns = _columns(trees)
    bucket = ladder.bucket(need_of_trees(columns))
    step = stage_trees(columns, slots=slots, bucket=bucket, buffer=StepBuffer(torch.device("cpu")))
    arrays = StepLayout.of(step.bucket).arrays(step.data)
    sent = np.concatenate(
        [np.stack([arrays[f"update_{name}"] for name in ("rows", "columns", "slots")]), step.more_updates], axis=1
    )
    assert step.more_updates.size
    seen = np.full((2, 120), -1)
    seen[sent[0], sent[1]] = sent[2]
    assert np.array_equal(seen[:, :100], slots.table[:2, :100])


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")
def test_no_step_waits_for_the_compiler() -> None:
    step_trees.warm_up()
    kernels: list[Any] = [
        tree_kernels.are_trees, tree_kernels.pack_trees, tree_kernels.read_walks, slot_kernels.take_slots,
        slot_kernels.retain_slots,
    ]  # fmt: skip
    before = [list(kernel.signatures) for kernel in kernels]
    slots, trees = SlotTable(num_slots=200, max_rows=8, max_row_len=120), [rows_of(0, [0, 0]), rows_of(1, [])]
    for tree in trees:
        tree.session.row = slots.acquire_row()
    columns = _columns(trees)
    assert slots.extend_rows(columns.rows, [0, 0], [4, 5])
    assert slots.extend_rows(columns.rows, [4, 5], columns.counts)
    columns.roots = [4, 5]
    tokens, parents = np.array(columns.tokens), np.array(columns.parents)
    assert tree_kernels.are_trees(np.array(columns.counts), np.array([1, 1]), tokens, parents, 1000)
    buffer = StepBuffer(torch.device("cpu"))
    need = need_of_trees(columns)
    step = stage_trees(columns, slots=slots, bucket=need, buffer=buffer)
    buffer.answer(answer_len(need)).zero_()
    answer = step_trees.read_answer(buffer.answer_words(answer_len(need)), step)
    assert answer.accepted.tolist() == [0, 0]
    slots.retain_rows(columns.rows, columns.roots, columns.counts, kept=[0, 0], sizes=[1, 1])
    assert [slots.length(row) for row in columns.rows] == [5, 6]
    # Other tests have compiled what steps need: one signature says that the warm-up's is the same.
    assert [list(kernel.signatures) for kernel in kernels] == before
    assert {len(signatures) for signatures in before} == {1}
