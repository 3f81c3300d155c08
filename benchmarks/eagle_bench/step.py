"""Steps of a head and of a draft model in CUDA graphs: what `benchmarks/eagle_step.py` runs.

Shapes: S sessions, T rows of all sessions, N hidden.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.target_bench.models import shape_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, LlamaConfig

from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.eagle import EagleHead
from outrider.engine.eagle_spec import EagleSpec
from outrider.engine.eagle_weights import EagleWeights
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention
from outrider.models.widen import SHAPES
from outrider.models.widened_eagle import DRAFT_VOCAB

_HEAD_DIM = 128
_CHILDREN = 4
_DEVICE = torch.device("cuda")
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Point:
    """So many rows over so many sessions."""

    sessions: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> "Point":
        """From SESSIONSxROWS."""
        sessions, _, rows = text.partition("x")
        return cls(int(sessions), int(rows))

    def __str__(self) -> str:
        return f"{self.sessions}x{self.rows}"


def random_head(shape_name: str) -> EagleHead:
    """A head of the sizes that a published one for this shape has."""
    shape = SHAPES[shape_name]
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=1, head_dim=_HEAD_DIM,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=8192,
    )  # fmt: skip
    spec = EagleSpec(layout="eagle3", layer=DecoderSpec.of(config), taps=(1, 2, 3), draft_vocab_size=DRAFT_VOCAB)
    width, query, key = shape.hidden, shape.heads * _HEAD_DIM, shape.kv_heads * _HEAD_DIM

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), dtype=_DTYPE, device=_DEVICE) * columns**-0.5

    ones = torch.ones(width, dtype=_DTYPE, device=_DEVICE)
    weights = EagleWeights(
        embedding=matrix(shape.vocab, width),
        fc=matrix(width, 3 * width),
        fc_bias=None,
        embedding_norm=ones,
        hidden_norm=ones,
        qkv=matrix(query + 2 * key, 2 * width),
        qkv_bias=None,
        attention_output=matrix(width, query),
        feed_forward_norm=ones,
        gate_up=matrix(2 * shape.intermediate, width),
        down=matrix(width, shape.intermediate),
        final_norm=ones,
        output=matrix(DRAFT_VOCAB, width),
        target_ids=None,
        rotary_table=spec.layer.rotaries[0].table(8192).to(_DEVICE),
    )
    return EagleHead(spec, weights, attend=tree_attention)


def attention_inputs(point: Point, context: int) -> dict[str, Any]:
    """Rows that see their session's context and themselves, as a level of a tree does."""
    each = point.rows // point.sessions
    length = context + each
    row = torch.arange(point.rows, device=_DEVICE, dtype=torch.int32)
    own = row % each
    slots = torch.arange(point.sessions * length, device=_DEVICE, dtype=torch.int32).view(point.sessions, length)
    return {
        "token_ids": torch.randint(1000, (point.rows,), device=_DEVICE),
        "positions": torch.full((point.rows,), context, device=_DEVICE, dtype=torch.int32),
        "write_slots": slots[:, context:].reshape(-1).long(),
        "batch": TreeAttentionBatch(
            slot_table=slots,
            query_start=torch.arange(0, point.rows + 1, each, device=_DEVICE, dtype=torch.int32),
            tree_start=torch.full((point.sessions,), context, device=_DEVICE, dtype=torch.int32),
            prefix_len=torch.full((point.rows,), context, device=_DEVICE, dtype=torch.int32),
            key_len=torch.full((point.sessions,), length, device=_DEVICE, dtype=torch.int32),
            tree_mask=(torch.ones(1, dtype=torch.int64, device=_DEVICE) << own.long())[:, None],
            max_query_len=each,
            max_key_len=length,
        ),
    }


def ranked(logits: torch.Tensor) -> torch.Tensor:
    """The best children of every row, at temperature 1."""
    count = len(logits)
    zeros = torch.zeros(count, device=_DEVICE)
    whole = zeros.int()
    return coupled_topk_scored(
        logits, whole.long(), whole, zeros + 1, whole, zeros + 1, zeros, k=_CHILDREN
    )[2]  # fmt: skip


def head_steps(head: EagleHead, point: Point, context: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed of a head: its layer alone, with logits, and the whole step."""
    arguments = attention_inputs(point, context)
    slots = arguments["batch"].slot_table.numel()
    shape = (slots, head.kv_heads, head.head_dim)
    caches: dict[str, Any] = {
        name: torch.zeros(shape, dtype=_DTYPE, device=_DEVICE) for name in ("key_cache", "value_cache")
    }
    hidden = torch.randn((point.rows, head.hidden_size), dtype=_DTYPE, device=_DEVICE)

    def layer() -> torch.Tensor:
        return head.forward(hidden, **arguments, **caches)

    return {
        "layer": layer,
        "layer, logits": lambda: head.draft_logits(layer()),
        "step": lambda: ranked(head.ranking_logits(layer())),
        "step, whole vocabulary": lambda: ranked(head.logits(layer())),
    }


def draft_steps(decoder: Decoder, point: Point, context: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The same of a model."""
    arguments = attention_inputs(point, context)
    shape = (arguments["batch"].slot_table.numel(), decoder.spec.kv_heads, decoder.spec.head_dim)
    keys, values = ([torch.zeros(shape, dtype=_DTYPE, device=_DEVICE) for _ in decoder.spec.layers] for _ in range(2))
    inputs = DecoderInputs(**arguments, key_caches=keys, value_caches=values)
    rows = torch.arange(point.rows, device=_DEVICE)
    return {"step": lambda: ranked(decoder.logits(decoder.forward(inputs), rows))}


@torch.inference_mode()
def replay_us(step: Callable[[], torch.Tensor], repeats: int) -> float:
    """Microseconds of a replay: the median over `repeats` stretches of ten."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(100 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def run(arguments: Sequence[str]) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="eagle_step.py")
    parser.add_argument("--head", choices=tuple(SHAPES), default="8b", help="shape of the head's target")
    parser.add_argument("--draft", choices=tuple(SHAPES), default="1b", help="shape of the draft model")
    points = [Point(1, 1), Point(1, 8), Point(1, 64), Point(16, 64), Point(64, 64)]
    parser.add_argument("--points", nargs="+", type=Point.parse, default=points, help="SESSIONSxROWS")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the rows")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    head = random_head(options.head)
    rows: list[dict[str, Any]] = [{"point": str(point)} for point in options.points]
    for row, point in zip(rows, options.points, strict=True):
        for name, step in head_steps(head, point, options.context).items():
            row[f"head, {name}"] = replay_us(step, options.repeats)
    del head
    with shape_model(options.draft, _DEVICE, widened=False) as model:
        spec = DecoderSpec.of(AutoConfig.from_pretrained(model.folder))
        assert model.source is not None
        weights = load_decoder_weights(model.source, spec, _DEVICE, _DTYPE, positions=8192)
        decoder = Decoder(spec, weights, attend=tree_attention)
        for row, point in zip(rows, options.points, strict=True):
            row["draft, step"] = replay_us(draft_steps(decoder, point, options.context)["step"], options.repeats)
            row["head / draft"] = row["head, step"] / row["draft, step"]
    table = Table(
        title=f"microseconds: head of {options.head}, draft of {options.draft}, {torch.cuda.get_device_name()}"
    )
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" if value < 1 else f"{value:.0f}"
                        for value in row.values()))  # fmt: skip
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0
