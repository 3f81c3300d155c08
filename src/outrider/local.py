"""A whole service out of child processes over loopback gRPC, without Ray: for trying out, tests and benchmarks.

    with LocalService(drafts=1) as service, Client(service.endpoint) as client:
        print(client.generate("import os").text)

The children end with the service, and with this process however it ends.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.roles.awake import usable_cores
from outrider.roles.ports import free_port
from outrider.roles.role_process import Process, RoleProcess, prepare_forks, stop_all
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig

_POLL_S = 0.05


class LocalService:
    """One coordinator, target workers and draft workers as child processes.

    Args:
        target_model: checkpoint folder; default the embedded target.
        draft_model: checkpoint folder; default the embedded draft.
        target_threads: CPU threads of each target; default all cores but one.
        draft_threads: CPU threads of each draft.
        coordinator_args: further options of `outrider coordinator`, as on the command line.
        certificates: folder that `outrider certs` has made: everything talks TLS then.
        token_file: of tokens that the coordinator asks for.
        token: a good one, for this object's own look at the workers.
        start_timeout_s: until every worker is registered.

    Attributes:
        endpoint: host:port of the coordinator, once started.
        worker_endpoint: its other door, where workers register; empty where there is none.
    """

    def __init__(
        self,
        *,
        drafts: int = 1,
        targets: int = 1,
        target_model: str | Path | None = None,
        draft_model: str | Path | None = None,
        target_threads: int | None = None,
        draft_threads: int = 1,
        coordinator_args: Sequence[str] = (),
        target_args: Sequence[str] = (),
        draft_args: Sequence[str] = (),
        certificates: Path | None = None,
        token_file: Path | None = None,
        token: str | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.endpoint = ""
        self._roles: dict[str, RoleProcess] = {}
        self._stopped = False
        self._counts = {"target": targets, "draft": drafts}
        self._models = {"target": target_model, "draft": draft_model}
        self._threads = {"target": target_threads or max(1, usable_cores() - 1), "draft": draft_threads}
        self._more = {"coordinator": coordinator_args, "target": target_args, "draft": draft_args}
        self.certificates, self._token_file, self._token = certificates, token_file, token
        self.worker_endpoint = ""
        self._start_timeout_s = start_timeout_s

    @property
    def processes(self) -> dict[str, Process]:
        """Processes by name: "coordinator", "target-0", ..., "draft-0", ...; end one to test a failure."""
        return {name: role.process for name, role in self._roles.items()}

    @property
    def http_url(self) -> str:
        """http://HOST:PORT of the coordinator's HTTP door; empty without --http-port among `coordinator_args`."""
        # It has said so in its log before it was ready.
        found = re.search(r"serving HTTP on (\S+)", self.stderr("coordinator"))
        return found[1] if found else ""

    def start(self) -> None:
        """Start everything; return when every worker serves.

        Raises:
            WorkerUnavailable: a process ended or was too slow, with the last lines it wrote to stderr.
        """
        deadline = time.monotonic() + self._start_timeout_s
        try:
            model_args = _option("--model", self._models["target"])
            doors = ["--port", "0"]
            if self.certificates is not None:
                # Its workers' port is not part of what the coordinator says when it is ready.
                self.worker_endpoint = f"127.0.0.1:{free_port()}"
                doors += ["--worker-port", self.worker_endpoint.rpartition(":")[2], *self._tls_args(Role.COORDINATOR)]
            doors += _option("--token-file", self._token_file)
            arguments = [*doors, *model_args, *self._more["coordinator"]]
            coordinator = self._roles["coordinator"] = RoleProcess("coordinator", "coordinator", arguments)
            if any(self._counts.values()):
                prepare_forks()
            self.endpoint = coordinator.await_ready(deadline)
            for role, count in self._counts.items():
                for number in range(count):
                    self.start_worker(f"{role}-{number}")
            self.wait_for_workers(timeout_s=deadline - time.monotonic())
        except BaseException:
            self.stop()
            raise

    def start_worker(self, name: str) -> None:
        """Start or restart "target-N" or "draft-N"; `wait_for_workers` tells when it serves.

        Raises:
            ValueError: another name, or a worker that is still running.
        """
        role = name.partition("-")[0]
        if role not in self._counts:
            raise ValueError(f"{name!r} given, target-N or draft-N needed")
        arguments = [
            *("--coordinators", self.worker_endpoint or self.endpoint),
            *self._tls_args(Role(role)),
            *("--threads", str(self._threads[role])),
            *_option("--model", self._models[role]),
            *self._more[role],
        ]
        previous = self._roles.get(name)
        if previous is not None:
            if previous.is_running:
                raise ValueError(f"{name} is still running")
            previous.release()
        self._roles[name] = RoleProcess(name, f"{role}-worker", arguments, forked=True)

    def wait_for_workers(self, *, timeout_s: float = 60.0) -> None:
        """Wait until every worker that runs is registered and serves; WorkerUnavailable where one ends or is late."""
        deadline = time.monotonic() + timeout_s
        roles = [role for role in self._roles.values() if role.is_running]
        addresses = {role.await_ready(deadline) for role in roles if role.name != "coordinator"}
        with self.client() as client:
            while True:
                for role in roles:
                    role.check_alive()
                workers = client.server_info().workers
                missing = addresses - {worker.introduction.address for worker in workers if worker.state == "serving"}
                if not missing:
                    return
                if time.monotonic() > deadline:
                    raise WorkerUnavailable(f"{len(missing)} of {len(addresses)} workers are not registered in time")
                time.sleep(_POLL_S)

    def client(self) -> Client:
        """A new one, which shows what this service asks for."""
        tls = None if self.certificates is None else TlsConfig(ca=self.certificates / "ca.pem")
        return Client(self.endpoint, tls=tls, token=self._token)

    def _tls_args(self, role: Role) -> list[str]:
        if self.certificates is None:
            return []
        tls = TlsConfig.of_folder(self.certificates, role)
        paths = {"--tls-ca": tls.ca, "--tls-certificate": tls.certificate, "--tls-key": tls.key}
        return [word for name, path in paths.items() for word in (name, str(path))]

    def stderr(self, name: str) -> str:
        """Return a process's stderr so far."""
        return self._roles[name].stderr()

    def stop(self) -> None:
        """End every process; harmless when all have ended."""
        if not self._stopped:
            stop_all(list(self._roles.values()))
        self._stopped = True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _option(name: str, value: str | Path | None) -> list[str]:
    return [] if value is None else [name, str(value)]
