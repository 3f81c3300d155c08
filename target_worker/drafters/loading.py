"""The draft model of a target worker: its place in the memory that both share, and whether it fits the target."""

from dataclasses import replace
from pathlib import Path

import torch

from outrider.drafting.config import GrowthConfig, step_defaults
from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_weights import weight_bytes
from outrider.engine.kv_memory import KvNeighbour, KvShape, step_bytes
from outrider.engine.model_runner import ModelCard, ModelRunner
from outrider.errors import CheckpointError
from outrider.target_worker.drafters.model import DraftModel

# Nodes of a session's tree: half a pool.
_LIVE_NODES = 128


def draft_engine(target: EngineConfig, folder: Path, *, num_slots: int | None = None) -> EngineConfig:
    """Return the settings of a draft model beside a target: its device, dtype and operators, on one GPU.

    Args:
        target: settings of the target.
        folder: checkpoint of the draft.
        num_slots: tokens whose KV fits the target. The draft has room for as many, and for the nodes of all trees.
    """
    return replace(
        target,
        model_path=folder,
        quantization=None,
        num_slots=None if num_slots is None else num_slots + _LIVE_NODES * target.max_num_seqs,
        max_tree_nodes=_LIVE_NODES,
        kv_cache_dtype="auto",
        # Its own: it may be shorter than the target's.
        max_model_len=None,
        attention_backend=None,
        deterministic=False,
        tensor_parallel_size=1,
    )


def room_for_draft(target: EngineConfig, folder: Path) -> KvNeighbour:
    """Return the memory that a target has to leave to a draft model.

    Raises:
        CheckpointError: the folder cannot be served.
    """
    engine = draft_engine(target, folder)
    spec, _ = read_checkpoint(engine)
    slot_bytes = KvShape(spec, engine).bytes_per_slot
    weights = weight_bytes(spec, getattr(torch, engine.dtype_name))
    tree_bytes = _LIVE_NODES * target.max_num_seqs * slot_bytes
    fixed_bytes = weights + step_bytes(engine, spec) + tree_bytes
    return KvNeighbour(fixed_bytes=fixed_bytes, bytes_per_slot=slot_bytes)


def load_draft(target: ModelRunner, folder: Path) -> DraftModel:
    """Load a draft model beside a target that has left room for it.

    Raises:
        CheckpointError: the folder cannot be served, or is of another tokenizer than the target's.
    """
    engine = draft_engine(target.config, folder, num_slots=target.slots.num_slots)
    _, card = read_checkpoint(engine)
    check_fits(folder, card, target.info)
    longest = min(card.max_model_len, target.info.max_model_len)
    runner = ModelRunner(replace(engine, device=str(target.device), max_model_len=longest))
    growth = GrowthConfig(max_live_nodes=_LIVE_NODES, max_model_len=longest, **step_defaults(target.config.device))
    return DraftModel.of_runner(runner, growth)


def check_fits(folder: Path, draft: ModelCard, target: ModelCard) -> None:
    """Raise CheckpointError, with the field, if a draft model has other token ids than the target.

    A target's vocabulary may be padded wider.
    """
    if draft.vocab_size > target.vocab_size:
        given, needed = draft.vocab_size, target.vocab_size
        raise CheckpointError(
            f"{folder}: draft_model: vocab_size {given} given, at most {needed} (the target's) needed"
        )
    given, needed = draft.tokenizer_hash, target.tokenizer_hash
    if given and needed and given != needed:
        raise CheckpointError(f"{folder}: draft_model: tokenizer_hash {given} given, {needed} (the target's) needed")
