"""How a batch is put together."""

import pytest

from outrider.engine.batch import BatchBuilder
from outrider.tree import ancestor_masks


def test_chains_and_trees_of_two_sessions() -> None:
    builder = BatchBuilder()
    assert builder.add_chain(5, [1, 2], 3, False) == slice(0, 0)
    tree = builder.add_tree(
        5, tree_start=5, token_ids=[7, 8, 9], positions=[5, 6, 6], masks=ancestor_masks([0, 0]), write_indices=[5, 6, 7]
    )
    assert tree == slice(0, 3)
    assert builder.add_chain(2, [4, 4, 4], 0, True) == slice(3, 4)
    batch = builder.build()
    assert batch.token_ids.tolist() == [1, 2, 7, 8, 9, 4, 4, 4]
    assert batch.positions.tolist() == [3, 4, 5, 6, 6, 0, 1, 2]
    assert batch.rows.tolist() == [5, 2]
    assert batch.query_start.tolist() == [0, 5, 8]
    assert batch.tree_start.tolist() == [5, 3]
    assert batch.prefix_len.tolist() == [4, 5, 5, 5, 5, 1, 2, 3]
    assert batch.tree_mask.tolist() == [[0], [0], [1], [3], [5], [0], [0], [0]]
    assert batch.write_index.tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert batch.key_len.tolist() == [8, 3]
    assert batch.logit_rows.tolist() == [2, 3, 4, 7]


def test_a_growth_step_may_name_more_keys_than_it_writes_and_ask_for_no_logits() -> None:
    builder = BatchBuilder()
    wanted = builder.add_tree(
        1,
        tree_start=10,
        token_ids=[3],
        positions=[12],
        masks=ancestor_masks([0] * 70)[-1:],
        write_indices=[12],
        key_len=81,
        want_logits=False,
    )
    batch = builder.build()
    assert wanted == slice(0, 0)
    assert batch.key_len.tolist() == [81]
    assert batch.tree_mask.shape == (1, 2)
    assert batch.logit_rows.size == 0


def test_a_sessions_rows_stand_together() -> None:
    builder = BatchBuilder()
    builder.add_chain(1, [1], 0, False)
    builder.add_chain(2, [1], 0, False)
    with pytest.raises(AssertionError, match="do not stand together"):
        builder.add_chain(1, [1], 1, False)
