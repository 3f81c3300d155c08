"""Joining a Ray cluster, or starting one on this machine."""

import logging
import os
import signal
import socket
import threading
from typing import Any

import ray

from outrider.deploy.config import DeployConfig

logger = logging.getLogger(__name__)

NAMESPACE = "outrider"
CONNECT_TIMEOUT_S = 5.0


def connect(config: DeployConfig) -> bool:
    """Joins the Ray that this process is in already, else the one at `ray_address`, else starts one.

    Returns:
        True if a Ray was started here, which is then ours to shut down.
    """
    if ray.is_initialized():
        return False
    # Both are read by Ray when it starts; what the user has set counts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    _check_reachable(config.ray_address)
    options: dict[str, Any] = {}
    if config.ray_address == "local":
        options = {"include_dashboard": False, "object_store_memory": config.object_store_bytes}
    on_main_thread = threading.current_thread() is threading.main_thread()
    sigterm = signal.getsignal(signal.SIGTERM) if on_main_thread else None
    _init(
        address=config.ray_address,
        namespace=NAMESPACE,
        log_to_driver=config.role_logs,
        logging_level=logging.ERROR,
        **options,
    )
    # Ray takes SIGTERM for itself and would exit without stopping the roles.
    if on_main_thread and sigterm is not None:
        signal.signal(signal.SIGTERM, sigterm)
    return True


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
            if last_attempt or "timed out during startup" not in str(error):
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
