"""Where the coordinators of a deployment have their HTTP doors."""

import pytest

from outrider.deploy.config import DeployConfig
from outrider.deploy.crew import _with_http_port


@pytest.mark.parametrize(
    ("config", "port", "number", "http_port"),
    [
        (DeployConfig(), 50051, 0, None),
        (DeployConfig(http_port=8000), 50051, 0, 8000),
        # The second on a machine has the next port for gRPC, and so it has for HTTP; on one of its own the same.
        (DeployConfig(http_port=8000), 50052, 1, 8001),
        (DeployConfig(http_port=8000), 50051, 1, 8000),
        # Ports that are found say nothing: then it is the number.
        (DeployConfig(port=0, http_port=8000), 41234, 1, 8001),
        (DeployConfig(port=0, http_port=0), 41234, 1, 0),
    ],
)
def test_each_has_its_own(config: DeployConfig, port: int, number: int, http_port: int | None) -> None:
    assert _with_http_port(config, port=port, number=number).http_port == http_port


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="http_port: 70000 given"):
        DeployConfig(http_port=70000)
