"""One coordinator and one target, and for each mixture of sources its own drafts, started anew: an empty trie each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.source_bench.readings import Readings, read_metrics

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.ports import free_port
from outrider.role_process import RoleProcess, stop_all

_POLL_S = 0.05
# Mixture to the --source of each of its draft workers. A slash parts workers, a plus sources of one worker.
MIXTURES: dict[str, Sequence[str]] = {
    "off": (),
    "model": ("model",),
    "ngram": ("ngram",),
    "model+ngram": ("model+ngram",),
    "model/ngram": ("model", "ngram"),
}


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How the processes are started.

    Attributes:
        target, draft: checkpoint folders; None for the embedded models.
        device: cpu, or cuda: the target on the first GPU, a model draft on the second where there is one.
        gpus: that there are.
        threads: of the target on a CPU.
        coordinator_args, target_args, draft_args: further options.
        start_timeout_s: of each process.
        log_folder: where what the processes wrote to stderr is kept.
    """

    target: Path | None = None
    draft: Path | None = None
    device: str = "cpu"
    gpus: int = 1
    threads: int = 1
    coordinator_args: Sequence[str] = ()
    target_args: Sequence[str] = ()
    draft_args: Sequence[str] = ()
    start_timeout_s: float = 240.0
    log_folder: Path | None = None


class Services:
    """Use with `with`; `mixture` adds what a mixture needs."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._roles: list[RoleProcess] = []
        self._metrics_ports: dict[RoleProcess, int] = {}
        self.endpoint = ""

    def __enter__(self) -> Self:
        options = self._options
        try:
            coordinator = self._start(
                "coordinator", ["--port", "0", *_model(options.target), *options.coordinator_args]
            )
            self.endpoint = coordinator.await_ready(time.monotonic() + options.start_timeout_s)
            arguments = [*_model(options.target), *options.target_args]
            self._start_worker("target-worker", arguments, gpu=0)
            self._await_workers(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_logs(self._roles, "of all mixtures")
        stop_all(self._roles)

    @contextmanager
    def mixture(self, name: str) -> Iterator[None]:
        """While the drafts of a mixture serve."""
        options, workers = self._options, []
        try:
            for source in MIXTURES[name]:
                arguments = ["--source", source, *_model(options.draft), *options.draft_args]
                # A trie alone computes nothing that a GPU could.
                workers.append(self._start_worker("draft-worker", arguments, gpu=min(1, options.gpus - 1)))
            self._await_workers(1 + len(workers))
            yield
        finally:
            self._keep_logs(workers, name.replace("/", " and "))
            stop_all(workers)
            for worker in workers:
                self._roles.remove(worker)
            self._await_workers(1)

    def readings(self) -> Readings:
        """What the processes that run have counted so far, by role."""
        found: dict[str, Counter[str]] = {}
        for role in self._roles:
            counts = read_metrics(self._metrics_ports[role])
            found[role.name] = found.get(role.name, Counter()) + counts
        return found

    def _keep_logs(self, roles: Sequence[RoleProcess], of: str) -> None:
        """Mixtures come again with each workload: their logs go on."""
        folder = self._options.log_folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for role in roles:
            with (folder / f"{role.name} {of}.log").open("a", encoding="utf-8") as file:
                file.write(role.stderr())

    def _start(self, role: str, arguments: Sequence[str], **environment: str) -> RoleProcess:
        port = free_port()
        started = RoleProcess(role, role, [*arguments, "--metrics-port", str(port)], environment=environment)
        self._roles.append(started)
        self._metrics_ports[started] = port
        return started

    def _start_worker(self, role: str, arguments: Sequence[str], *, gpu: int) -> RoleProcess:
        options = self._options
        if options.device == "cpu":
            threads = options.threads if role == "target-worker" else 1
            return self._start(role, ["--coordinators", self.endpoint, "--threads", str(threads), *arguments])
        on_gpu = ["--coordinators", self.endpoint, "--device", "cuda:0", *arguments]
        return self._start(role, on_gpu, CUDA_VISIBLE_DEVICES=str(gpu))

    def _await_workers(self, count: int) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        with Client(self.endpoint) as client:
            while True:
                for role in self._roles:
                    role.check_alive()
                serving = sum(worker.state == "serving" for worker in client.server_info().workers)
                if serving == count:
                    return
                if time.monotonic() > deadline:
                    raise WorkerUnavailable(f"{serving} of {count} workers serve in time")
                time.sleep(_POLL_S)


def _model(folder: Path | None) -> list[str]:
    return [] if folder is None else ["--model", str(folder)]
