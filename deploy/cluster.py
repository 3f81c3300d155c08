"""A deployment as the process sees it that brings it up: a controller on Ray that owns every role, and its lease."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from outrider.deploy import placement
from outrider.deploy.config import DeployConfig
from outrider.deploy.connection import NAMESPACE, connect, sigterm_kept
from outrider.deploy.controller import Controller
from outrider.deploy.local_note import forget_local, remember_local
from outrider.deploy.roles import Roles
from outrider.errors import WorkerUnavailable

logger = logging.getLogger(__name__)

KEEP_INTERVAL_S = 1.0
# While it starts, when each line is waited for.
_START_INTERVAL_S = 0.2
CONTROLLER = "controller"
# Beyond what the roles get to stop, the coordinators first, then the workers.
_STOP_SLACK_S = 5.0


class Deployment:
    """Brings a deployment up, keeps it while this process lives, and ends it.

    Args:
        detach: leave it running when this process ends; one of this name that runs already is taken for it.
        tell: hears what happens to it, a line at a time.

    Raises (from `start`):
        WorkerUnavailable: a role failed, took longer than `start_timeout_s`, or (unless `detach`) a deployment of this
            name runs already; nothing that was started is left running.
        ConnectionError: no Ray cluster at `address`.
    """

    def __init__(
        self,
        config: DeployConfig,
        *,
        roles: Roles | None = None,
        detach: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config = config
        self._roles = roles or Roles()
        self._detach = detach
        self._tell = tell
        # Gives the time that each role gets when it stops, where that is not the configuration's.
        self.hurry_s: Callable[[], float | None] = lambda: None
        self._owns_ray = False
        self.controller: Any = None  # Ray's handle of the `Controller`
        self._keeping: asyncio.Task[None] | None = None
        # Events that have been told.
        self._seen, self._renewing = 0, asyncio.Lock()
        self.endpoints: list[str] = []
        """host:port of every coordinator."""
        self.shared_endpoints: list[str] = []
        """host:port at which all coordinators of a machine listen together."""
        self.http_endpoints: list[str] = []
        """host:port of their HTTP doors."""
        self.was_running = False
        """True if `start` found the deployment instead of starting it."""

    async def __aenter__(self) -> "Deployment":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def endpoint(self) -> str:
        """host:port of the coordinators, as a client takes them: separated by commas."""
        return ",".join(self.shared_endpoints or self.endpoints)

    async def start(self) -> list[str]:
        """Start the deployment; return the coordinators' addresses once every worker serves through each.

        Raises:
            WorkerUnavailable: it could not be started; what was begun has ended.
        """
        try:
            # In threads, as all that may take Ray long: this process has to hear when it is told to stop.
            with sigterm_kept():
                self._owns_ray = await asyncio.to_thread(connect, self._config)
            if self._owns_ray and self._config.address == "local":
                remember_local(self._config.name, ray.get_runtime_context().gcs_address)
            await self._find_or_create()
            # One that is left alone belongs to somebody until it serves: whoever was killed meanwhile cannot end it.
            self._keeping = asyncio.create_task(self._keep())
            failure: str | None = await self.controller.started.remote()
            await self._renew()
            found = {} if failure is not None else await self.status()
        except ray.exceptions.RayError as error:
            await self.stop()
            raise WorkerUnavailable(f"the controller could not be started: {error}") from error
        except BaseException:
            await self.stop()
            raise
        if failure is not None:
            # What somebody else has started, and has not ended although it failed, is theirs to look at.
            hint = ": end it with `outrider down` first" if self.was_running else ""
            await self.stop()
            raise WorkerUnavailable(failure + hint)
        self.endpoints, self.shared_endpoints = found["endpoints"], found["shared_endpoints"]
        self.http_endpoints = found["http_endpoints"]
        if self._detach:
            await self._release()
        return self.endpoints

    async def status(self) -> dict[str, Any]:
        """Return the data of `outrider status --json`."""
        return await self.controller.status.remote()

    async def ended(self) -> None:
        """Wait until somebody else has ended the deployment of this process."""
        assert self._keeping is not None, "a detached deployment belongs to nobody"
        await self._keeping
        self.controller = None

    async def stop(self) -> None:
        """End the deployment, the coordinators draining first; shut Ray down if `start` started it.

        One that was brought up detached, or that was there before, is left alone once it serves.
        """
        await self._release()
        controller, self.controller = self.controller, None
        if controller is not None and not self.was_running and not (self._detach and self.endpoints):
            await end(controller, role_timeout_s=self.hurry_s(), config=self._config)
        if self._owns_ray:
            forget_local(self._config.name)
            await asyncio.to_thread(ray.shutdown)
            self._owns_ray = False

    async def _release(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None

    async def _find_or_create(self) -> None:
        if await self._find():
            return
        try:
            self._create()
        except ValueError:
            # Another `serve` of this name was quicker.
            if not await self._find():
                raise

    async def _find(self) -> bool:
        """Attach to a running deployment of this name; return whether there is one."""
        if (found := await asyncio.to_thread(self._running)) is None:
            return False
        if not self._detach:
            raise WorkerUnavailable(
                f"a deployment called {self._config.name} runs here already: end it with `outrider down`, or give "
                "this one another --name"
            )
        self.controller, self.was_running = found, True
        return True

    def _running(self) -> Any:
        try:
            return ray.get_actor(f"{self._config.name}/{CONTROLLER}", namespace=NAMESPACE)
        except ValueError:
            return None

    def _create(self) -> None:
        home = ray.get_runtime_context().get_node_id()
        placed = ray.remote(Controller).options(
            name=f"{self._config.name}/{CONTROLLER}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            # Near whoever started it, and elsewhere if that machine dies. A soft affinity Ray forgets at a restart: a
            # controller that has moved to a machine which dies takes Ray some 15 seconds longer to start anew.
            label_selector=placement.selector(among=[home], avoided=()),
            fallback_strategy=[{"label_selector": placement.selector(among=None, avoided=[home])}],
        )
        self.controller = placed.remote(self._config, self._roles, home=home, owned=not self._detach)

    async def _keep(self) -> None:
        """Renew the deployment's lease until it has ended, and tell what happens to it."""
        while True:
            try:
                await self._renew()
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.ActorDiedError) and self._running() is None:
                    return
                self._tell(f"the controller is gone ({type(error).__name__}); the roles serve on, Ray starts it anew")
                self._seen = 0
            await asyncio.sleep(KEEP_INTERVAL_S if self.endpoints else _START_INTERVAL_S)

    async def _renew(self) -> None:
        async with self._renewing:
            self._seen, events = await self.controller.keep.remote(self._seen)
        for event in events:
            self._tell(event)


async def end(controller: Any, *, role_timeout_s: float | None, config: DeployConfig) -> None:
    """End a deployment by its controller, and the controller.

    Args:
        role_timeout_s: that each role gets; default what the configuration says, and then a little more.
    """
    roles_s = 2 * config.stop_timeout_s + _STOP_SLACK_S if role_timeout_s is None else 2 * role_timeout_s
    try:
        async with asyncio.timeout(roles_s):
            await controller.down.remote(role_timeout_s)
    except (ray.exceptions.RayError, TimeoutError) as error:
        if role_timeout_s is None:
            logger.warning("the controller did not end everything: %s", type(error).__name__)
    ray.kill(controller, no_restart=True)
