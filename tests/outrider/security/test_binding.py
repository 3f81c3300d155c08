import logging
from pathlib import Path
from typing import Any

import pytest

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.security.binding import warn_of_bind
from outrider.target_worker.config import TargetWorkerConfig

TLS: dict[str, Any] = {name: Path(name) for name in ("tls_ca", "tls_certificate", "tls_key")}
ROLES = (CoordinatorConfig, DraftWorkerConfig, TargetWorkerConfig)


@pytest.mark.parametrize("config", ROLES)
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "gpu-7.example", "localhost.example", "127.0.0.1.example"]
)
def test_beyond_loopback_only_with_protection(config: type, host: str):
    with pytest.raises(ValueError, match="tls_ca"):
        config(host=host)
    with pytest.raises(ValueError, match="belong together"):
        config(host=host, tls_ca=Path("ca"))
    config(host=host, insecure=True)
    config(host=host, **TLS, **({"token_file": Path("tokens")} if config is CoordinatorConfig else {}))


@pytest.mark.parametrize("config", ROLES)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.10"])
def test_loopback_needs_nothing(config: type, host: str):
    config(host=host)


def test_the_public_door_needs_tokens_as_well():
    with pytest.raises(ValueError, match="give token_file"):
        CoordinatorConfig(host="0.0.0.0", **TLS)


def test_workers_have_a_door_of_their_own_with_tls():
    assert CoordinatorConfig(port=7).worker_address is None
    assert CoordinatorConfig(port=7, worker_port=9).worker_address == "127.0.0.1:9"
    assert CoordinatorConfig(port=7, **TLS).worker_address == "127.0.0.1:8"
    assert CoordinatorConfig(port=0, **TLS).worker_address == "127.0.0.1:0"


def test_what_insecure_lets_through_is_said_loudly(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        warn_of_bind("127.0.0.1", tls_ca=None, token_file=None)
        assert not caplog.messages
        warn_of_bind("0.0.0.0", tls_ca=None, token_file=None)
    assert caplog.messages == [
        "INSECURE: listening on 0.0.0.0 without tls_ca and token_file: whoever reaches this port may use it"
    ]
