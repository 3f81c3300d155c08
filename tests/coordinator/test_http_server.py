"""The HTTP door of a whole coordinator: from its configuration to its end."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.coordinator.running import coordinator_running

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


async def test_a_coordinator_has_no_such_door_unless_asked() -> None:
    async with coordinator_running() as server:
        assert server.http_address == ""


async def test_from_start_to_stop() -> None:
    async with coordinator_running(http_port=0) as server:
        url = f"http://{server.http_address}"
        assert await asyncio.to_thread(fetch, f"{url}/health") == (200, b'{"status":"serving"}')
        assert (await asyncio.to_thread(fetch, f"{url}/metrics"))[0] == 200
        # Nobody is there to serve it, which both doors say.
        status, body = await asyncio.to_thread(fetch, f"{url}/v1/completions", b'{"prompt": "import os"}')
        assert status == 503
        assert b"worker_unavailable" in body
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(fetch, f"{url}/health")


async def test_a_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        CoordinatorServer(CoordinatorConfig(port=0, http_port=0, chat_template=template))
