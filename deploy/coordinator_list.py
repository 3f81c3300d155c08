"""What tells a deployed worker where its coordinators are, and what has changed since it was made."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray.exceptions

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CoordinatorList:
    """Asks a deployment's controller for the coordinators' addresses as they are now: a worker's resolver."""

    controller: Any

    async def __call__(self) -> Sequence[str]:
        """host:port of each.

        Raises:
            OSError: the controller does not answer; what it said last still holds.
        """
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await self.controller.worker_endpoints.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise OSError(f"the controller does not answer: {type(error).__name__}") from error


@dataclass(frozen=True)
class TargetModel:
    """Asks a deployment's controller for the checkpoint folder that a reload has given all targets."""

    controller: Any

    async def __call__(self) -> str | None:
        """The folder; None where there was no reload, or where nobody can tell: then the coordinators see to it."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await self.controller.target_model.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the controller does not say what to load: %s", type(error).__name__)
            return None
