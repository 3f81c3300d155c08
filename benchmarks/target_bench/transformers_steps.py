"""The same steps through transformers: its own model, StaticCache and scaled-dot-product attention.

One step is a forward over `input_ids` [sessions, rows] at positions behind the contexts, with the trees as a boolean
mask [sessions, 1, rows, context + rows], then the argmax of every row's logits. The cache is a StaticCache of exactly
context + rows tokens, its context random; all sessions are equally long, so that no key is padding. That is the least
that transformers computes for such a step: its own loops add sampling, stopping rules and a copy to the host.

`eager` calls the model. `compiled` is `torch.compile` with static shapes and its default mode, captured in a CUDA
graph, so that neither launches nor guards are counted. A layer is compiled once and serves as all of them, and norm,
output layer and argmax together: the whole model at once takes Inductor a minute a size, and could besides fuse no more
than the sum at a layer's end with the next layer's norm. Inputs lie on the device in both.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.kernel_bench.forest import make_forest
from benchmarks.target_bench.models import BenchModel
from benchmarks.target_bench.points import Point
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.cache_utils import Cache

_WARM_UPS = 2


def load_transformers(model: BenchModel, device: torch.device) -> Any:
    """The model on the device, with the weights that Outrider's has."""
    if model.source is None:
        loaded = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16, local_files_only=True)
        torch.nn.Module.to(loaded, device)
        return loaded.eval().requires_grad_(False)
    config = AutoConfig.from_pretrained(model.folder, local_files_only=True)
    with device:
        loaded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded.eval().requires_grad_(False)
    for name, parameter in loaded.named_parameters():
        parameter.copy_(model.source.tensor(name))
    return loaded


class TransformersStep:
    """One point's step, ready to run.

    Args:
        model: of `load_transformers`.
        point: what a step computes.
    """

    def __init__(self, model: Any, point: Point) -> None:
        self._model, self._point = model, point
        device = model.device
        forest = make_forest(point.sessions, point.rows, device)
        sees_context = torch.ones(point.sessions, point.rows, point.context, dtype=torch.bool, device=device)
        self._mask = torch.cat([sees_context, forest.sees], dim=-1)[:, None]
        self._positions = point.context + forest.sees.sum(dim=-1) - 1
        self._tokens = torch.randint(0, model.config.vocab_size, (point.sessions, point.rows), device=device)
        self._cache = self._filled_cache()
        self.choices = torch.empty((point.sessions, point.rows), dtype=torch.int64, device=device)

    def eager(self) -> Callable[[], None]:
        """A step as plain calls."""
        for number, layer in enumerate(self._model.model.layers):
            layer.self_attn.layer_idx = number

        def run() -> None:
            logits = self._model(
                input_ids=self._tokens,
                attention_mask=self._mask,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
            ).logits
            torch.argmax(logits, dim=-1, out=self.choices)

        return run

    def compiled(self, **options: Any) -> Callable[[], None]:
        """A step as one CUDA graph of compiled kernels.

        Args:
            options: of `torch.compile`, beside static shapes.
        """
        run = self.layerwise(**options)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS + 1):
                self.rewind()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # More of them, and torch stops compiling at some number of layers, without a word.
        programs = counters["stats"]["unique_graphs"]
        if programs != 2:
            raise RuntimeError(f"{programs} programs were compiled, one for all layers and one for the end expected")
        self.rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def layerwise(self, **options: Any) -> Callable[[], None]:
        """The model's own modules one after the other, as its `forward` calls them, each kind compiled once."""
        torch._dynamo.reset()
        counters.clear()
        inner, head = self._model.model, self._model.lm_head
        caches = [_OneLayer([layer]) for layer in self._cache.layers]
        for layer in inner.layers:
            # Each has a cache to itself, so that all are the same program.
            layer.self_attn.layer_idx = 0

        def run_layer(layer: Any, hidden: torch.Tensor, angles: Any, cache: Any) -> torch.Tensor:
            return layer(
                hidden,
                attention_mask=self._mask,
                position_ids=self._positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=angles,
            )

        def choose(hidden: torch.Tensor) -> torch.Tensor:
            return head(inner.norm(hidden)).argmax(dim=-1)

        layer_step = torch.compile(run_layer, dynamic=False, fullgraph=True, **options)
        last_step = torch.compile(choose, dynamic=False, fullgraph=True, **options)

        def run() -> None:
            hidden = inner.embed_tokens(self._tokens)
            angles = inner.rotary_emb(hidden, position_ids=self._positions)
            for layer, cache in zip(inner.layers, caches, strict=True):
                hidden = layer_step(layer, hidden, angles, cache)
            self.choices.copy_(last_step(hidden))

        return run

    def rewind(self) -> None:
        """Forgets what the last step stored, so that the next has the same context."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._point.context)

    def _filled_cache(self) -> Any:
        config, point = self._model.config, self._point
        cache = StaticCache(config=config, max_cache_len=point.context + point.rows)
        device, dtype = self._model.device, self._model.dtype
        shape = (point.sessions, config.num_key_value_heads, point.context + point.rows, config.head_dim)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.lazy_initialization(*torch.empty((2, *shape), dtype=dtype, device=device)[:, :, :, :1])
            # Tensors of our own: its own are marked as static, and then every layer is compiled for itself.
            layer.keys, layer.values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
            layer.cumulative_length = torch.zeros_like(layer.cumulative_length)
        return cache


class _OneLayer(Cache):
    """A cache of one layer, which is every layer's first."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)


def time_ms(step: TransformersStep, run: Callable[[], None], *, repeats: int) -> float:
    """Median milliseconds between events around a step, launches included where the host is the slower."""
    times = []
    for number in range(_WARM_UPS + repeats):
        step.rewind()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= _WARM_UPS:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def free_memory() -> None:
    """What is no longer referred to goes back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
