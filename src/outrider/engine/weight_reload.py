"""Other weights into a model that runs: same architecture, same memory, so that CUDA graphs stay valid.

    check    config.json, tokenizer, shards, shapes and kinds fit what runs; every byte is read once (its version)
    refill   each tensor is read from its mapped file into the tensor that is there; beside them a layer's worth of
             memory at a time, never a second model

The weights that run are lost with the first tensor that is copied: whatever is wrong has to be found before, and a
failure in the middle is the end of the model. Rotary tables, buffers and KV caches stay, since the configuration does.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from outrider.engine.checkpoint import ModelCard, read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import (
    EMBEDDING,
    HEAD,
    DecoderWeights,
    LayerWeights,
    WeightLoader,
    layer_prefix,
    tensor_shapes,
)
from outrider.engine.weight_source import SafetensorsSource, WeightSource
from outrider.engine.weight_version import Stamps, file_stamps, weights_version
from outrider.errors import CheckpointError
from outrider.kernels.linear.packed_weight import PackedWeight
from outrider.kernels.linear.scaled_weight import ScaledWeight
from outrider.kernels.linear.skinny import Weight

# Rows of the vocabulary that are copied at a time.
_ROWS_AT_ONCE = 8192
_CARD_FIELDS = ("vocab_size", "tokenizer_hash", "eos_token_ids", "max_model_len")


@dataclass(frozen=True, kw_only=True)
class CheckedWeights:
    """Weights that a model could run with."""

    folder: Path
    version: str
    stamps: Stamps  # of its files when they were read

    def check_unchanged(self) -> None:
        """Raise CheckpointError where a file of the folder has been written or replaced since it was checked."""
        if file_stamps(self.folder) != self.stamps:
            raise CheckpointError(f"{self.folder}: its files have changed since they were checked; ask again once it "
                                  "is written")  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningModel:
    """The running model, as far as other weights have to fit it."""

    config: EngineConfig
    card: ModelCard
    spec: DecoderSpec
    weights: DecoderWeights


def check_weights(running: RunningModel, folder: Path) -> CheckedWeights:
    """Check that a model can run with a checkpoint's weights; reads all of them, changes nothing.

    Raises:
        CheckpointError: why not.
    """
    asked = replace(running.config, model_path=folder)
    read_checkpoint(asked)  # says best what is no checkpoint at all
    stamps = file_stamps(folder)
    spec, card = read_checkpoint(asked)
    _check_architecture(folder, running.spec, spec)
    for name in _CARD_FIELDS:
        found, needed = getattr(card, name), getattr(running.card, name)
        if found != needed:
            raise CheckpointError(f"{folder}: {name} {_told(found)} given, {_told(needed)} needed: the model that runs "
                                  f"({running.card.name}) has that")  # fmt: skip
    source = SafetensorsSource(folder)
    source.check(tensor_shapes(spec))
    _check_kinds(running, spec, source)
    version = weights_version(folder)
    checked = CheckedWeights(folder=folder, version=version, stamps=stamps)
    # What is written while it is read has a version that nobody has.
    checked.check_unchanged()
    return checked


def refill_decoder(
    weights: DecoderWeights,
    source: WeightSource,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    quantized: bool,
    output_layer: Weight | None = None,
) -> None:
    """Copy a rank's part of other weights into the decoder's tensors.

    Args:
        source: of the others, which `check_weights` has found to fit.
        output_layer: [V, N] as `load_output_layer` has given it; None where nothing uses one.

    Raises:
        CheckpointError: a file cannot be read; the weights are a mixture then.
    """
    embedding = weights.embedding
    loader = WeightLoader(source, spec, embedding.device, dtype, weights.rank, weights.world_size, quantized)
    _refill_rows(embedding, loader, EMBEDDING, 0, spec.vocab_size)
    for index, layer in enumerate(weights.layers):
        fresh = loader.layer(layer_prefix(index))
        for field in fields(LayerWeights):
            _overwrite(getattr(layer, field.name), getattr(fresh, field.name))
    _overwrite(weights.final_norm, loader.norm("model.norm"))
    _refill_head(weights.head, loader, embedding)
    if output_layer is not None:
        _refill_head(output_layer, replace(loader, rank=0, world_size=1), embedding)
    if embedding.device.type == "cuda":
        torch.cuda.synchronize(embedding.device)
        torch.cuda.empty_cache()


def _refill_head(head: Weight, loader: WeightLoader, embedding: torch.Tensor) -> None:
    if isinstance(head, ScaledWeight | PackedWeight):
        _overwrite(head, loader.head(embedding))
    elif not _is_view(head, embedding):
        share, vocab_size = len(head), loader.spec.vocab_size
        start = min(loader.rank * share, vocab_size)
        name = HEAD if loader.source.stores(HEAD) else EMBEDDING
        # Rows beyond the vocabulary are zeros, and stay so.
        _refill_rows(head, loader, name, start, min(start + share, vocab_size))


def _refill_rows(held: torch.Tensor, loader: WeightLoader, name: str, start: int, stop: int) -> None:
    for first in range(start, stop, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, stop)
        held[first - start : last - start].copy_(loader.rows(name, first, last))


def _overwrite(held: Weight | None, fresh: Weight | None) -> None:
    if held is None or fresh is None:
        assert held is fresh, "a weight that one has and the other lacks passed the check"
    elif isinstance(held, PackedWeight):
        assert not isinstance(fresh, PackedWeight), "a loader packs nothing"
        held.refill(fresh)
    elif isinstance(held, ScaledWeight):
        assert isinstance(fresh, ScaledWeight), "a weight of another kind passed the check"
        held.values.copy_(fresh.values)
        held.scales.copy_(fresh.scales)
    else:
        assert isinstance(fresh, torch.Tensor), "a weight of another kind passed the check"
        held.copy_(fresh)


def _is_view(held: torch.Tensor, whole: torch.Tensor) -> bool:
    return held.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------------------- checks


def _check_architecture(folder: Path, running: DecoderSpec, found: DecoderSpec) -> None:
    for field in fields(DecoderSpec):
        given, needed = getattr(found, field.name), getattr(running, field.name)
        if given != needed:
            raise CheckpointError(f"{folder}: config.json: {field.name} {_told(given)} given, {_told(needed)} "
                                  "needed: only weights of the same architecture can be put in the place of "
                                  "others")  # fmt: skip


def _check_kinds(running: RunningModel, spec: DecoderSpec, source: SafetensorsSource) -> None:
    """Check that 8-bit matrices replace 8-bit matrices, and that output layers match."""
    held = running.weights
    own_head = not isinstance(held.head, torch.Tensor) or not _is_view(held.head, held.embedding)
    for index, layer in enumerate(held.layers):
        for names, weight in _matrices(layer_prefix(index), layer):
            _check_kind(running, source, names, weight)
    if own_head:
        name = HEAD if source.stores(HEAD) else EMBEDDING
        _check_kind(running, source, [name], held.head, is_layer=False)
    if spec.tied_head and not own_head and source.stores(HEAD) and not _same(source):
        raise CheckpointError(f"{source.place}: it has an output layer of its own (lm_head.weight), and the model that "
                              "runs uses its embedding: restart the targets with it")  # fmt: skip


def _matrices(prefix: str, layer: LayerWeights) -> list[tuple[list[str], Weight]]:
    attention, feed_forward = f"{prefix}self_attn.", f"{prefix}mlp."
    return [
        ([f"{attention}{each}_proj.weight" for each in "qkv"], layer.qkv),
        ([f"{attention}o_proj.weight"], layer.output),
        ([f"{feed_forward}{each}_proj.weight" for each in ("gate", "up")], layer.gate_up),
        ([f"{feed_forward}down_proj.weight"], layer.down),
    ]


def _check_kind(
    running: RunningModel, source: SafetensorsSource, names: list[str], weight: Weight, *, is_layer: bool = True
) -> None:
    if isinstance(weight, PackedWeight):
        return  # it takes what numbers of any kind stand for
    comes_scaled = all(source.factors(name) is not None for name in names)
    is_scaled = comes_scaled or (is_layer and running.config.quantization == "fp8")
    if is_scaled != isinstance(weight, ScaledWeight):
        given, needed = ("8", "16 or 32") if is_scaled else ("16 or 32", "8")
        raise CheckpointError(f"{source.place}: {names[0]} has {given} bits a number, {needed} needed as the model "
                              "that runs has: give a checkpoint of the same kind, or restart the targets")  # fmt: skip


def _same(source: SafetensorsSource) -> bool:
    head, embedding = source.tensor(HEAD), source.tensor(EMBEDDING)
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
