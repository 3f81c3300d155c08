"""Which graph a step runs in, and which are captured; what they compute is for the GPU's tests."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.engine.buckets import Bucket
from outrider.engine.step_graphs import CUTS, StepGraphs
from outrider.engine.step_program import StepOutput, StepProgram

SMALL = Bucket(tokens=4, sessions=1, keys=90, query_len=4, logit_rows=4, nodes=4, words=1)
LARGE = replace(SMALL, tokens=8, sessions=4, query_len=8, logit_rows=8, nodes=8)
LARGEST = replace(LARGE, tokens=16)


class NotedGraphs(StepGraphs):
    """Captures by noting; what takes more rows than there is memory for fails."""

    def __init__(self, *, most_rows: int = 1000, strict: bool = False) -> None:
        program = cast(StepProgram, SimpleNamespace(device=torch.device("cpu")))
        super().__init__(program, max_tokens=16, enabled=True, strict=strict)
        self._enabled, self.most_rows = True, most_rows
        self.noted: list[Bucket] = []

    def _capture(self, bucket: Bucket) -> Any:
        if bucket.tokens > self.most_rows:
            raise torch.OutOfMemoryError("no memory")
        self.noted.append(bucket)


def test_a_step_runs_in_its_bucket_or_in_the_smallest_captured_one_that_holds_it() -> None:
    graphs = NotedGraphs()
    assert graphs.choose(SMALL) == SMALL
    for bucket in (LARGEST, LARGE):
        graphs.capture(bucket)
    assert len(graphs) == 2
    assert graphs.choose(SMALL) == LARGE
    assert graphs.choose(replace(SMALL, sessions=5)) == replace(SMALL, sessions=5)
    # Where logits are wanted, walks do not help.
    assert graphs.choose(replace(SMALL, nodes=0)) == replace(SMALL, nodes=0)
    graphs.capture(SMALL)
    assert graphs.choose(SMALL) == SMALL


def test_what_is_asked_for_twice_is_missing_until_it_is_captured_and_due_after_a_few_steps() -> None:
    graphs = NotedGraphs()
    graphs.choose(LARGE)
    assert graphs.missing is None
    for bucket in (SMALL, LARGE, SMALL, SMALL):
        graphs.choose(bucket)
    assert (graphs.missing, graphs.due) == (SMALL, None)
    graphs.choose(SMALL)
    assert graphs.missing == graphs.due == SMALL
    graphs.capture(SMALL)
    assert graphs.missing == LARGE
    graphs.capture(LARGE)
    assert graphs.missing is None
    graphs.choose(LARGE)
    for _ in range(9):
        graphs.choose(replace(LARGE, tokens=17))
    assert graphs.missing is None
    assert graphs.noted == [SMALL, LARGE]
    # Where a larger one serves meanwhile, it takes more steps: a capture takes longer than some tens of them.
    other = replace(SMALL, tokens=2, query_len=2)
    for _ in range(127):
        assert graphs.choose(other) == SMALL
    assert graphs.missing == other
    assert graphs.due is None
    graphs.choose(other)
    assert graphs.due == other


def test_a_rehearsal_runs_the_first_layers_of_every_bucket_and_nothing_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[int, int]] = []

    def run(bucket: Bucket, _data: torch.Tensor, after_layer: Any) -> StepOutput:
        if bucket == LARGEST:
            raise torch.OutOfMemoryError("no memory")
        for layer in range(9):
            ran.append((bucket.tokens, layer))
            after_layer(layer + 1)
        raise AssertionError("the rest of the step is of no use")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_given: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    program = cast(StepProgram, SimpleNamespace(device=torch.device("cpu"), run=run))
    graphs = StepGraphs(program, max_tokens=16, enabled=True)
    graphs.rehearse([SMALL], layers=2)
    assert not ran
    graphs._enabled = True
    graphs.rehearse([SMALL, LARGEST, LARGE], layers=2)
    assert sorted(ran) == [(4, 0), (4, 1), (8, 0), (8, 1)]
    assert len(graphs) == 0


def test_where_a_capture_must_not_fail_none_is_due_and_those_asked_for_are_made() -> None:
    graphs = NotedGraphs(strict=True)
    for _ in range(200):
        graphs.choose(SMALL)
    assert (graphs.missing, graphs.due) == (SMALL, None)
    graphs.capture(SMALL)
    assert graphs.noted == [SMALL]


def test_without_memory_a_bucket_stays_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    graphs = NotedGraphs(most_rows=8)
    for _ in range(2):
        graphs.choose(LARGEST)
    with caplog.at_level(logging.WARNING):
        graphs.capture(LARGEST)
    assert "no GPU memory for a CUDA graph" in caplog.text
    for _ in range(3):
        assert graphs.choose(LARGEST) == LARGEST
    assert graphs.missing is None and len(graphs) == 0
    with pytest.raises(torch.OutOfMemoryError):
        NotedGraphs(most_rows=8, strict=True).capture(LARGEST)


def test_a_step_is_captured_as_several_graphs_and_an_error_ends_the_one_it_came_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class NotedGraph:
        def __init__(self) -> None:
            self.number = sum(word.startswith("begin") for word in told)

        def capture_begin(self, **_options: object) -> None:
            told.append(f"begin {self.number}")

        def capture_end(self) -> None:
            told.append(f"end {self.number}")

        def replay(self) -> None:
            told.append(f"replay {self.number}")

    def run(_bucket: Bucket, _data: torch.Tensor, after_layer: Any = None) -> StepOutput:
        for layer in range(layers if after_layer else 0):
            if layer == failing:
                raise torch.OutOfMemoryError("no memory")
            told.append("layer")
            after_layer(layer + 1)
        return StepOutput(logits=None, answer=torch.zeros(0, dtype=torch.int32))

    for name in ("synchronize", "empty_cache", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_given: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NotedGraph)
    program = cast(StepProgram, SimpleNamespace(device=torch.device("cpu"), run=run))
    graphs = StepGraphs(program, max_tokens=16, enabled=True)
    graphs._enabled, graphs._stream = True, cast(Any, SimpleNamespace(wait_stream=lambda _other: None))
    layers, failing = 9, None
    graphs.capture(SMALL)
    two, six, one = (["layer"] * count for count in (2, 6, 1))
    assert told == ["begin 0", *two, "end 0", "begin 1", *six, "end 1", "begin 2", *one, "end 2"]
    told.clear()
    graphs.run(SMALL, graphs._nothing(SMALL))
    assert told == ["replay 0", "replay 1", "replay 2"]
    told.clear()
    graphs.cuts = ()
    graphs.capture(LARGEST)
    assert told == ["begin 0", *["layer"] * 9, "end 0"]
    told.clear()
    graphs.cuts = CUTS
    failing = 3
    graphs.capture(LARGE)
    assert told == ["begin 0", *two, "end 0", "begin 1", "layer", "end 1"]
    assert len(graphs) == 2
