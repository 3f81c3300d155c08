"""From a deployment's configuration to each role's own: the functions that an actor runs to serve its role.

A role's modules are loaded in a thread, and only inside its actor: importing torch takes seconds, in which the actor
has to answer, and the deployment itself needs none of it.
"""

import asyncio
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.deploy.config import DeployConfig


class ServeCoordinator(Protocol):
    """Serves the coordinator on `host:port` until `stop`."""

    async def __call__(
        self, config: DeployConfig, *, port: int, host: str, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Runs the server."""
        ...


class ServeWorker(Protocol):
    """Serves a worker on a free port of `host`, registered with `coordinator`, until `stop`."""

    async def __call__(
        self, config: DeployConfig, *, coordinator: str, host: str, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Runs the server."""
        ...


async def serve_coordinator(
    config: DeployConfig, *, port: int, host: str, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """The coordinator of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.coordinator.server")
    from outrider.coordinator import server
    from outrider.coordinator.config import CoordinatorConfig

    role = CoordinatorConfig(host=host, port=port, model_path=config.target_model)
    await server.serve(role, ready=ready, stop=stop)


async def serve_target(
    config: DeployConfig, *, coordinator: str, host: str, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """A target worker of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.target_worker.server")
    from outrider.target_worker import server
    from outrider.target_worker.config import TargetWorkerConfig

    given = _given(model_path=config.target_model, threads=config.target_threads)
    role = TargetWorkerConfig(host=host, port=0, coordinators=(coordinator,), **given)
    await server.serve(role, ready=ready, stop=stop)


async def serve_draft(
    config: DeployConfig, *, coordinator: str, host: str, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """A draft worker of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.draft_worker.server")
    from outrider.draft_worker import server
    from outrider.draft_worker.config import DraftWorkerConfig

    given = _given(model_path=config.draft_model, threads=config.draft_threads)
    role = DraftWorkerConfig(host=host, port=0, coordinators=(coordinator,), **given)
    await server.serve(role, ready=ready, stop=stop)


def _given(**settings: Any) -> dict[str, Any]:
    """Those that were set; the role's own defaults stand for the others."""
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the actors run; tests put their own here."""

    coordinator: ServeCoordinator = serve_coordinator
    target: ServeWorker = serve_target
    draft: ServeWorker = serve_draft
