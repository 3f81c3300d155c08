"""Steps of the decoder on CUDA: no waiting and no allocation once a bucket is captured; bits that depend on the prefix
alone in deterministic mode.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.batch import BatchBuilder, TreeChoices
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.models import embedded_target_path
from outrider.tree import ancestor_masks, node_depths

# The path 0, 2, 5, 6, 8 among nodes of other branches.
PARENTS = [0, 0, 1, 1, 2, 5, 0, 6, 2]
PATH = [0, 2, 5, 6, 8]


def make_runner(**options: Any) -> ModelRunner:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config: dict[str, Any] = {"num_slots": 8192, "max_num_seqs": 6, "max_tree_nodes": 16, "device": "cuda"} | options
    return ModelRunner(EngineConfig(model_path=embedded_target_path(), **config))


def add_chain(runner: ModelRunner, builder: BatchBuilder, row: int, tokens: Sequence[int], *, logits: bool) -> None:
    first = runner.slots.length(row)
    runner.slots.extend(row, len(tokens))
    builder.add_chain(row, tokens, first, logits)


def add_tree(runner: ModelRunner, builder: BatchBuilder, row: int, tokens: Sequence[int]) -> None:
    root = runner.slots.length(row)
    runner.slots.extend(row, len(tokens))
    parents = PARENTS[: len(tokens) - 1]
    builder.add_tree(
        row,
        tree_start=root,
        token_ids=tokens,
        positions=root + node_depths(parents),
        masks=ancestor_masks(parents),
        write_indices=range(root, root + len(tokens)),
    )


def prefill(runner: ModelRunner, tokens: Sequence[int], chunk: int, others: Sequence[int] = ()) -> int:
    """A row that holds the tokens, computed chunk by chunk, each beside one more token of the rows `others`."""
    row = runner.slots.acquire_row()
    for begin in range(0, len(tokens), chunk):
        builder = BatchBuilder()
        add_chain(runner, builder, row, tokens[begin : begin + chunk], logits=False)
        for other in others:
            add_chain(runner, builder, other, [3], logits=True)
        runner.forward(builder.build())
    return row


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_bits_depend_on_the_prefix_alone(dtype: Any) -> None:
    runner = make_runner(deterministic=True, dtype=dtype)
    steps = runner.steps
    assert steps is not None
    chance = np.random.default_rng(0)
    prompt = chance.integers(0, runner.vocab_size, 1301).tolist()
    nodes = chance.integers(0, runner.vocab_size, len(PARENTS) + 1).tolist()
    path = [nodes[number] for number in PATH]
    row = prefill(runner, prompt, 500)
    alone = []
    for token in path:
        builder = BatchBuilder()
        add_chain(runner, builder, row, [token], logits=True)
        alone.append(runner.forward(builder.build()))
    expected = torch.cat(alone)
    runner.slots.release_row(row)
    for chunk in (64, 1301):
        other = prefill(runner, prompt[:7], 3)
        row = prefill(runner, prompt, chunk, others=[other])
        for _ in range(3):  # without a graph, then with one
            builder = BatchBuilder()
            add_chain(runner, builder, other, prompt[7:80], logits=True)
            add_tree(runner, builder, row, nodes)
            logits = runner.forward(builder.build())[1:]
            assert torch.equal(logits[PATH], expected)
            runner.slots.truncate(row, len(prompt))
            while (missing := steps.missing) is not None:
                steps.capture(missing)
        assert steps.graphs > 0
        # As one chain, and with the path as the prompt's last chunk.
        builder = BatchBuilder()
        add_chain(runner, builder, row, path, logits=True)
        assert torch.equal(runner.forward(builder.build()), expected[-1:])
        for used in (row, other):
            runner.slots.release_row(used)


def choices_of(rows: int) -> TreeChoices:
    """One root each, sampled at temperature 1."""
    zeros = np.zeros(rows, dtype=np.int32)
    ones = np.ones(rows, dtype=np.float32)
    return TreeChoices(
        seeds=np.arange(rows),
        positions=zeros + 9,
        temperature=ones,
        top_p=ones,
        min_p=0 * ones,
        top_k=zeros,
        choice_index=zeros,
        candidates=zeros[:, None] - 1,
        tree_rows=np.arange(rows, dtype=np.int32)[:, None],
        first_child=zeros[:, None] - 1,
        next_sibling=zeros[:, None] - 1,
    )


@pytest.mark.gpu
# torch says once a process that this mode is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_steady_loop_neither_waits_nor_allocates() -> None:
    runner = make_runner()
    steps, rows = runner.steps, [prefill(runner, [5, 6, 7], 3) for _ in range(4)]
    assert steps is not None

    def step() -> Any:
        builder = BatchBuilder()
        for row in rows:
            add_chain(runner, builder, row, [8], logits=True)
        launched = steps.launch(steps.stage(builder.build(), choices_of(len(rows))))
        for row in rows:
            runner.slots.truncate(row, 3)
        return launched

    answers = []
    for _ in range(2):
        answers.append(step().result().tokens.tolist())
    while (missing := steps.missing) is not None:
        steps.capture(missing)
    for _ in range(6):  # every buffer of the ring once
        step().result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launched = [step() for _ in range(2)]
        answers += [one.result().tokens.tolist() for one in launched]
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert answers == [answers[0]] * 4
