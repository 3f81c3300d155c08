"""The processes of all setups: each worker is started once, and serves every setup that it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.end_bench.cells import Setup

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.role_process import RoleProcess, prepare_forks, stop_all

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker.

    Attributes:
        role: target or draft.
        gpu: it runs on.
        setups: it serves.
    """

    role: str
    gpu: int
    setups: frozenset[Setup]


PLACES = {
    "target-0": Place(role="target", gpu=0, setups=frozenset(Setup)),
    "target-1": Place(role="target", gpu=1, setups=frozenset({Setup.REPLICAS, Setup.THREE_TARGETS})),
    "target-2": Place(role="target", gpu=2, setups=frozenset({Setup.THREE_TARGETS})),
    "draft-1": Place(role="draft", gpu=1, setups=frozenset({Setup.APART})),
    "draft-0": Place(role="draft", gpu=0, setups=frozenset({Setup.SHARED})),
    "draft-3": Place(role="draft", gpu=3, setups=frozenset({Setup.THREE_TARGETS})),
}


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How roles are started.

    Attributes:
        target, draft: checkpoint folders; None for the embedded models.
        device: cpu, or cuda: then every worker sees its own GPU alone.
        gpus: that there are; workers of further ones share the last.
        worker_args: of both kinds of workers.
        target_args, draft_args, coordinator_args: further ones.
        start_timeout_s: until all of them serve.
    """

    target: Path | None
    draft: Path | None
    device: str
    gpus: int = 4
    worker_args: Sequence[str] = ()
    target_args: Sequence[str] = ()
    draft_args: Sequence[str] = ()
    coordinator_args: Sequence[str] = ()
    start_timeout_s: float = 180.0


class Services:
    """All of them at once, one coordinator each; use with `with`.

    Args:
        options: of their processes.
        setups: to start.
        say: takes a line of progress.
        log_folder: where what the processes wrote to stderr is kept.

    Attributes:
        endpoints: host:port of each one's coordinator.
    """

    def __init__(
        self,
        options: ServiceOptions,
        setups: Sequence[Setup],
        say: Callable[[str], None],
        *,
        log_folder: Path | None = None,
    ) -> None:
        self._options, self._setups, self._say, self._log_folder = options, setups, say, log_folder
        self.endpoints: dict[Setup, str] = {}
        self._roles: dict[str, RoleProcess] = {}

    def __enter__(self) -> Self:
        began = time.monotonic()
        deadline = began + self._options.start_timeout_s
        try:
            self._start(deadline)
        except BaseException:
            self.__exit__()
            raise
        self._say(f"{len(self._roles)} processes serve after {time.monotonic() - began:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        folder = self._log_folder
        if folder is not None:
            for name, role in self._roles.items():
                (folder / f"{name}.log").write_text(role.stderr(), encoding="utf-8")
        stop_all(list(self._roles.values()))

    def check_alive(self) -> None:
        """Tells of a process that has ended.

        Raises:
            WorkerUnavailable: one has, with its last lines.
        """
        for role in self._roles.values():
            role.check_alive()

    def _start(self, deadline: float) -> None:
        options = self._options
        coordinators: dict[Setup, RoleProcess] = {}
        for setup in self._setups:
            name = f"coordinator of {setup}"
            arguments = ["--port", "0", *_model(options.target), *options.coordinator_args]
            coordinators[setup] = self._roles[name] = RoleProcess(name, "coordinator", arguments)
        if not options.device.startswith("cuda"):
            prepare_forks()
        for setup, coordinator in coordinators.items():
            self.endpoints[setup] = coordinator.await_ready(deadline)
        wanted = dict.fromkeys(self._setups, 0)
        for name, place in PLACES.items():
            served = [setup for setup in self._setups if setup in place.setups]
            if served:
                self._start_worker(name, place, served)
            for setup in served:
                wanted[setup] += 1
        for setup, count in wanted.items():
            self._await_workers(self.endpoints[setup], count, deadline)

    def _start_worker(self, name: str, place: Place, served: Sequence[Setup]) -> None:
        options = self._options
        on_gpu = options.device.startswith("cuda")
        arguments = ["--device", "cuda:0" if on_gpu else options.device, *options.worker_args]
        arguments += options.target_args if place.role == "target" else options.draft_args
        arguments += _model(options.target if place.role == "target" else options.draft)
        for setup in served:
            arguments += ["--coordinators", self.endpoints[setup]]
        environment = {"CUDA_VISIBLE_DEVICES": str(min(place.gpu, options.gpus - 1))} if on_gpu else {}
        self._roles[name] = RoleProcess(
            name,
            f"{place.role}-worker",
            arguments,
            environment=environment,
            # Workers on GPUs are started as a deployment over several machines would.
            forked=not on_gpu,
        )

    def _await_workers(self, endpoint: str, count: int, deadline: float) -> None:
        with Client(endpoint) as client:
            while True:
                self.check_alive()
                serving = sum(worker.state == "serving" for worker in client.server_info().workers)
                if serving == count:
                    return
                if time.monotonic() > deadline:
                    raise WorkerUnavailable(f"{serving} of {count} workers serve at {endpoint} in time")
                time.sleep(_POLL_S)


def _model(folder: Path | None) -> list[str]:
    return [] if folder is None else ["--model", str(folder)]
