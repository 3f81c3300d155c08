"""The HTTP door of a whole coordinator: from its configuration to its end."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.errors import CheckpointError


def fetch(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"http_port": -1}, "http_port: -1 given"),
        ({"http_port": 65536}, "http_port: 65536 given"),
        ({"http_host": "127.0.0.1"}, "http_host: 127.0.0.1 given, with http_port needed"),
        ({"http_port": 0, "http_host": "0.0.0.0"}, "http_host: 0.0.0.0 given, which other machines may reach"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        CoordinatorConfig(**options)


async def test_a_coordinator_has_no_such_door_unless_asked() -> None:
    server = CoordinatorServer(CoordinatorConfig(port=0))
    assert server.http_address == ""
    await server.start()
    await server.stop()


async def test_from_start_to_stop() -> None:
    server = CoordinatorServer(CoordinatorConfig(port=0, http_port=0, drain_s=0.0))
    await server.start()
    try:
        url = f"http://{server.http_address}"
        assert await asyncio.to_thread(fetch, f"{url}/health") == (200, b'{"status":"serving"}')
        assert (await asyncio.to_thread(fetch, f"{url}/metrics"))[0] == 200
        # Nobody is there to serve it, which both doors say.
        status, body = await asyncio.to_thread(fetch, f"{url}/v1/completions", b'{"prompt": "import os"}')
        assert status == 503
        assert b"worker_unavailable" in body
    finally:
        await server.stop()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(fetch, f"{url}/health")


async def test_a_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        CoordinatorServer(CoordinatorConfig(port=0, http_port=0, chat_template=template))
