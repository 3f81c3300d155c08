"""Joining a Ray cluster, or starting one on this machine, where other terminals of the same user find it by name."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from outrider import standby_start
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.local_note import local_address

logger = logging.getLogger(__name__)

NAMESPACE = "outrider"
CONNECT_TIMEOUT_S = 5.0
# What Ray says when its node or its control store took longer than it waits.
_SLOW_START = ("timed out during startup", "Timed out waiting for file")

_SETUP_WORKER = str(Path(services.__file__).parent / "workers" / ray_constants.SETUP_WORKER_FILENAME)
# Sleeps until the raylet goes, whose own end is not to come of Ctrl-C at a terminal.
_IDLE_AGENT = "/bin/sh -c \"trap '' INT; exec cat\""
# Of options that a raylet is given twice it takes the last.
_BARE_RAYLET = [
    f"--dashboard_agent_command={_IDLE_AGENT}",
    "--dashboard_agent_listen_port=-1",
    "--metrics_agent_port=-1",
    "--metrics_export_port=-1",
    f"--runtime_env_agent_command={_IDLE_AGENT}",
    "--runtime_env_agent_port=-1",
    # Otherwise one a core, and nobody hears Ctrl-C while the first ones start.
    "--num_prestart_python_workers=0",
]


def connect(config: DeployConfig, *, forks_workers: bool) -> bool:
    """Joins the Ray that this process is in already, else the one at `address`, else starts one.

    Args:
        config: of the deployment.
        forks_workers: have all workers of a Ray that is started here forked by a stand-by (`outrider.standby`).

    Returns:
        True if a Ray was started or joined here, which is then ours to shut down or to leave.

    Raises:
        ConnectionError: there is no cluster, or it takes whoever comes while the deployment is to be protected.
    """
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {}
    if is_own := config.address == "local":
        # Ray turns its token on by itself for a cluster of its own: whoever reaches its ports may run code.
        options = {"include_dashboard": False, "object_store_memory": config.object_store_bytes}
    with _bare_node(config, forks_workers=forks_workers) if is_own else contextlib.nullcontext():
        _join(config.address, log_to_driver=config.role_logs, **options)
    if config.bind is Bind.NODE and not config.insecure and os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise ConnectionError(
            "this Ray cluster runs code of whoever reaches it: start it with RAY_AUTH_MODE=token and a token "
            "(ray get-auth-token --generate) on every machine, or give --insecure"
        )
    return True


def attach(address: str, name: str) -> Any:
    """The controller of a deployment that runs, joining its cluster.

    Args:
        address: "auto" is the Ray that `outrider serve` has started on this machine for this name, else the cluster
            that this machine is part of; or host:port, or ray://host:port.
        name: of the deployment.

    Raises:
        ConnectionError: there is no such cluster, or no such deployment on it.
    """
    own = local_address(name) if address in ("auto", "local") else None
    if own is None and address == "local":
        raise ConnectionError(f"no `outrider serve` of the name {name} runs on this machine")
    if not ray.is_initialized():
        with sigterm_kept():
            try:
                _join(own or address, log_to_driver=False)
            except ConnectionError as error:
                if own is not None or address != "auto":
                    raise
                raise ConnectionError(
                    f"no `outrider serve` of the name {name} runs on this machine, nor any Ray cluster: start one, or "
                    "give the --address of the cluster"
                ) from error
    try:
        return ray.get_actor(f"{name}/controller", namespace=NAMESPACE)
    except ValueError:
        raise ConnectionError(f"no deployment called {name} runs on the Ray cluster at {own or address}") from None


def _join(address: str, **options: Any) -> None:
    # All are read by Ray when it starts; what the user has set counts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    if address == "local":
        # Otherwise Ray starts workers at priority 15 of 19: whatever else a busy machine does would delay a round.
        os.environ.setdefault("RAY_worker_niceness", "0")
    _check_reachable(address)
    _init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, **options)


@contextlib.contextmanager
def _bare_node(config: DeployConfig, *, forks_workers: bool) -> Iterator[None]:
    """Have the Ray that is started in the block do without what only its dashboard, its autoscaler, its driver's log
    and its runtime environments need: five processes, three seconds of CPU, and the wait until they answer.

    Ray's own options leave them out of the dashboard's pages, not of the start.
    """
    unneeded = ["start_api_server", "start_monitor"] + ([] if config.role_logs else ["start_log_monitor"])
    start_process = services.start_ray_process

    def start_bare(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = bare_raylet(command, forks_workers=forks_workers)
        return start_process(command, process_type, *arguments, **options)

    with contextlib.ExitStack() as stack:
        for name in unneeded:
            stack.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, lambda _node, **_options: None)
        stack.callback(setattr, services, "start_ray_process", start_process)
        services.start_ray_process = start_bare
        yield


def bare_raylet(command: list[str], *, forks_workers: bool) -> list[str]:
    """A raylet's command, changed so that it waits for no agent, and starts workers by `standby_start.py` if asked to.

    A raylet ends with its two agents, so something idle runs in their place, without ports. Its workers begin with a
    script that sets up their runtime environment, of which they have none: the stand-by's takes that one's place.
    """
    if forks_workers:
        set_up, stand_by = list2cmdline([_SETUP_WORKER]), list2cmdline(standby_start.COMMAND[1:])
        command = [argument.replace(set_up, stand_by) for argument in command]
    return [*command, *_BARE_RAYLET]


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Give SIGTERM back to this process after the block, in which Ray is joined.

    Ray takes it for itself, in whatever thread it is joined, and would exit without stopping the roles.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    sigterm = signal.getsignal(signal.SIGTERM) if on_main_thread else None
    try:
        yield
    finally:
        if sigterm is not None:
            signal.signal(signal.SIGTERM, sigterm)


def _init(**options: Any) -> None:
    """`ray.init`, and once more if Ray gave up after its fixed 30 s: on a busy machine its first start is slow.

    Raises:
        ConnectionError: there is no cluster, or it could not be started.
    """
    for last_attempt in (False, True):
        try:
            ray.init(**options)
            return
        except ConnectionError:
            raise
        # Ray raises nothing more specific.
        except Exception as error:
            ray.shutdown()
            if last_attempt or not any(words in str(error) for words in _SLOW_START):
                raise ConnectionError(f"Ray could not be started: {error}") from error
            logger.warning("Ray did not start within its 30 s; trying once more")


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes.

    Raises:
        ConnectionError: nothing listens at host:port.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster at {address}: {error}") from error
