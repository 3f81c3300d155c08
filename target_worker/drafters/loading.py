"""A target worker's drafter: its place in the memory that both share, and whether it fits the target."""

from dataclasses import replace
from pathlib import Path

import torch

from outrider.checkpoint_json import is_eagle_head
from outrider.drafting.config import GrowthConfig, step_defaults
from outrider.engine.attention import attention_of
from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_weights import HEAD, weight_bytes
from outrider.engine.eagle import BlockHead, load_eagle_head
from outrider.engine.eagle_spec import read_eagle_spec
from outrider.engine.eagle_weights import open_head
from outrider.engine.head_forward import BlockForward, EagleForward, HeadInputs
from outrider.engine.kv_memory import KvNeighbour, KvShape, step_bytes
from outrider.engine.model_runner import ModelCard, ModelRunner
from outrider.engine.packed_forward import Features, ForwardPass
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.target_worker.drafters.model import DraftModel
from outrider.target_worker.rounds.draft_steps import MOST_STEPS

# Nodes of a session's tree: half a pool.
_LIVE_NODES = 128


def draft_engine(target: EngineConfig, folder: Path, *, num_slots: int | None = None) -> EngineConfig:
    """Return the settings of a drafter beside a target: its device, dtype and operators.

    Where several GPUs share the target, the drafter is on the first one alone: it is small, and hidden rows are whole
    on every rank.

    Args:
        target: settings of the target.
        folder: checkpoint of the drafter.
        num_slots: tokens whose KV fits the target. The drafter has room for as many, and for the nodes of all trees.
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
    """Return the memory that a target has to leave to a draft model or a head.

    Raises:
        CheckpointError: the folder cannot be served.
    """
    engine = draft_engine(target, folder)
    dtype = getattr(torch, engine.dtype_name)
    if is_eagle_head(folder):
        model, _ = read_checkpoint(target)
        stored = open_head(folder)
        head = read_eagle_spec(folder, target_layers=len(model.layers), stored=stored.names)
        numbers, features = stored.number_count, (len(head.taps) + 1) * head.hidden_size
        is_embedding = model.tied_head and not SafetensorsSource(Path(target.model_path)).stores(HEAD)
        if target.tensor_parallel_size > 1 and not head.has_output and not is_embedding:
            # A rank has a part of the target's output layer, and the head needs it whole.
            numbers += model.vocab_size * model.hidden_size
        if head.is_block:
            # The logits of a block for each session, as computed and as kept, and the two tables of the bias.
            numbers += 2 * (target.max_num_seqs + 1) * head.block_size * head.draft_vocab_size
            numbers += head.block_rank * (head.layer.vocab_size + head.draft_vocab_size)
        else:
            # The hidden rows of every session's root and nodes.
            numbers += (_LIVE_NODES + 1) * target.max_num_seqs * head.hidden_size
        fixed_bytes = numbers * dtype.itemsize + step_bytes(engine, head.layer, features=features)
        kv_bytes = KvShape(head.layer, engine).bytes_per_slot
        # Beside its KV, of every token a hidden row of the target's.
        slot_bytes = kv_bytes + head.hidden_size * dtype.itemsize
    else:
        spec, _ = read_checkpoint(engine)
        fixed_bytes = weight_bytes(spec, dtype) + step_bytes(engine, spec)
        kv_bytes = slot_bytes = KvShape(spec, engine).bytes_per_slot
    tree_bytes = _LIVE_NODES * target.max_num_seqs * kv_bytes
    return KvNeighbour(fixed_bytes=fixed_bytes + tree_bytes, bytes_per_slot=slot_bytes)


def load_draft(
    target: ModelRunner,
    folder: Path,
    *,
    branching: int = GrowthConfig.branching,
    most_steps: int = MOST_STEPS,
    prefill_tokens: int = GrowthConfig.max_step_tokens,
) -> DraftModel:
    """Load a draft model or a head beside a target that has left room for it.

    Args:
        target: model that it drafts for.
        folder: checkpoint of the drafter.
        branching: children of a node.
        most_steps: most growth steps before a round.
        prefill_tokens: most prompt tokens of one step.

    Raises:
        CheckpointError: the folder cannot be served, or is another target's.
    """
    engine = draft_engine(target.config, folder, num_slots=target.slots.num_slots)
    is_head, longest = is_eagle_head(folder), target.info.max_model_len
    if not is_head:
        _, card = read_checkpoint(engine)
        check_fits(folder, card, target.info)
        longest = min(card.max_model_len, longest)
    engine = replace(engine, device=str(target.device), max_model_len=longest)
    growth = GrowthConfig(
        branching=branching,
        max_step_tokens=prefill_tokens,
        max_live_nodes=_LIVE_NODES,
        max_model_len=longest,
        **step_defaults(target.config.device),
    )
    if is_head:
        return _load_head(target, engine, growth, most_steps)
    return DraftModel.of_runner(ModelRunner(engine), growth, most_steps=most_steps)


def _load_head(target: ModelRunner, engine: EngineConfig, growth: GrowthConfig, most_steps: int) -> DraftModel:
    folder, model, num_slots = Path(engine.model_path), target.running(), engine.num_slots
    assert num_slots is not None
    target_layers, row_len = len(model.spec.layers), growth.max_model_len + growth.capacity
    spec = read_eagle_spec(folder, target_layers=target_layers, stored=open_head(folder).names)
    head = load_eagle_head(
        folder,
        embedding=model.weights.embedding,
        output=model.weights.head if spec.has_output else target.output_layer(),
        target_layers=target_layers,
        max_positions=row_len,
        attend=attention_of(engine, spec.layer.head_dim),
        final_softcap=model.spec.final_softcap,
    )
    shape = KvShape(spec.layer, engine)
    try:
        by_slot = torch.zeros((target.slots.num_slots + 1, head.hidden_size), dtype=shape.dtype, device=target.device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{folder}: no room on {target.device} for {target.slots.num_slots} tokens' hidden states beside the "
            "target: lower kv_cache_memory_fraction, kv_bytes or num_slots"
        ) from error
    features = Features(layers=head.taps, fuse=head.fuse, by_slot=by_slot)
    caches = shape.caches(num_slots, target.device)
    block = head if isinstance(head, BlockHead) else None

    def make_forward(target_table: torch.Tensor) -> ForwardPass:
        inputs = HeadInputs(
            features,
            target_table,
            caches,
            sessions=engine.max_num_seqs,
            row_len=row_len,
            trims=not engine.captures,
        )
        return EagleForward(head, inputs, capacity=growth.capacity) if block is None else BlockForward(block, inputs)

    return DraftModel(
        make_forward=make_forward,
        growth=growth,
        most_steps=most_steps,
        num_slots=num_slots,
        vocab_size=head.vocab_size,
        captures=engine.captures,
        features=features,
        block=block,
    )


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
