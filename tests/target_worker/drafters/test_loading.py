"""A draft model or a head beside a target: the memory that is left to it, and whether it fits."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.outrider.engine.random_eagle import write_random_eagle
from tests.tiny_llama import SIZES, write_llama

from outrider.drafting.growth_source import GrowthSource
from outrider.engine.eagle_spec import EagleLayout
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError
from outrider.models import embedded_draft_path, embedded_eagle_path, embedded_target_path
from outrider.target_worker.drafters.loading import load_draft, room_for_draft


@pytest.mark.parametrize("folder", [embedded_draft_path(), embedded_eagle_path()], ids=["model", "head"])
def test_both_share_the_memory_for_kv(folder: Path):
    engine = EngineConfig(model_path=embedded_target_path(), kv_bytes=1 << 24, max_num_seqs=4)
    alone = ModelRunner(engine).slots.num_slots
    room = room_for_draft(engine, folder)
    shared = ModelRunner(engine, neighbour=room).slots.num_slots
    slot_bytes = (1 << 24) // alone
    assert 0 < room.bytes_per_slot < slot_bytes
    assert shared == pytest.approx((1 << 24) / (slot_bytes + room.bytes_per_slot), rel=0.01)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert room.fixed_bytes > weights


def test_a_draft_has_slots_for_the_targets_tokens_and_its_trees(checkpoint: Path):
    runner = ModelRunner(EngineConfig(model_path=checkpoint, num_slots=100, max_num_seqs=3))
    draft = load_draft(runner, checkpoint)
    assert draft.num_slots == 100 + 3 * draft.growth.max_live_nodes
    assert draft.growth.max_model_len == runner.info.max_model_len


def test_a_draft_with_a_shorter_context_drafts_as_far_as_that(checkpoint: Path, tmp_path: Path):
    write_llama(tmp_path, seed=1, max_position_embeddings=40)
    engine = EngineConfig(model_path=checkpoint, num_slots=100, max_model_len=80)
    # What it takes of the memory depends on its own length.
    assert room_for_draft(engine, tmp_path).fixed_bytes > 0
    draft = load_draft(ModelRunner(engine), tmp_path)
    assert draft.growth.max_model_len == 40


def test_a_head_takes_memory_for_its_kv_and_a_hidden_row_of_every_token():
    engine = EngineConfig(model_path=embedded_target_path(), dtype="bfloat16", max_num_seqs=4)
    document = json.loads((embedded_eagle_path() / "config.json").read_text())
    kv = 2 * document["num_key_value_heads"] * document["head_dim"]
    assert room_for_draft(engine, embedded_eagle_path()).bytes_per_slot == 2 * (kv + document["hidden_size"])
    head = load_draft(
        ModelRunner(EngineConfig(model_path=embedded_target_path(), num_slots=100)), embedded_eagle_path()
    )
    assert head.features is not None
    # The last row is that of padding.
    assert tuple(head.features.by_slot.shape) == (101, document["hidden_size"])


def test_a_head_takes_memory_for_each_session_s_tree_and_a_block_drafter_for_its_block(
    checkpoint: Path, tmp_path: Path
):
    head, block = tmp_path / "head", tmp_path / "block"
    write_random_eagle(head, checkpoint, taps=(0, 1, 2))
    write_random_eagle(block, checkpoint, taps=(0, 1, 2), block_size=4)
    engine = EngineConfig(model_path=checkpoint, num_slots=100, max_num_seqs=3)
    rooms = [room_for_draft(engine, folder) for folder in (head, block)]
    assert rooms[0].bytes_per_slot == rooms[1].bytes_per_slot
    numbers = [
        sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) for folder in (head, block)
    ]
    trees, blocks = 129 * 3 * SIZES["hidden_size"], 2 * 4 * 4 * SIZES["vocab_size"]
    more = rooms[1].fixed_bytes - 4 * numbers[1] + 4 * trees - (rooms[0].fixed_bytes - 4 * numbers[0])
    assert 4 * blocks < more < 6 * blocks
    draft = load_draft(ModelRunner(engine), block)
    assert (draft.source, draft.max_depth) == (GrowthSource.EAGLE, 4)
    assert load_draft(ModelRunner(engine), head).max_depth is None


@pytest.mark.parametrize("layout", ["eagle1", "eagle3"])
def test_a_head_drafts_as_far_as_its_target_goes(layout: EagleLayout, checkpoint: Path, tmp_path: Path):
    write_random_eagle(tmp_path, checkpoint, layout=layout, taps=(0, 1, 2))
    runner = ModelRunner(EngineConfig(model_path=checkpoint, num_slots=100, max_num_seqs=3, max_model_len=50))
    head = load_draft(runner, tmp_path, branching=1, most_steps=2)
    assert head.source is GrowthSource.EAGLE
    assert (head.num_slots, head.vocab_size) == (100 + 3 * head.growth.max_live_nodes, runner.vocab_size)
    assert (head.growth.max_model_len, head.growth.branching, head.most_steps) == (50, 1, 2)


@pytest.mark.parametrize(
    ("layout", "changes", "error"),
    [
        ("eagle3", {"vocab_size": 62, "draft_vocab_size": 62}, "vocab_size is 62, the target has 61"),
        ("eagle1", {"hidden_size": 16}, r"hidden_size is 16, that of the target \(32\) needed"),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
            r"is \[1, 2, 3\], layers 0 to 2 needed",
        ),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2, 1 needed"),
        ("eagle3", {"block_size": 1}, "block_size is 1, a whole number of at least 2 needed"),
    ],
)
def test_a_head_of_another_target_is_refused(
    checkpoint: Path, tmp_path: Path, layout: EagleLayout, changes: dict[str, Any], error: str
):
    write_random_eagle(tmp_path, checkpoint, layout=layout, taps=(0, 1, 2))
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | changes))
    with pytest.raises(CheckpointError, match=error):
        load_draft(ModelRunner(EngineConfig(model_path=checkpoint, num_slots=100)), tmp_path)


@pytest.mark.parametrize(("layout", "own_output"), [("eagle1", False), ("eagle3", False), ("eagle3", True)])
def test_a_whole_output_layer_is_counted_where_ranks_share_the_targets(
    checkpoint: Path, tmp_path: Path, layout: EagleLayout, own_output: bool
):
    write_random_eagle(tmp_path, checkpoint, layout=layout, taps=(0, 1, 2), draft_vocab_size=61 if own_output else None)
    more = 0 if own_output else SIZES["vocab_size"] * SIZES["hidden_size"] * 4
    assert more_on_two_ranks(checkpoint, tmp_path) == more


@pytest.mark.parametrize("stored", [False, True])
def test_an_output_layer_that_is_the_embedding_is_not_counted_unless_another_is_stored(tmp_path: Path, stored: bool):
    target, head = tmp_path / "target", tmp_path / "head"
    write_llama(target, tie_word_embeddings=True)
    if stored:
        weights = load_file(target / "model.safetensors")
        weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    head.mkdir()
    write_random_eagle(head, target, layout="eagle3", taps=(0, 1, 2))
    assert more_on_two_ranks(target, head) == (SIZES["vocab_size"] * SIZES["hidden_size"] * 4 if stored else 0)


def more_on_two_ranks(target: Path, head: Path) -> int:
    """Bytes that a head takes beside a target on two GPUs more than beside one on one GPU."""
    one, two = (room_for_draft(EngineConfig(model_path=target, tensor_parallel_size=ranks), head) for ranks in (1, 2))
    assert two.bytes_per_slot == one.bytes_per_slot
    return two.fixed_bytes - one.fixed_bytes


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (r"vocab_size 62 given, at most 61 \(the target's\)", {"vocab_size": 62}),
        (r"tokenizer_hash \w+ given, \w+ \(the target's\)", {}),
    ],
)
def test_a_draft_of_other_tokens_is_refused(checkpoint: Path, tmp_path: Path, field: str, changes: dict[str, Any]):
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, sizes in zip(folders, ({}, changes), strict=True):
        write_llama(folder, **sizes)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {folder.name: 0}}}))
    target, draft = folders
    with pytest.raises(CheckpointError, match=f"draft_model: {field} needed"):
        load_draft(ModelRunner(EngineConfig(model_path=target, num_slots=100)), draft)
