"""The processes of all setups: each worker is started once, and serves every setup that it belongs to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.end_bench.cells import Service, Setup
from benchmarks.end_bench.relay import Relay
from benchmarks.end_bench.step_times import StepTimes

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.ports import free_port
from outrider.role_process import RoleProcess, prepare_forks, stop_all

_LOOPBACK = "127.0.0.1"
# Another name of this machine: a worker that is advertised under it is dialled through the relay there.
_RELAYED = "127.0.0.2"
_POLL_S = 0.05
_IN_IMITATED_TARGET = Path(__file__).resolve().parent / "in_imitated_target"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker.

    Attributes:
        role: target or draft.
        gpu: it runs on.
        setups: it serves.
        is_far: whether it is reached through a relay.
        is_imitated: whether its steps take what a larger model's do.
    """

    role: str
    gpu: int
    setups: frozenset[Setup]
    is_far: bool = False
    is_imitated: bool = False


PLACES = {
    "target-0": Place(role="target", gpu=0, setups=frozenset(Setup) - {Setup.FAR_TARGET, Setup.IMITATED}),
    "target-1": Place(role="target", gpu=1, setups=frozenset({Setup.REPLICAS, Setup.THREE_TARGETS})),
    "target-2": Place(role="target", gpu=2, setups=frozenset({Setup.THREE_TARGETS})),
    "target-imitated": Place(role="target", gpu=0, setups=frozenset({Setup.IMITATED}), is_imitated=True),
    "target-far": Place(role="target", gpu=0, setups=frozenset({Setup.FAR_TARGET}), is_far=True),
    "draft-1": Place(role="draft", gpu=1, setups=frozenset({Setup.APART})),
    "draft-0": Place(role="draft", gpu=0, setups=frozenset({Setup.SHARED, Setup.IMITATED})),
    "draft-3": Place(role="draft", gpu=3, setups=frozenset({Setup.THREE_TARGETS})),
    "draft-far": Place(role="draft", gpu=1, setups=frozenset({Setup.FAR_DRAFT}), is_far=True),
    "draft-near": Place(role="draft", gpu=1, setups=frozenset({Setup.FAR_TARGET})),
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
        step_times: of the imitated target.
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
    step_times: StepTimes = field(default_factory=StepTimes)
    start_timeout_s: float = 180.0


class Services:
    """All of them at once, one coordinator each; use with `with`.

    Args:
        options: of their processes.
        services: to start.
        say: takes a line of progress.
        log_folder: where what the processes wrote to stderr is kept.

    Attributes:
        endpoints: host:port of each one's coordinator.
    """

    def __init__(
        self,
        options: ServiceOptions,
        services: Sequence[Service],
        say: Callable[[str], None],
        *,
        log_folder: Path | None = None,
    ) -> None:
        self._options, self._services, self._say, self._log_folder = options, services, say, log_folder
        self.endpoints: dict[Service, str] = {}
        self._roles: dict[str, RoleProcess] = {}
        self._relays: dict[Setup, Relay] = {}
        self._stack = ExitStack()

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
        self._stack.close()

    def add_rtt(self, setup: Setup, rtt_ms: float) -> None:
        """Sets the round trip of a delayed link."""
        if setup in self._relays:
            self._relays[setup].rtt_s = rtt_ms / 1e3

    def check_alive(self) -> None:
        """Tells of a process that has ended.

        Raises:
            WorkerUnavailable: one has, with its last lines.
        """
        for role in self._roles.values():
            role.check_alive()

    def _start(self, deadline: float) -> None:
        options = self._options
        coordinators: dict[Service, RoleProcess] = {}
        for service in self._services:
            name = f"coordinator of {service.setup}, rounds {service.round_timing}"
            arguments = [
                "--port",
                "0",
                "--rounds",
                service.round_timing,
                *_model(options.target),
                *options.coordinator_args,
            ]
            coordinators[service] = self._roles[name] = RoleProcess(name, "coordinator", arguments)
        if not options.device.startswith("cuda"):
            prepare_forks()
        for service, coordinator in coordinators.items():
            self.endpoints[service] = coordinator.await_ready(deadline)
        wanted = dict.fromkeys(self._services, 0)
        for name, place in PLACES.items():
            served = [service for service in self._services if service.setup in place.setups]
            if served:
                self._start_worker(name, place, served)
            for service in served:
                wanted[service] += 1
        for service, count in wanted.items():
            self._await_workers(self.endpoints[service], count, deadline)

    def _start_worker(self, name: str, place: Place, served: Sequence[Service]) -> None:
        options = self._options
        on_gpu = options.device.startswith("cuda")
        arguments = ["--device", "cuda:0" if on_gpu else options.device, *options.worker_args]
        arguments += options.target_args if place.role == "target" else options.draft_args
        arguments += _model(options.target if place.role == "target" else options.draft)
        for service in served:
            arguments += ["--coordinators", self.endpoints[service]]
        if place.is_far:
            port = free_port()
            relay = self._stack.enter_context(Relay((_RELAYED, port), (_LOOPBACK, port)))
            self._relays |= {service.setup: relay for service in served}
            arguments += ["--host", _LOOPBACK, "--port", str(port), "--advertised-host", _RELAYED]
        environment = {"CUDA_VISIBLE_DEVICES": str(min(place.gpu, options.gpus - 1))} if on_gpu else {}
        if place.is_imitated:
            environment |= _imitating(options.step_times)
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


def _imitating(times: StepTimes) -> dict[str, str]:
    """What has a worker imitate: see in_imitated_target/sitecustomize.py."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(_IN_IMITATED_TARGET), str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OUTRIDER_IMITATED_STEP_TIMES": str(times)}


def _model(folder: Path | None) -> list[str]:
    return [] if folder is None else ["--model-path", str(folder)]
