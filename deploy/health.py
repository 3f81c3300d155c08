"""Ray restarts an actor that dies; one that hangs, or whose server ends, it never notices. This does."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from outrider.deploy.actors import RoleReport
from outrider.deploy.config import DeployConfig

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 30.0


@dataclass(kw_only=True)
class RoleHandle:
    """One actor as the deployment sees it.

    Attributes:
        name: as Ray lists it.
        actor: Ray's handle.
        report: its latest one; None before the first.
        restarts: how often the deployment has killed it for being hung or broken.
    """

    name: str
    actor: Any
    report: RoleReport | None = None
    restarts: int = 0


def patience_s(report: RoleReport | None, config: DeployConfig) -> float:
    """How long an actor with this latest report may stay silent: one that loads its model may keep its loop busy."""
    serving = report is not None and report.address is not None
    return config.hang_timeout_s if serving else config.start_timeout_s


async def watch(handle: RoleHandle, config: DeployConfig) -> None:
    """Looks after one actor until cancelled: kills it, so that Ray starts it anew, when it is silent or has failed."""
    backoff_s = config.ping_interval_s
    well_since: float | None = None
    while True:
        try:
            patience = patience_s(handle.report, config)
            # Not wait_for: in Python 3.11 it loses a cancellation that coincides with an answer.
            async with asyncio.timeout(patience):
                report = await handle.actor.report.remote()
        except TimeoutError:
            _restart(handle, f"silent for {patience:g} s")
        except ray.exceptions.RayError as error:
            logger.warning("%s is gone (%s); Ray starts it anew", handle.name, type(error).__name__)
            handle.report = None
        else:
            if handle.report is not None and report.pid != handle.report.pid:
                logger.warning("%s runs again, pid %d", handle.name, report.pid)
            handle.report = report
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
    logger.warning("starting %s anew: %s", handle.name, reason)
    handle.restarts += 1
    handle.report = None
    ray.kill(handle.actor, no_restart=False)
