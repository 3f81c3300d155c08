"""The processes of all setups: each worker is started once, and serves every setup that it belongs to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks import results
from benchmarks.end_bench.cells import Setup
from benchmarks.end_bench.figures import Totals
from benchmarks.end_bench.links import Links

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.models import embedded_draft_path
from outrider.roles.role_process import RoleProcess, prepare_forks, stop_all

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker.

    Attributes:
        role: target or draft.
        gpus: it runs on.
        is_resident: whether it is a target with a draft model beside its own.
    """

    role: str
    gpus: tuple[int, ...]
    is_resident: bool = False

    @property
    def name(self) -> str:
        """The name of its process."""
        return f"{'resident' if self.is_resident else self.role}-{self.gpus[0]}"


def places_of(setup: Setup, *, target_gpus: int = 1) -> list[Place]:
    """Return the workers of a setup: targets on the first GPUs, drafts on those behind.

    Args:
        setup: that they serve.
        target_gpus: of each target.
    """
    targets = [
        Place(
            role="target",
            gpus=tuple(range(number * target_gpus, (number + 1) * target_gpus)),
            is_resident=setup.is_resident,
        )
        for number in range(setup.targets)
    ]
    behind = 0 if setup.on_one_gpu else setup.targets * target_gpus
    return targets + [Place(role="draft", gpus=(behind + number,)) for number in range(setup.drafts)]


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options that roles are started with.

    Attributes:
        target, draft: checkpoint folders; None for the embedded models.
        device: cpu, or cuda: then every worker sees its own GPU alone.
        start_timeout_s: until all of them serve.
        target_gpus: of each target.
        gpus: that there are; workers of further ones share the last.
        coordinators: of each setup, the most of any cell.
        through_proxies: whether coordinators dial proxies of the workers.
        worker_args: of both kinds of workers.
        target_args, draft_args, coordinator_args: further ones.
    """

    target: Path | None
    draft: Path | None
    device: str
    start_timeout_s: float
    target_gpus: int = 1
    gpus: int = 4
    coordinators: int = 1
    through_proxies: bool = False
    worker_args: Sequence[str] = ()
    target_args: Sequence[str] = ()
    draft_args: Sequence[str] = ()
    coordinator_args: Sequence[str] = ()


class Services:
    """All of them at once, each with coordinators of its own; use with `with`.

    Args:
        options: of their processes.
        setups: to start.
        say: takes a line of progress.
        log_folder: where what the processes wrote to stderr is kept.

    Attributes:
        endpoints: host:port of each one's coordinators.
        links: proxies between coordinators and workers, if there are any.
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
        self.endpoints: dict[Setup, list[str]] = {}
        self.links = Links() if options.through_proxies else None
        self._roles: dict[str, RoleProcess] = {}
        self._coordinators: dict[Setup, list[RoleProcess]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        began = time.monotonic()
        deadline = began + self._options.start_timeout_s
        if self.links is not None:
            self._stack.enter_context(self.links)
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
        with self._stack:
            stop_all(list(self._roles.values()))

    def check_alive(self) -> None:
        """Raise if a process has ended.

        Raises:
            WorkerUnavailable: one has, with its last lines.
        """
        for role in self._roles.values():
            role.check_alive()

    def totals(self, setup: Setup, coordinators: int) -> Totals:
        """Return what so many of a setup's coordinators have counted so far."""
        infos = []
        for endpoint in self.endpoints[setup][:coordinators]:
            # A connection that is held meanwhile would be ended for asking after the server without having a call.
            with Client(endpoint) as client:
                infos.append(client.server_info())
        return Totals.of(
            infos, cpu_s=sum(results.cpu_s(role.process.pid) for role in self._coordinators[setup][:coordinators])
        )

    def _start(self, deadline: float) -> None:
        options = self._options
        arguments = ["--port", "0", *_model(options.target), *options.coordinator_args]
        for setup in self._setups:
            for number in range(options.coordinators):
                name = f"coordinator-{number} of {setup.name}"
                self._roles[name] = RoleProcess(name, "coordinator", arguments)
                self._coordinators.setdefault(setup, []).append(self._roles[name])
        if not options.device.startswith("cuda"):
            prepare_forks()
        for setup, coordinators in self._coordinators.items():
            self.endpoints[setup] = [coordinator.await_ready(deadline) for coordinator in coordinators]
        served: dict[Place, list[Setup]] = {}
        for setup in self._setups:
            for place in places_of(setup, target_gpus=options.target_gpus):
                served.setdefault(place, []).append(setup)
        for place, setups in served.items():
            self._start_worker(place, setups)
        for setup in self._setups:
            for endpoint in self.endpoints[setup]:
                self._await_workers(endpoint, setup.targets + setup.drafts, deadline)

    def _start_worker(self, place: Place, served: Sequence[Setup]) -> None:
        options = self._options
        on_gpu, is_target = options.device.startswith("cuda"), place.role == "target"
        arguments = ["--device", options.device, *options.worker_args]
        arguments += options.target_args if is_target else options.draft_args
        arguments += _model(options.target if is_target else options.draft)
        if is_target and len(place.gpus) > 1:
            arguments += ["--tensor-parallel-size", str(len(place.gpus))]
        if self.links is not None:
            arguments += self.links.add(place.role)
        if place.is_resident:
            arguments += ["--draft-model", str(options.draft or embedded_draft_path())]
        for endpoint in (endpoint for setup in served for endpoint in self.endpoints[setup]):
            arguments += ["--coordinators", endpoint]
        gpus = sorted({min(gpu, options.gpus - 1) for gpu in place.gpus})
        self._roles[place.name] = RoleProcess(
            place.name,
            f"{place.role}-worker",
            arguments,
            environment={"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if on_gpu else {},
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


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES of a worker on some of the GPUs that this process sees; those beyond are the last."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(dict.fromkeys(seen[min(gpu, len(seen) - 1)] if seen else str(gpu) for gpu in gpus))


def _model(folder: Path | None) -> list[str]:
    return [] if folder is None else ["--model", str(folder)]
