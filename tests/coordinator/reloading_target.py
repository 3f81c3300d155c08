"""A fake target whose weights can be changed."""

import asyncio
from collections.abc import Sequence
from typing import Self

import grpc
from tests.coordinator.fake_workers import FakeTarget, TargetSession, Trees
from tests.coordinator.round_servicer import RoundServicer

from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.messages import FaultKind, RoundResults
from outrider.roles.registration import Registration
from outrider.rpc import RoleServer
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2, registry_pb2, target_pb2, target_pb2_grpc
from outrider.wire import WIRE_VERSION

VOCABULARY = 256
LENGTH = 12
OLD, NEW = common_pb2.Weights(version="old", path="/old"), common_pb2.Weights(version="new", path="/new", reloads=1)


def said(version: str) -> list[int]:
    """Return the tokens of a target with these weights: the letters of its version, again and again."""
    return [ord(version[place % len(version)]) for place in range(LENGTH)]


class Speaker(FakeTarget):
    """Part of a target process that serves one coordinator."""

    def __init__(self, process: "ReloadingTarget") -> None:
        super().__init__(step_s=0.001)
        self.process, self.runs = process, process.runs

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        super().open_session(opening)
        if opening.weights not in ("", self.process.weights.version):
            self.fail(opening.session_id, FaultKind.REPLACED, "weights were replaced")

    def verify(self, trees: Trees, failing: Sequence[int]) -> RoundResults:
        self.process.pauses_in -= 1
        if self.process.pauses_in == 0:
            self.runs.clear()
        return super().verify(trees, failing)

    def choose(self, session: TargetSession) -> int:
        return said(self.process.weights.version)[(len(session.tokens) - session.prompt_length) % LENGTH]


class ReloadingTarget(RoundServicer):
    """A target process: loads whatever folder it knows, and speaks by its weights. Use as a context.

    Attributes:
        folders: that it can run with, and their versions.
        runs: cleared, it begins no round.
        pauses_in: after so many rounds it clears that itself.
        breaks: a swap fails with this.
        copies: cleared, a swap takes its time.
    """

    def __init__(self, name: str, folder, coordinators: list[CoordinatorServer], weights=OLD) -> None:
        super().__init__(lambda: Speaker(self))
        self.name, self._folder, self._coordinators = name, folder, coordinators
        self.weights = common_pb2.Weights()
        self.weights.CopyFrom(weights)
        self.folders = {"/old": "old", "/new": "new"}
        self.runs = asyncio.Event()
        self.runs.set()
        self.copies = asyncio.Event()
        self.copies.set()
        self.swaps_begun = 0
        self.breaks = ""
        self.pauses_in = 0

    @property
    def session_count(self) -> int:
        """Number of sessions of all coordinators."""
        return sum(len(target.sessions) for target in self.targets.values())

    async def __aenter__(self) -> Self:
        add = target_pb2_grpc.add_TargetServiceServicer_to_server
        self._server = RoleServer(services=[], add_services=lambda server: add(self, server), address="127.0.0.1:0")
        await self._server.start()
        model = common_pb2.ModelInfo(
            name="fake", vocab_size=VOCABULARY, tokenizer_hash=tokenizer_hash(self._folder), max_model_len=512
        )
        model.weights.CopyFrom(self.weights)
        introduction = registry_pb2.WorkerIntroduction(
            worker_id=self.name,
            name=self.name,
            role=registry_pb2.WORKER_ROLE_TARGET,
            address=self._server.address,
            model=model,
            limits=registry_pb2.WorkerLimits(max_sessions=8),
            wire_version=WIRE_VERSION,
        )
        self._registered = [
            asyncio.create_task(Registration(each.address, introduction, self._load).keep())
            for each in self._coordinators
        ]
        return self

    async def __aexit__(self, *_) -> None:
        for task in self._registered:
            task.cancel()
        await asyncio.gather(*self._registered, return_exceptions=True)
        await self._server.stop(grace_s=0)

    def _load(self) -> common_pb2.WorkerLoad:
        return common_pb2.WorkerLoad(weights=self.weights)

    async def Reload(self, request, context):  # noqa: N802
        version = self.folders.get(request.path)
        if version is None or (request.HasField("swap") and version != self.weights.version and self.breaks):
            message = self.breaks if version else f"{request.path}: model.norm.weight is missing"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        found = common_pb2.Weights(version=version, path=request.path, reloads=request.swap.reloads)
        if request.HasField("swap") and version != self.weights.version:
            self.swaps_begun += 1
            await self.copies.wait()
            self.swap(found)
            return target_pb2.ReloadResponse(found=found, running=self.weights, swap_ns=5)
        self.weights.reloads = max(self.weights.reloads, found.reloads)
        return target_pb2.ReloadResponse(found=found, running=self.weights)

    def swap(self, weights: common_pb2.Weights) -> None:
        """Other weights from now on: all sessions are closed, and whoever had them is told."""
        self.weights.CopyFrom(weights)
        for target in list(self.targets.values()):
            for session_id in list(target.sessions):
                target.fail(session_id, FaultKind.LOST, "weights were replaced")
