"""A draft model beside a target: the memory that is left to it, and whether it fits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.target_worker.conftest import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.target_worker.drafters.loading import load_draft, room_for_draft


def test_both_share_the_memory_for_kv():
    folder = embedded_draft_path()
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
    torch.manual_seed(1)
    sizes: dict[str, Any] = SIZES | {"max_position_embeddings": 40}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    engine = EngineConfig(model_path=checkpoint, num_slots=100, max_model_len=80)
    # What it takes of the memory depends on its own length.
    assert room_for_draft(engine, tmp_path).fixed_bytes > 0
    draft = load_draft(ModelRunner(engine), tmp_path)
    assert draft.growth.max_model_len == 40


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (r"vocab_size 62 given, at most 61 \(the target's\)", {"vocab_size": 62}),
        (r"tokenizer_hash \w+ given, \w+ \(the target's\)", {}),
    ],
)
def test_a_draft_of_other_tokens_is_refused(checkpoint: Path, tmp_path: Path, field: str, changes: dict[str, Any]):
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, sizes in zip(folders, (SIZES, SIZES | changes), strict=True):
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {folder.name: 0}}}))
    target, draft = folders
    with pytest.raises(CheckpointError, match=f"draft_model: {field} needed"):
        load_draft(ModelRunner(EngineConfig(model_path=target, num_slots=100)), draft)
