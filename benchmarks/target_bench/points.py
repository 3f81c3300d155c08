"""What is measured: rows, sessions and contexts of a step, and the least that the hardware needs for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.kernel_bench.case import Machine
from benchmarks.target_bench.models import ModelSizes

TOKENS = (1, 8, 16, 32, 64, 128, 256)
SESSIONS = (1, 8, 32, 64)
CONTEXTS = (1024, 8192, 32768)
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, order=True)
class Point:
    """A step: `sessions` trees of `tokens / sessions` rows each, roots included, behind `context` tokens each."""

    context: int
    sessions: int
    tokens: int

    @property
    def rows(self) -> int:
        """Of one session: its root and its nodes."""
        return self.tokens // self.sessions

    def __str__(self) -> str:
        return f"{self.tokens} rows, {self.sessions} x {self.context}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """From TOKENSxSESSIONS@CONTEXT.

        Raises:
            ValueError: the text is something else, or the tokens cannot be shared equally.
        """
        try:
            tokens, rest = text.split("x")
            sessions, context = (int(part) for part in rest.split("@"))
            point = cls(context, sessions, int(tokens))
        except ValueError as error:
            raise ValueError(f"{text!r} given, TOKENSxSESSIONS@CONTEXT needed, such as 256x32@2048") from error
        if min(point.context, point.sessions, point.tokens) < 1 or point.tokens % point.sessions:
            raise ValueError(f"{text!r} given, tokens must be a multiple of the sessions and none may be 0")
        return point


# What targets are stated for (report.py), at the 8B shape on one H200.
ASKED = (Point(1024, 1, 1), Point(1024, 1, 64), Point(2048, 32, 256))
QUICK = (*ASKED, Point(1024, 64, 64), Point(8192, 1, 16), Point(8192, 32, 256), Point(32768, 1, 64))


def grid(contexts: Iterable[int] = CONTEXTS) -> list[Point]:
    """Every combination in which each session has a row, and what was asked for."""
    points = {
        Point(context, sessions, tokens)
        for context in contexts
        for sessions in SESSIONS
        for tokens in TOKENS
        if tokens >= sessions
    }
    return sorted(points | set(ASKED))


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a step, in milliseconds.

    Attributes:
        products_ms: reading every weight once, or multiplying, whichever takes longer.
        attention_ms: reading the keys and values of the contexts, or their products.
        bound: "bytes" or "FLOPs": which of the two `products_ms` is.
    """

    products_ms: float
    attention_ms: float
    bound: str

    @property
    def ms(self) -> float:
        """Both."""
        return self.products_ms + self.attention_ms


def step_floor(sizes: ModelSizes, point: Point, machine: Machine, *, quantized: bool = False) -> Floor:
    """At the rates that the machine reached in the same run; every row's logits are computed.

    `quantized` layers have a byte a weight; products are counted at the rate of 16 bits all the same.
    """
    weights = sizes.layer_weights + sizes.head_weights
    layer_bytes = sizes.layer_weights * (1 if quantized else _BYTES)
    by_bytes = (layer_bytes + _BYTES * sizes.head_weights) / machine.copy_bytes_per_s
    by_flops = 2 * weights * point.tokens / machine.flops_per_s
    kv_tokens = point.sessions * point.context + 2 * point.tokens
    kv_bytes = _BYTES * sizes.kv_values_per_token * kv_tokens
    attention = max(kv_bytes / machine.copy_bytes_per_s, attention_flops(sizes, point) / machine.flops_per_s)
    return Floor(
        products_ms=1e3 * max(by_bytes, by_flops),
        attention_ms=1e3 * attention,
        bound="FLOPs" if by_flops > by_bytes else "bytes",
    )


def attention_flops(sizes: ModelSizes, point: Point) -> int:
    """Scores and weighted sums of every row over its context."""
    return 4 * sizes.layers * sizes.heads * sizes.head_dim * point.tokens * point.context


def prefill_flops(sizes: ModelSizes, tokens: int) -> int:
    """Of one prompt: every layer's products, causal attention, and the output layer for the last token alone."""
    attention = 2 * sizes.layers * sizes.heads * sizes.head_dim * tokens * (tokens + 1)
    return 2 * (sizes.layer_weights * tokens + sizes.head_weights) + attention


def kv_bytes(sizes: ModelSizes, point: Point) -> int:
    """Memory that the contexts of a step take."""
    return _BYTES * sizes.kv_values_per_token * point.sessions * (point.context + point.rows)
