"""Health checks of actors: restarts those that hang or whose server ended, which Ray never notices."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from outrider.deploy.actors import RoleReport
from outrider.deploy.config import DeployConfig
from outrider.security.roles import Role

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 30.0
_MEANWHILE = {
    Role.COORDINATOR: "Its streams end, and clients resume them by their request ids.",
    Role.TARGET: "Its requests go on at another target, or wait for it.",
    Role.DRAFT: "Decoding goes on, only slower.",
}


@dataclass(kw_only=True)
class RoleHandle:
    """One actor as the deployment sees it."""

    name: str  # as status shows it, `draft-3`; never given to another one
    role: Role
    actor: Any = None
    endpoint: str | None = None  # host:port where a coordinator serves clients, which it keeps; None of a worker
    # Host:port where it takes workers in: another one with TLS, which asks who they are.
    worker_endpoint: str | None = None
    http_endpoint: str | None = None  # host:port of its HTTP door, which it keeps
    placed_on: str | None = None  # node id that a coordinator is bound to, and a worker was meant for
    model: Path | None = None  # checkpoint folder of a worker where it is not the configured one
    report: RoleReport | None = None  # its latest one; None before the first, and while it is being restarted
    node_id: str | None = None  # of the latest report, kept while there is none
    pid: int | None = None  # of the latest report too
    failure: str | None = None  # why it was last started anew, if its server has not served since
    restarts: int = 0  # how often its process was started anew, by Ray or by the deployment
    # It has no actor: that has gone for good, and no machine has had what a new one needs yet.
    is_homeless: bool = False
    is_draining: bool = False  # it finishes what it does, and is not to come back
    # When it was lost, by `time.monotonic`; None while it serves, and before it first does.
    lost_s: float | None = None
    tell: Callable[[str], None] = lambda text: None

    def lose(self, reason: str) -> None:
        """Mark the actor as not serving; it is restarted."""
        self.report, self.failure = None, reason
        if self.lost_s is None:
            self.lost_s = time.monotonic()
        self.tell(f"{self.name} is lost: {reason}. {_MEANWHILE[self.role]} Starting it anew")

    def note(self, report: RoleReport) -> None:
        """Store a report; another pid than before counts as a restart."""
        if self.pid is not None and report.pid != self.pid:
            self.restarts += 1
            logger.warning("%s runs again, pid %d", self.name, report.pid)
        known = 0 if self.report is None or self.report.pid != report.pid else len(self.report.stages)
        self.report, self.pid, self.node_id = report, report.pid, report.node_id
        for stage in report.stages[known:]:
            self.tell(f"{self.name}: {stage}")
        if report.address is None:
            return
        self.failure = None
        if self.lost_s is not None:
            self.tell(f"{self.name} serves again, after {time.monotonic() - self.lost_s:.1f} s")
            self.lost_s = None


def patience_s(report: RoleReport | None, config: DeployConfig) -> float:
    """Return how long an actor with this latest report may stay silent, in seconds."""
    serving = report is not None and report.address is not None
    return config.hang_timeout_s if serving else config.start_timeout_s


async def watch(handle: RoleHandle, config: DeployConfig) -> None:
    """Look after one actor until cancelled: kill it, so that Ray starts it anew, when it is silent or has failed."""
    backoff_s = config.ping_interval_s
    well_since: float | None = None
    while True:
        if handle.is_homeless:
            await asyncio.sleep(config.ping_interval_s)
            continue
        actor = handle.actor
        try:
            patience = patience_s(handle.report, config)
            # Not wait_for: in Python 3.11 it loses a cancellation that coincides with an answer.
            async with asyncio.timeout(patience):
                report = await actor.report.remote()
        except TimeoutError:
            if actor is handle.actor:
                _restart(handle, f"silent for {patience:g} s")
        except ray.exceptions.RayError as error:
            # Until it answers again, each look finds the same.
            if actor is handle.actor and (handle.report is not None or handle.failure is None):
                handle.lose(f"its process {handle.pid} is gone ({type(error).__name__})")
        else:
            if actor is not handle.actor:
                continue  # it was moved meanwhile
            handle.note(report)
            if report.failure is None:
                # Only one that has served for a while is well: one that fails while it loads is silent until it does.
                well_since = (well_since or time.monotonic()) if report.address is not None else None
                if well_since is not None and time.monotonic() - well_since > backoff_s:
                    backoff_s = config.ping_interval_s
            else:
                well_since = None
                _restart(handle, report.failure)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        await asyncio.sleep(config.ping_interval_s if handle.report is not None else backoff_s)


def _restart(handle: RoleHandle, reason: str) -> None:
    handle.lose(reason)
    ray.kill(handle.actor, no_restart=False)
