"""A bench: a scheduler with fake workers around it, without gRPC or torch, in virtual time."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokenizer import byte_tokenizer
from tests.coordinator.fake_drafts import FakeDraft
from tests.coordinator.fake_workers import (
    ENDLESS,
    FakeTarget,
    Growth,
    batch_of,
    expected_output,
    make_request,
)
from tests.coordinator.virtual_time import VirtualTimeLoop

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import GenerationRequest, GenerationResult, TokenDelta
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import registry_pb2


class Bench:
    """A scheduler with fake workers around it."""

    def __init__(self, **config: object) -> None:
        self.scheduler = Scheduler(CoordinatorConfig(port=0, **config))  # type: ignore[arg-type]
        self.limits = registry_pb2.WorkerLimits(max_sessions=8)
        self.targets: list[FakeTarget] = []

    def add_target(
        self, name: str = "target", target: FakeTarget | None = None, *, rests: bool = False, **options: object
    ) -> FakeTarget:
        target = target or FakeTarget(**options)  # type: ignore[arg-type]
        target.on_results = lambda results: self.scheduler.relay.take_results(name, results)
        target.on_lost = lambda reason: self.scheduler.remove_target(name, reason)
        if rests:
            target.runs.clear()
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

    def check_idle(self) -> None:
        """Nothing runs or waits."""
        self.check_workers()
        assert self.scheduler.running_sessions == self.scheduler.waiting_requests == 0

    def check_workers(self) -> None:
        """Nobody was told what no worker is to be told."""
        for target in self.targets:
            for error in target.errors:
                raise error

    def submit(self, request: GenerationRequest, *streams: TextStream) -> Generation:
        """A generation of a client who wants no text, unless streams are given."""
        return self.scheduler.submit(request, streams or [TextStream(None) for _ in range(request.n)])

    def begin(self, number: int = 1, **changes: Any) -> Session:
        """The session of a request that runs until its test ends."""
        changes.setdefault("sampling", ENDLESS)
        (session,) = self.submit(make_request(number, **changes)).sessions
        return session

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """The result of a request, whose choices all have the tokens that the target would give them alone."""
        generation = self.submit(request)
        outputs = [list(request.received.get(index, ())) for index in range(request.n)]
        results = list[GenerationResult]()
        try:
            async for event in generation:
                if isinstance(event, TokenDelta):
                    assert event.offset == len(outputs[event.index])
                    outputs[event.index].extend(event.token_ids)
                elif isinstance(event, GenerationResult):
                    results.append(event)
        finally:
            generation.cancel()
            self.check_workers()
        assert outputs == [expected_output(request)] * request.n
        (result,) = results
        return result

    async def generate_all(self, requests: Iterable[GenerationRequest]) -> list[GenerationResult]:
        """The results of several requests that run together."""
        return await asyncio.gather(*map(self.generate, requests))


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
