"""A model's weights as the decoder reads them: projections with the same input are one matrix, and a rank of several
holds its part only.

    qkv       query rows, key rows, value rows, one after the other; of a rank: those of its heads
    gate_up   gate rows, then up rows; of a rank: those of its feed-forward channels
    output    columns of the rank's heads; down: columns of its feed-forward channels
    head      rows of the vocabulary, filled up with zeros to the same number on every rank

With `quantized` the layers' matrices are rounded to 8 bits, each as it arrives on the device; those that come with 8
bits stay as they are. Norms, biases and the embedding have the model's dtype, and so has the output layer, unless it
comes with 8 bits.

Norm weights are the factors as they are applied: Gemma's offset is in them, so they are float32 there. Tensors go to
the device one at a time, each once; host memory holds none of them.

Shapes: V vocabulary, N hidden, H and Hkv heads of D, F feed-forward; of one rank: h, hkv, f and v.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.weight_source import WeightSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.packed_weight import PackedWeight, can_pack
from outrider.kernels.linear.scaled_weight import ScaledWeight, quantised, row_scales, scaled_weight
from outrider.kernels.linear.skinny import Weight
from outrider.roles.start_progress import report_weights

# Tree nodes stand behind the longest sequence, and their positions need rows in the rotary tables too.
TREE_POSITIONS = 4096

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MATRICES = ("qkv", "output", "gate_up", "down")
# Ranks have columns of these, and rows of the others.
_SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer of one rank."""

    attention_norm: torch.Tensor  # [N] before the attention
    qkv: Weight  # [(h + 2 hkv) D, N]
    qkv_bias: torch.Tensor | None  # [(h + 2 hkv) D] or None
    # query_norm, key_norm: [D] or None.
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Weight  # [N, h D]
    output_bias: torch.Tensor | None  # [N] or None, the same on every rank: added once, after the ranks' sum
    attention_addend_norm: torch.Tensor | None  # [N] or None, of what the attention adds
    feed_forward_norm: torch.Tensor  # [N] before the feed-forward block
    gate_up: Weight  # [2 f, N]
    gate_up_bias: torch.Tensor | None  # [2 f] or None
    down: Weight  # [N, f]
    down_bias: torch.Tensor | None  # [N] or None, as `output_bias`
    feed_forward_addend_norm: torch.Tensor | None  # [N] or None, of what the feed-forward block adds


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderWeights:
    """All weights of one rank."""

    # rank, world_size: whose part this is.
    rank: int
    world_size: int
    embedding: torch.Tensor  # [V, N]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [N]
    # [v, N], v = V / world_size rounded up; a view of the embedding where the checkpoint ties them, and it is not
    # packed.
    head: Weight
    rotary_tables: tuple[torch.Tensor, ...]  # per kind [positions, 2, D / 2] float32, as `DecoderSpec.rotaries`


def load_decoder_weights(
    source: WeightSource,
    spec: DecoderSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    rank: int = 0,
    world_size: int = 1,
    quantized: bool = False,
    packed: bool = False,
) -> DecoderWeights:
    """The weights of one rank on its device.

    Args:
        dtype: of all but Gemma's norms and the rotary tables.
        quantized: whether the layers' matrices are rounded to 8 bits.
        packed: whether matrices are packed for products on a CPU, where this build of torch can.

    Raises:
        CheckpointError: a tensor or file is missing, corrupt or of a wrong shape; the model does not divide into
            `world_size` parts; or the device has no room, with what to do.
    """
    check_world_size(spec, world_size)
    source.check(tensor_shapes(spec))
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    loader = WeightLoader(source, spec, device, dtype, rank, world_size, quantized)
    try:
        weights = loader.load(packed=packed and can_pack(dtype))
    except torch.OutOfMemoryError as error:
        needed = weight_bytes(spec, dtype, world_size=world_size, quantized=quantized)
        held = "" if free is None else f", {free / 1e9:.2f} GB were free"
        raise CheckpointError(
            f"{source.place}: the weights do not fit on {device}: they take {needed / 1e9:.2f} GB in "
            f"{str(dtype).removeprefix('torch.')}{held}. Share them among more GPUs with --tensor-parallel-size, "
            "take a smaller --dtype or --quantization fp8, or free the memory that others hold"
        ) from error
    if device.type == "cuda":
        # What rounding took for a moment is counted as free when KV takes its share.
        torch.cuda.empty_cache()
    return weights


def load_output_layer(source: WeightSource, spec: DecoderSpec, embedding: torch.Tensor, *, packed: bool) -> Weight:
    """Return the output layer [V, N] as one rank has it that does not share the model.

    Args:
        embedding: [V, N] of the model; the result is a view of it where `DecoderWeights.head` would be.
        packed: as in `load_decoder_weights`.

    Raises:
        CheckpointError: a file cannot be read, or the device has no room.
    """
    loader = WeightLoader(source, spec, embedding.device, embedding.dtype, rank=0, world_size=1, quantized=False)
    try:
        head = loader.head(embedding)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{source.place}: no room on {embedding.device} for a whole output layer: lower kv_cache_memory_fraction, "
            "kv_bytes or num_slots"
        ) from error
    return PackedWeight(head, embedding.dtype) if packed and can_pack(embedding.dtype) else head


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint of such a model must have, with its shape, in the order of a forward."""
    hidden, feed_forward = spec.hidden_size, spec.intermediate_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (key, hidden, spec.qkv_bias),
        "self_attn.v_proj": (key, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.output_bias),
        "mlp.gate_proj": (feed_forward, hidden, spec.feed_forward_bias),
        "mlp.up_proj": (feed_forward, hidden, spec.feed_forward_bias),
        "mlp.down_proj": (hidden, feed_forward, spec.feed_forward_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.addend_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if spec.head_norms:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    for name, (rows, columns, has_bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for index in range(len(spec.layers)):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_head:
        shapes[HEAD] = (spec.vocab_size, hidden)
    return shapes


def weight_bytes(spec: DecoderSpec, dtype: torch.dtype, *, world_size: int = 1, quantized: bool = False) -> int:
    """Return the bytes of one rank's weights, without rotary tables.

    Args:
        dtype: of the weights that are not quantised.
        quantized: whether the matrices of the layers have 8 bits, with a float32 scale a row.
    """
    total = 0
    for name, shape in tensor_shapes(spec).items():
        split = len(shape) == 2 and name != EMBEDDING
        count = torch.Size(shape).numel() // (world_size if split else 1)
        if quantized and split and name != HEAD:
            rows = shape[0] if name.endswith(_SPLIT_BY_COLUMNS) else shape[0] // world_size
            total += count + rows * torch.float32.itemsize
        else:
            total += count * dtype.itemsize
    return total


def layer_prefix(index: int) -> str:
    """Return the prefix of a layer's tensor names."""
    return f"model.layers.{index}."


def check_world_size(spec: DecoderSpec, world_size: int) -> None:
    """Raise CheckpointError unless heads and feed-forward channels divide into `world_size` equal parts."""
    fits = [n for n in range(1, spec.kv_heads + 1) if spec.kv_heads % n == 0 and spec.intermediate_size % n == 0]
    if world_size not in fits:
        raise CheckpointError(
            f"--tensor-parallel-size {world_size} given; with {spec.kv_heads} key and value heads and "
            f"{spec.intermediate_size} feed-forward channels this model takes {', '.join(map(str, fits))}"
        )


@dataclass(frozen=True)
class WeightLoader:
    """Makes the pieces of one rank's weights, each on its device, in new memory."""

    source: WeightSource
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    quantized: bool

    def load(self, *, packed: bool) -> DecoderWeights:
        """All of them; layer by layer, so that no more than one is there both plain and packed."""
        spec, positions = self.spec, self.spec.max_positions + TREE_POSITIONS
        embedding = self.rows(EMBEDDING, 0, spec.vocab_size).to(self.device, self.dtype).contiguous()
        layers = []
        total = weight_bytes(spec, self.dtype, world_size=self.world_size, quantized=self.quantized)
        layer_bytes = (total - embedding.nbytes) // len(spec.layers)
        for index in range(len(spec.layers)):
            prefix = layer_prefix(index)
            layers.append(self._packed(self.layer(prefix)) if packed else self.layer(prefix))
            report_weights(embedding.nbytes + (index + 1) * layer_bytes, total, step=layer_bytes)
        return DecoderWeights(
            rank=self.rank,
            world_size=self.world_size,
            embedding=embedding,
            layers=tuple(layers),
            final_norm=self.norm("model.norm"),
            head=PackedWeight(self.head(embedding), self.dtype) if packed else self.head(embedding),
            rotary_tables=tuple(rotary.table(positions).to(self.device) for rotary in spec.rotaries),
        )

    def layer(self, prefix: str) -> LayerWeights:
        """One layer; `prefix` is what its tensors' names begin with."""
        spec, attention, feed_forward = self.spec, f"{prefix}self_attn.", f"{prefix}mlp."
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = [(f"{attention}q_proj", query), (f"{attention}k_proj", key), (f"{attention}v_proj", key)]
        gate_up = [(f"{feed_forward}{name}_proj", spec.intermediate_size) for name in ("gate", "up")]
        head_norms, addend_norms = spec.head_norms, spec.addend_norms
        # After the attention Llama norms the feed-forward block's input, Gemma 2 what the attention adds.
        feed_forward_norm = "pre_feedforward_layernorm" if addend_norms else "post_attention_layernorm"
        after_attention, after_feed_forward = f"{prefix}post_attention_layernorm", f"{prefix}post_feedforward_layernorm"
        return LayerWeights(
            attention_norm=self.norm(f"{prefix}input_layernorm"),
            qkv=self._matrix(qkv),
            qkv_bias=self._stacked(qkv, "bias") if spec.qkv_bias else None,
            query_norm=self.norm(f"{attention}q_norm") if head_norms else None,
            key_norm=self.norm(f"{attention}k_norm") if head_norms else None,
            output=self._columns(f"{attention}o_proj.weight", query),
            output_bias=self._whole(f"{attention}o_proj.bias") if spec.output_bias else None,
            attention_addend_norm=self.norm(after_attention) if addend_norms else None,
            feed_forward_norm=self.norm(f"{prefix}{feed_forward_norm}"),
            gate_up=self._matrix(gate_up),
            gate_up_bias=self._stacked(gate_up, "bias") if spec.feed_forward_bias else None,
            down=self._columns(f"{feed_forward}down_proj.weight", spec.intermediate_size),
            down_bias=self._whole(f"{feed_forward}down_proj.bias") if spec.feed_forward_bias else None,
            feed_forward_addend_norm=self.norm(after_feed_forward) if addend_norms else None,
        )

    def _packed(self, layer: LayerWeights) -> LayerWeights:
        return replace(layer, **{name: PackedWeight(getattr(layer, name), self.dtype) for name in _MATRICES})

    def _part(self, size: int) -> tuple[int, int]:
        """The rank's part of `size` entries that divide evenly."""
        share = size // self.world_size
        return self.rank * share, (self.rank + 1) * share

    def _matrix(self, names: Sequence[tuple[str, int]]) -> Weight:
        """The rank's rows of several matrices: of 8 bits where that is asked for, or where all come so."""
        full = [f"{name}.weight" for name, _ in names]
        if not self.quantized and any(self.source.factors(name) is None for name in full):
            return self._stacked(names, "weight")
        parts = [self._part(rows) for _, rows in names]
        shape = (sum(stop - start for start, stop in parts), self.spec.hidden_size)
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        scales = torch.empty(shape[0], dtype=torch.float32, device=self.device)
        begin = 0
        for name, (start, stop) in zip(full, parts, strict=True):
            scaled = self._scaled_rows(name, start, stop)
            place = slice(begin, begin + stop - start)
            values[place], scales[place] = scaled.values, scaled.scales
            begin += stop - start
        return ScaledWeight(values, scales)

    def _scaled_rows(self, name: str, start: int, stop: int) -> ScaledWeight:
        factors, rows = self.source.factors(name), self.source.rows(name, start, stop)
        if factors is None:
            return quantised(rows.to(self.device, self.dtype))
        return scaled_weight(rows.to(self.device), factors[start:stop].to(self.device))

    def _stacked(self, names: Sequence[tuple[str, int]], kind: str) -> torch.Tensor:
        """The rank's rows of several tensors of (name, rows), one after the other."""
        rest = (self.spec.hidden_size,) if kind == "weight" else ()
        parts = [self._part(rows) for _, rows in names]
        stacked = self._empty((sum(stop - start for start, stop in parts), *rest))
        begin = 0
        for (name, _), (start, stop) in zip(names, parts, strict=True):
            full = f"{name}.{kind}"
            stacked[begin : begin + stop - start].copy_(self.rows(full, start, stop))
            begin += stop - start
        return stacked

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of a tensor, [stop - start, ...] of the loader's dtype.

        Rows of 8 bits are multiplied out: where only some matrices of an input have 8 bits, none keeps them.
        """
        if self.source.factors(name) is None:
            return self.source.rows(name, start, stop)
        return self._scaled_rows(name, start, stop).dequantised(self.dtype)

    def _columns(self, name: str, width: int) -> Weight:
        """The rank's columns of a matrix."""
        start, stop = self._part(width)
        factors = self.source.factors(name)
        if factors is not None:
            return scaled_weight(self.source.columns(name, start, stop).to(self.device), factors.to(self.device))
        if self.quantized:
            # The factors are those of whole rows, so that the model is the same on any number of ranks.
            whole = self._whole(name)
            return quantised(whole[:, start:stop], row_scales(whole))
        if self.world_size == 1:
            return self._whole(name)
        return self._empty((self.spec.hidden_size, stop - start)).copy_(self.source.columns(name, start, stop))

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm's factors as they are applied, [N]."""
        weight, offset = self._whole(f"{name}.weight"), self.spec.norm_offset
        return weight.float() + offset if offset else weight

    def _whole(self, name: str) -> torch.Tensor:
        return self.source.tensor(name).to(self.device, self.dtype).contiguous()

    def head(self, embedding: torch.Tensor) -> torch.Tensor | ScaledWeight:
        """Return the rank's rows of the output layer, [ceil(V / ranks), N]; zeros behind the last token's.

        Args:
            embedding: [V, N], which a tied output layer is a view of.
        """
        spec = self.spec
        share = -(-spec.vocab_size // self.world_size)
        start, stop = min(self.rank * share, spec.vocab_size), min((self.rank + 1) * share, spec.vocab_size)
        tied = embedding[start:stop]
        # As transformers does: an output layer of its own is taken, where the checkpoint has one that differs.
        if spec.tied_head and not self.source.stores(HEAD):
            return tied if stop - start == share else self._padded(tied, share)
        if self.source.factors(HEAD) is not None:
            scaled, missing = self._scaled_rows(HEAD, start, stop), share - (stop - start)
            values = functional.pad(scaled.values.view(torch.uint8), (0, 0, 0, missing))
            return ScaledWeight(values.view(torch.float8_e4m3fn), functional.pad(scaled.scales, (0, missing)))
        head = self._whole(HEAD) if self.world_size == 1 else self._padded(self.source.rows(HEAD, start, stop), share)
        return tied if spec.tied_head and stop - start == share and torch.equal(head, tied) else head

    def _padded(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        padded = self._empty((count, rows.shape[1]))
        padded[: len(rows)].copy_(rows)
        padded[len(rows) :].zero_()
        return padded

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
