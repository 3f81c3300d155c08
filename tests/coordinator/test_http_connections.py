"""Connections of the HTTP server: clients that leave or stay silent, tokens, TLS, its bounds and its end."""

import asyncio
import contextlib
import json
import ssl
from pathlib import Path

import httpx2
import openai
import pytest
from tests.coordinator.http_door import A, play_plainly, serving
from tests.coordinator.running import coordinator_running
from tests.coordinator.scripted_scheduler import Play, delta, result
from tests.polling import until

from outrider.coordinator.api.http import server as http_server
from outrider.coordinator.api.http.server import HttpServer
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.errors import CheckpointError
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.security.tokens import TokenEntry, add_token, hash_of, new_token


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_generation(stream: bool) -> None:
    play: Play = lambda _: [delta(A, text="a"), None, result(1)]  # noqa: E731
    async with serving(play) as door:
        _, writer = await door.send("/v1/completions", {"prompt": ["hi", "ho"], "stream": stream})
        generations = door.scheduler.generations
        async with asyncio.timeout(30):
            await until(lambda: len(generations) == 2 and all(each.played for each in generations))
            assert not any(each.is_cancelled.is_set() for each in generations)
            writer.close()
            for generation in generations:
                await generation.is_cancelled.wait()
        # The door goes on.
        door.scheduler.play = play_plainly
        assert (await door.ask("/v1/completions", {"prompt": "hi"}))[0] == 200


async def test_a_reader_who_does_not_read_is_waited_for() -> None:
    many = 30_000
    play: Play = lambda _: [*[delta(A, text="a" * 2_000)] * many, result(many)]  # noqa: E731
    async with serving(play) as door:
        reader, writer = await door.send("/v1/completions", {"prompt": "hi", "stream": True})
        await reader.readuntil(b"data: ")
        # The reader's and the sockets' buffers fill up, and then nothing more is asked of the generation.
        generation, seen = door.scheduler.generations[0], -1
        async with asyncio.timeout(60):
            while generation.played != seen:
                seen = generation.played
                await asyncio.sleep(0.2)
        assert generation.played < many
        writer.transport.abort()
        async with asyncio.timeout(30):
            await generation.is_cancelled.wait()


async def test_tokens_are_asked_for_everywhere_but_where_it_says_so(tmp_path: Path) -> None:
    path, token = tmp_path / "tokens.json", new_token()
    add_token(path, TokenEntry(name="alice", sha256=hash_of(token), max_concurrent=1))
    async with serving(token_file=path) as door:
        for where in ("/v1/models", "/hello", "/nowhere"):
            status, headers, body = await door.ask(where)
            assert (status, headers["www-authenticate"]) == (401, "bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert (await door.ask("/v1/completions", {"prompt": "hi"}))[0] == 401
        assert (await door.ask("/health"))[0] == 200
        assert (await door.ask("/more/hello"))[2] == b"hello"
        assert (await door.ask("/hello", authorization=f"Bearer {token}"))[0] == 200
        assert (await door.ask("/hello", authorization=f"Bearer {token}x"))[0] == 401
        assert (await door.ask("/hello", authorization=f"Basic {token}"))[0] == 401
        async with door.client(api_key=token) as client:
            await client.completions.create(model="tiny", prompt="hi")
            assert door.scheduler.requests[-1].caller == "alice"
            with pytest.raises(openai.RateLimitError, match="alice"):
                await client.completions.create(model="tiny", prompt="hi", n=2)
        async with door.client(api_key=new_token()) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_tls_with_the_coordinators_certificate_renewed_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_TICK_S", 0.01)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        write_development_set(folder, days=1)
    tls = TlsConfig.of_folder(first, Role.COORDINATOR)
    async with serving(tls=tls) as door:

        async def models(ca: Path) -> str:
            context = ssl.create_default_context(cafile=str(ca / "ca.pem"))
            async with httpx2.AsyncClient(verify=context) as transport, door.client(http_client=transport) as client:
                return (await client.models.list()).data[0].id

        assert door.server.url.startswith("https://")
        assert await models(first) == "tiny"
        with pytest.raises(openai.APIConnectionError):
            await models(second)
        # Half of a new pair is not used; the whole of it is.
        assert tls.key is not None
        assert tls.certificate is not None
        tls.key.write_bytes((second / tls.key.name).read_bytes())
        await asyncio.sleep(0.05)
        assert await models(first) == "tiny"
        tls.certificate.write_bytes((second / tls.certificate.name).read_bytes())
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(openai.APIConnectionError):
                    assert await models(second) == "tiny"
                    break


async def test_health_says_when_it_drains_and_stop_ends_what_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    play: Play = lambda _: [delta(A, text="a"), None, result(1)]  # noqa: E731
    async with serving(play) as door:
        assert json.loads((await door.ask("/health"))[2]) == {"status": "serving"}
        door.is_serving = False
        assert (await door.ask("/health"))[0] == 503
        reader, writer = await door.send("/v1/completions", {"prompt": "hi", "stream": True})
        await reader.readuntil(b'"text":"a"')
        # The stream goes on for as long, and what serves it has as long again to end by itself.
        await door.server.stop(grace_s=1.0)
        # Nothing had to be ended by force, which would be logged.
        assert caplog.text == ""
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                assert b"[DONE]" not in await reader.read()
            await door.scheduler.generations[0].is_cancelled.wait()
        writer.close()
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await door.ask("/health")


async def test_stop_lets_a_response_finish() -> None:
    play: Play = lambda _: [delta(A, text="a"), None, result(1)]  # noqa: E731
    async with serving(play) as door:
        reader, writer = await door.send("/v1/completions", {"prompt": "hi", "stream": True})
        await reader.readuntil(b'"text":"a"')
        stopping = asyncio.create_task(door.server.stop(grace_s=30))
        await asyncio.sleep(0)
        door.scheduler.generations[0].go_on.set()
        async with asyncio.timeout(60):
            assert b"[DONE]" in await reader.read()
            await stopping
        writer.close()


async def test_a_request_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.05)
    async with serving() as door:
        host, _, port = door.server.address.rpartition(":")
        for start in (b"", b"POST /v1/completions HT", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(start)
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    assert b"200" not in await reader.read()
            writer.close()
        assert door.scheduler.requests == []


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET /health HTTP/1.1\r\nx: ",
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10,
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ",
    ],
    ids=["path", "header", "headers", "trailer"],
)
async def test_what_comes_before_and_behind_the_content_is_bounded(start: bytes) -> None:
    """Nothing of it has been looked at by then, not even a token."""
    async with serving() as door, asyncio.timeout(30):
        host, _, port = door.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(start)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 16 * http_server.MAX_HEAD_BYTES and not reader.at_eof():
                writer.write(b"a" * 4096 if not start.endswith(b"y\r\n") else b"x: y\r\n" * 600)
                await writer.drain()
                await asyncio.sleep(0)
                sent += 4096
            assert not await reader.read()
        writer.transport.abort()
        assert (await door.ask("/health"))[0] == 200


async def test_a_port_that_is_taken_says_so() -> None:
    async with serving() as door:
        port = int(door.server.address.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for HTTP"):
            HttpServer(None, host="127.0.0.1", port=port)


async def test_a_coordinator_has_no_such_door_unless_asked() -> None:
    async with coordinator_running() as server:
        assert server.http_address == ""


async def test_the_door_of_a_whole_coordinator_from_start_to_stop() -> None:
    async with (
        coordinator_running(http_port=0) as server,
        httpx2.AsyncClient(base_url=f"http://{server.http_address}", verify=False, timeout=60) as client,
    ):
        assert (await client.get("/health")).content == b'{"status":"serving"}'
        assert (await client.get("/metrics")).status_code == 200
        # Nobody is there to serve it, which both doors say.
        answer = await client.post("/v1/completions", json={"prompt": "import os"})
        assert answer.status_code == 503
        assert b"worker_unavailable" in answer.content
    async with httpx2.AsyncClient(verify=False, timeout=60) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"http://{server.http_address}/health")


async def test_a_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        CoordinatorServer(CoordinatorConfig(port=0, http_port=0, chat_template=template))
