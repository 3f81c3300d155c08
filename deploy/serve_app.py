"""A Ray Serve application that serves nobody: for a RayService, which keeps applications up and knows nothing else.

It brings the deployment about where KubeRay has made a cluster, and is as healthy as the deployment is. Tokens flow
past it, from the coordinators' own gRPC servers: Serve's ingress would cost many times a direct hop.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from outrider.deploy.cluster import Deployment
from outrider.deploy.config_file import read_config
from outrider.errors import WorkerUnavailable

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 10.0
# Serve asks this often, and replaces a replica that has failed three times: which brings up what is not there.
HEALTH_CHECK_PERIOD_S = 10.0
HEALTH_CHECK_TIMEOUT_S = 30.0


class ServeReplica:
    """The one replica of the application: it keeps a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    async def bring_up(self) -> None:
        """Start or find the deployment; return when every worker serves."""
        endpoints = await self.deployment.start()
        logger.info("the deployment serves at %s", endpoints)

    async def check_health(self) -> None:
        """Raise WorkerUnavailable if the deployment does not serve, or is not there; Ray Serve calls it."""
        state = (await self.status()).get("state")
        if state != "serving":
            raise WorkerUnavailable(f"the deployment is {state}")

    async def status(self) -> dict[str, Any]:
        """Return the data of `outrider status --json`.

        Raises:
            WorkerUnavailable: the deployment's controller does not answer.
        """
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self.deployment.status()
        except TimeoutError as error:
            raise WorkerUnavailable(f"the controller has not answered for {STATUS_TIMEOUT_S:g} s") from error


def build(args: dict[str, str]) -> Any:
    """The application that a RayService's `serveConfigV2` names by `import_path`.

    Args:
        args: `settings`, the path of the deployment's file on every node.
    """
    from ray import serve

    class OutriderReplica(ServeReplica):
        """One replica, which asks for no CPU: the roles have nodes of their own."""

        async def __init__(self, settings: str) -> None:  # pyright: ignore[reportInvalidTypeForm] Serve awaits it
            super().__init__(Deployment(read_config(Path(settings)), detach=True))
            await self.bring_up()

        async def __call__(self, request: Any) -> dict[str, Any]:
            """The status, for whoever asks the application over HTTP."""
            return await self.status()

    deployment = serve.deployment(
        OutriderReplica,
        name="outrider",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
    )
    return deployment.bind(args["settings"])
