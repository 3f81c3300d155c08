"""The HTTP door over loopback, with a scheduler that plays scripts: what the tests of the door share."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tests.byte_tokenizer import ALPHABET, byte_tokenizer
from tests.coordinator.scripted_scheduler import Play, ScriptedScheduler, delta, result
from tests.polling import until

from outrider.coordinator.api.access import Access
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.app import create_app
from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.server import HttpServer
from outrider.coordinator.api.service import GenerationServicer
from outrider.coordinator.sessions.messages import GenerationEvent, GenerationRequest
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, generation_pb2

_TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")


TOKENIZER = TextTokenizer(byte_tokenizer())
A, B, C = (ALPHABET[char] for char in "abc")


def play_plainly(request: GenerationRequest) -> Sequence[GenerationEvent]:
    deltas = [delta(A, B, text="ab", index=index) for index in range(request.n)]
    return [*deltas, *(delta(C, text="c", index=index) for index in range(request.n)), result(*[3] * request.n)]


class Door:
    """Server under test, and the parts that a test controls."""

    def __init__(self, scheduler: ScriptedScheduler, servicer: GenerationServicer, server: HttpServer) -> None:
        self.scheduler, self.servicer, self.server = scheduler, servicer, server
        self.is_serving = True

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        # By default it loads every authority's certificate for each client.
        transport = options.pop("http_client", None) or httpx2.AsyncClient(verify=False)
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, "http_client": transport} | options
        return openai.AsyncOpenAI(base_url=f"{self.server.url}/v1", **settings)

    async def ask(
        self, path: str, content: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers, body as it travelled."""
        reader, writer = await self.send(path, content, method=method, **headers)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body

    async def send(
        self, path: str, content: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        host, _, port = self.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        given = {"host": self.server.address, "connection": "close", "content-length": str(len(body))}
        given |= {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        lines = [f"{method or ('GET' if content is None else 'POST')} {path} HTTP/1.1"]
        lines += [f"{name}: {text}" for name, text in given.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return reader, writer


async def _hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def _defect(request: Request) -> Response:
    raise RuntimeError("a secret")


@contextlib.asynccontextmanager
async def serving(
    play: Play = play_plainly,
    *,
    token_file: Path | None = None,
    tls: TlsConfig | None = None,
    template: ChatTemplate | NoChatTemplate = _TEMPLATE,
    cors: Sequence[str] = (),
) -> AsyncIterator[Door]:
    scheduler = ScriptedScheduler(play)
    generations = Generations(
        scheduler,
        model=common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=2_000, eos_token_ids=[0]),
        tokenizer=TOKENIZER,
        limits=RequestLimits(),
    )
    servicer = GenerationServicer(generations, server_info=generation_pb2.ServerInfo, access=Access(token_file))
    routes = [Route("/more/hello", _hello), Route("/hello", _hello), Route("/defect", _defect)]
    app = create_app(
        servicer,
        template=template,
        tokenizer_config={"bos_token": "<s>"},
        cors=cors,
        is_serving=lambda: door.is_serving,
        extra_routes=routes,
        open_paths={"/more/"},
    )
    server = HttpServer(app, host="127.0.0.1", port=0, tls=tls)
    door = Door(scheduler, servicer, server)
    await server.start()
    try:
        yield door
        await until(lambda: not servicer.generations.live)
    finally:
        await server.stop()
        # Connections that a test has closed are gone a turn later.
        await asyncio.sleep(0)
