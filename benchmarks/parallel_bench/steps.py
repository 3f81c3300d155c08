"""Verify steps through the runner that serves: one session, a tree behind its context, walked on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.parallel_bench.models import BenchModel

from outrider.engine.batch import BatchBuilder, ForwardBatch, TreeChoices
from outrider.engine.config import DtypeName
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.step_staging import need_of


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of one size of steps, milliseconds.

    Attributes:
        tokens: rows of the step.
        alone_ms: median of a step from the first work of the device to its last, each waited for.
        wall_ms: median of the same on the host, from staging to the answer.
        running_ms: of each of many steps that follow one another without a wait.
    """

    tokens: int
    alone_ms: float
    wall_ms: float
    running_ms: float


def make_runner(
    model: BenchModel, ranks: int, *, dtype: DtypeName = "bfloat16", most_tokens: int, context: int
) -> ModelRunner:
    """The shape, loaded on so many GPUs."""
    config = EngineConfig(
        model_path=model.folder,
        device="cuda",
        dtype=dtype,
        num_slots=context + 2 * most_tokens,
        max_num_seqs=1,
        max_model_len=context + most_tokens,
        max_tree_nodes=most_tokens,
        tensor_parallel_size=ranks,
        enable_prefix_caching=False,
    )
    return ModelRunner(config, source=model.source())


def compile_steps(runner: ModelRunner, tokens: Sequence[int], *, context: int) -> None:
    """What the steps of all these sizes need, side by side."""
    steps = runner.steps
    assert steps is not None
    needs = [need_of(*tree_step(0, count, context=context, vocab_size=runner.vocab_size)) for count in tokens]
    steps.compile(list(dict.fromkeys(steps._ladder.bucket(need) for need in needs)))


def measure_steps(runner: ModelRunner, tokens: int, *, context: int, repeats: int) -> StepTimes:
    """One size of steps; its graph is captured first."""
    row = runner.slots.acquire_row()
    runner.slots.extend(row, context + tokens)
    batch, choices = tree_step(row, tokens, context=context, vocab_size=runner.vocab_size)
    steps = runner.steps
    assert steps is not None
    first = steps.stage(batch, choices)
    steps.launch(first).result()
    steps.capture(first.bucket)
    alone, walls = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        launched = steps.launch(steps.stage(batch, choices))
        launched.result()
        walls.append(1e3 * (time.perf_counter() - began))
        alone.append(launched.device_ns() / 1e6)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        launched = steps.launch(steps.stage(batch, choices))
    launched.result()
    running_ms = 1e3 * (time.perf_counter() - began) / repeats
    runner.slots.release_row(row)
    return StepTimes(
        tokens=tokens, alone_ms=statistics.median(alone), wall_ms=statistics.median(walls), running_ms=running_ms
    )


def tree_step(row: int, tokens: int, *, context: int, vocab_size: int) -> tuple[ForwardBatch, TreeChoices]:
    """A root with `tokens - 1` nodes behind a context of so many keys; greedy choices."""
    random = np.random.default_rng(tokens)
    parents = np.array([-1, *(random.integers(max(0, node - 6), node) for node in range(1, tokens))])
    # Each node's last child so far, for the lists that a walk goes along.
    first_child, next_sibling = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
    depth, last_child = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
    masks = np.zeros((tokens, -(-tokens // 64)), np.uint64)
    for node in range(tokens):
        parent = parents[node]
        if parent >= 0:
            depth[node], masks[node] = depth[parent] + 1, masks[parent]
            if last_child[parent] < 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node
        masks[node, node // 64] |= np.uint64(1) << np.uint64(node % 64)
    ids = random.integers(0, vocab_size, tokens)
    builder = BatchBuilder()
    builder.add_tree(
        row,
        tree_start=context,
        token_ids=ids.tolist(),
        positions=(context + depth).tolist(),
        masks=masks.view(np.int64),
        write_indices=range(context, context + tokens),
    )
    zeros, ones = np.zeros(tokens, np.float32), np.ones(tokens, np.float32)
    choices = TreeChoices(
        seeds=np.zeros(tokens, np.int64),
        positions=(context + depth + 1).astype(np.int32),
        temperature=zeros,
        top_p=ones,
        min_p=zeros,
        top_k=np.zeros(tokens, np.int32),
        choice_index=np.zeros(tokens, np.int32),
        candidates=np.where(np.arange(tokens) > 0, ids, -1).astype(np.int32)[None],
        tree_rows=np.arange(tokens, dtype=np.int32)[None],
        first_child=first_child[None],
        next_sibling=next_sibling[None],
    )
    return builder.build(), choices
