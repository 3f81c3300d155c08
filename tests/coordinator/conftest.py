"""A bench: a scheduler with fake workers around it, without gRPC or torch, in virtual time."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokenizer import byte_tokenizer
from tests.coordinator.fake_workers import FakeDraft, FakeTarget, Growth, batch_of, expected_output
from tests.coordinator.virtual_time import VirtualTimeLoop

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.messages import GenerationRequest, GenerationResult, TokenDelta
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.drafting.growth_source import GrowthSource
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2


class Bench:
    """A scheduler with fake workers around it."""

    def __init__(self, **config: object) -> None:
        self.scheduler = Scheduler(CoordinatorConfig(port=0, **config))  # type: ignore[arg-type]
        self.limits = registry_pb2.WorkerLimits(max_sessions=8, max_tree_nodes=64, max_step_tokens=256)
        self.targets: list[FakeTarget] = []

    def add_target(self, name: str = "target", target: FakeTarget | None = None, **options: object) -> FakeTarget:
        target = target or FakeTarget(**options)  # type: ignore[arg-type]
        target.on_results = lambda results: self.scheduler.relay.take_results(name, results)
        target.on_lost = lambda reason: self.scheduler.remove_target(name, reason)
        self.targets.append(target)
        self.scheduler.add_target(name, target, self.limits)  # type: ignore[arg-type]
        return target

    def add_draft(
        self, name: str = "draft", *, accuracy: float = 0.8, delay_s: float = 0.002, sources: Sequence[int] = ()
    ) -> FakeDraft:
        draft = FakeDraft(accuracy=accuracy, delay_s=delay_s, sources=[GrowthSource(number) for number in sources])
        draft.deliver = lambda growth: self.scheduler.relay.take_growth(name, growth)
        self.scheduler.drafts.add(name, draft, self.limits, sources=sources)  # type: ignore[arg-type]
        return draft

    def grow(self, draft: str, *growths: Growth) -> None:
        """One message of a draft."""
        self.scheduler.relay.take_growth(draft, batch_of(*growths))

    def check_workers(self) -> None:
        """Nobody was told what no worker is to be told."""
        for target in self.targets:
            for error in target.errors:
                raise error

    async def generate(self, request: GenerationRequest) -> tuple[list[list[int]], GenerationResult]:
        """Output tokens per choice, and the result."""
        streams = [TextStream(None) for _ in range(request.n)]
        generation = self.scheduler.submit(request, streams)
        outputs: list[list[int]] = [list(request.received.get(index, ())) for index in range(request.n)]
        result = None
        try:
            async for event in generation:
                if isinstance(event, TokenDelta):
                    assert event.offset == len(outputs[event.index])
                    outputs[event.index].extend(event.token_ids)
                elif isinstance(event, GenerationResult):
                    assert result is None
                    result = event
        finally:
            generation.cancel()
            self.check_workers()
        assert result is not None
        return outputs, result


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """On which event loop a test runs."""
    in_virtual_time = not {"bench", "make_bench"}.isdisjoint(getattr(item, "fixturenames", ()))
    return {"loop": VirtualTimeLoop if in_virtual_time else asyncio.new_event_loop}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """The files of a checkpoint that a coordinator reads, for a model over bytes."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
async def bench() -> Bench:
    # Within the loop, whose clock it reads.
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture
def expect_output() -> Callable[[Sequence[int], SamplingSpec], list[int]]:
    return expected_output


def request_numbered(number: int = 1, **changes: Any) -> GenerationRequest:
    settings = {
        "request_id": f"request-{number}",
        "prompt_token_ids": (number, 2, 3),
        "sampling": SamplingSpec(max_new_tokens=40),
    }
    return GenerationRequest(**settings | changes)


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    return request_numbered


@pytest.fixture
def assert_idle() -> Callable[[Bench], None]:
    def check(bench: Bench) -> None:
        bench.check_workers()
        assert bench.scheduler.running_sessions == 0
        assert bench.scheduler.waiting_requests == 0

    return check
