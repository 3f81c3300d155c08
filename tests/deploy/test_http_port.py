"""Where the coordinators of a deployment have their HTTP doors."""

from typing import Any

import pytest

from outrider.deploy.actor_group import _http_port
from outrider.deploy.config import DeployConfig


@pytest.mark.parametrize(
    ("config", "port", "number", "http_port"),
    [
        (DeployConfig(), 50051, 0, 8000),
        (DeployConfig(http_port=8000), 50051, 0, 8000),
        # The second on a machine has the next port for gRPC, and so it has for HTTP; on one of its own the same.
        (DeployConfig(http_port=8000), 50052, 1, 8001),
        (DeployConfig(http_port=8000), 50051, 1, 8000),
        # Ports that are found say nothing: then it is the number.
        (DeployConfig(port=0, http_port=8000), 41234, 1, 8001),
        (DeployConfig(port=0, http_port=0), 41234, 1, 0),
        (DeployConfig(port=0), 41234, 1, 0),
        # The first one's own port is the one behind that which all share.
        (DeployConfig(shared_port=50051, http_port=8000, shared_http_port=8000), 50052, 0, 8001),
        (DeployConfig(coordinators=2, shared_port=50052, http_port=8000, shared_http_port=8001), 50053, 1, 8002),
    ],
)
def test_each_has_its_own(config: DeployConfig, port: int, number: int, http_port: int) -> None:
    assert _http_port(config, port=port, number=number) == http_port


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"http_port": 70000}, "http_port: 70000 given"),
        ({"shared_port": 0}, "shared_port: 0 given, 1 to 65535 needed"),
        ({"shared_http_port": 8000}, "shared_http_port: 8000 given, which one of them has"),
        ({"http_port": 8000, "shared_http_port": 8000}, "shared_http_port: 8000 given, which one of them has"),
        (
            {"coordinators": 2, "http_port": 8000, "shared_http_port": 8001},
            "shared_http_port: 8001 given, which one of them has",
        ),
    ],
)
def test_a_port_that_cannot_be_is_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        DeployConfig(**options)
