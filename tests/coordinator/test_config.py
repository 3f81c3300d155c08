"""Options of a coordinator."""

from typing import Any

import pytest

from outrider.coordinator.sessions.config import CoordinatorConfig


@pytest.mark.parametrize("name", ["max_nodes", "max_live_nodes"])
def test_a_choice_has_no_more_nodes_than_its_pool_holds_and_no_fewer_unless_told(name: str) -> None:
    assert getattr(CoordinatorConfig(), name) == 256
    for wrong in (0, 257):
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(ValueError, match=f"{name}: {wrong} given, 1 to 256 needed"):
            CoordinatorConfig(**options)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"http_port": -1}, "http_port: -1 given"),
        ({"http_port": 65536}, "http_port: 65536 given"),
        ({"http_host": "127.0.0.1"}, "http_host: 127.0.0.1 given, with http_port needed"),
        ({"http_port": 0, "http_host": "0.0.0.0"}, "http_host: 0.0.0.0 given, which other machines may reach"),
        ({"peers": ("nobody",)}, "peers: 'nobody' given, host:port, file:PATH or dns:NAME:PORT needed"),
        ({"shared_port": 0}, "shared_port: 0 given, 1 to 65535 needed"),
        ({"shared_http_port": 8000}, "shared_http_port: 8000 given, with http_port needed"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        CoordinatorConfig(**options)
