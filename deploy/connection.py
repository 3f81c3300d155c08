"""Joining a Ray cluster, or starting one on this machine, where other terminals of the same user find it by name."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray._private.node import Node

from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.local_note import local_address

logger = logging.getLogger(__name__)

NAMESPACE = "outrider"
CONNECT_TIMEOUT_S = 5.0
# What Ray says when its node or its control store took longer than it waits.
_SLOW_START = ("timed out during startup", "Timed out waiting for file")


def connect(config: DeployConfig) -> bool:
    """Join the Ray that this process is in already, else the one at `address`, else start one.

    Returns:
        True if a Ray was started or joined here, which is then ours to shut down or to leave.

    Raises:
        ConnectionError: there is no cluster, or it takes whoever comes while the deployment is to be protected.
    """
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {}
    if config.address == "local":
        # Ray turns its token on by itself for a cluster of its own: whoever reaches its ports may run code.
        options = {"include_dashboard": False, "object_store_memory": config.object_store_bytes}
    with _bare_node(role_logs=config.role_logs) if config.address == "local" else contextlib.nullcontext():
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
def _bare_node(*, role_logs: bool) -> Iterator[None]:
    """Have the Ray that is started in the block do without what only its dashboard, its autoscaler and its driver's
    log need: three processes, two seconds of CPU, and the wait until the dashboard answers.

    Ray's own options leave them out of the dashboard's pages, not of the start.
    """
    unneeded = ["start_api_server", "start_monitor"] + ([] if role_logs else ["start_log_monitor"])
    with contextlib.ExitStack() as stack:
        for name in unneeded:
            stack.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, lambda _node, **_options: None)
        yield


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
    """Raise ConnectionError where nothing listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster at {address}: {error}") from error
