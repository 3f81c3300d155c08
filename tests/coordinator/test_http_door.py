"""The HTTP door over loopback, with a scheduler that plays scripts: the official client, and what it cannot do."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.coordinator.access import Access
from outrider.coordinator.http import server as http_server
from outrider.coordinator.http.app import create_app
from outrider.coordinator.http.chat_template import ChatTemplate
from outrider.coordinator.http.formats import ChatFormat, CompletionFormat, WholeChoice
from outrider.coordinator.http.requests import read_chat, read_completion
from outrider.coordinator.http.server import HttpServer
from outrider.coordinator.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    RoundRecord,
    SpeculationCounts,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.service import GenerationServicer
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.tokenizer import TextTokenizer
from outrider.coordinator.validation import RequestLimits
from outrider.errors import InternalError, OutriderError, Overloaded, WorkerUnavailable
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.security.tokens import TokenEntry, add_token, hash_of, new_token
from outrider.v1 import common_pb2, generation_pb2

ALPHABET = {char: rank for rank, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
Play = Callable[[GenerationRequest], Sequence[GenerationEvent | OutriderError | None]]


def tokenizer_of_bytes() -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


TOKENIZER = tokenizer_of_bytes()
A, B, C = (ALPHABET[char] for char in "abc")


class ScriptedGeneration:
    """Plays one event after the other; None waits until it is told to go on, or ended."""

    def __init__(self, events: Sequence[GenerationEvent | OutriderError | None]) -> None:
        self._events = events
        self._error: OutriderError | None = None
        self.go_on = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.played = 0

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for event in self._events:
            if event is None:
                await self.go_on.wait()
            if self._error is not None:
                raise self._error
            if isinstance(event, OutriderError):
                raise event
            if event is not None:
                self.played += 1
                yield event

    def cancel(self) -> None:
        self.is_cancelled.set()

    def abort(self, error: OutriderError) -> None:
        self._error = error
        self.go_on.set()


class ScriptedScheduler:
    def __init__(self, play: Play) -> None:
        self.play = play
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.error: OutriderError | None = None
        self.room = 100

    def check_room(self, choices: int = 1) -> None:
        if choices > self.room:
            raise Overloaded("full", retry_after_s=2.5)

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> ScriptedGeneration:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        self.generations.append(ScriptedGeneration(self.play(request)))
        return self.generations[-1]


def delta(*token_ids: int, text: str = "", index: int = 0, logprobs: TokenLogprobs | None = None) -> TokenDelta:
    return TokenDelta(index=index, token_ids=token_ids, text=text, offset=0, text_offset=0, logprobs=logprobs)


def result(*tokens: int, stop_string: str | None = None) -> GenerationResult:
    reason = FinishReason.LENGTH if stop_string is None else FinishReason.STOP
    return GenerationResult(
        choices=[
            ChoiceResult(index=i, finish_reason=reason, completion_tokens=count, stop_string=stop_string)
            for i, count in enumerate(tokens)
        ],
        speculation=SpeculationCounts(verify_steps=2, drafted_tokens=9, accepted_tokens=3),
        queue_s=0.001,
        ttft_s=0.011,
        total_s=0.031,
        cached_tokens=1,
    )


def play_plainly(request: GenerationRequest) -> Sequence[GenerationEvent]:
    deltas = [delta(A, B, text="ab", index=index) for index in range(request.n)]
    return [*deltas, *(delta(C, text="c", index=index) for index in range(request.n)), result(*[3] * request.n)]


class Door:
    """What a test holds of a door."""

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
    play: Play = play_plainly, *, token_file: Path | None = None, tls: TlsConfig | None = None
) -> AsyncIterator[Door]:
    scheduler = ScriptedScheduler(play)
    servicer = GenerationServicer(
        scheduler,
        model=common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=2_000, eos_token_ids=[0]),
        tokenizer=TOKENIZER,
        limits=RequestLimits(),
        server_info=generation_pb2.ServerInfo,
        access=Access(token_file),
    )
    routes = [Route("/more/hello", _hello), Route("/hello", _hello), Route("/defect", _defect)]
    app = create_app(
        servicer,
        template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"),
        is_serving=lambda: door.is_serving,
        extra_routes=routes,
        open_paths={"/more/"},
    )
    server = HttpServer(app, host="127.0.0.1", port=0, tls=tls)
    door = Door(scheduler, servicer, server)
    await server.start()
    try:
        yield door
        async with asyncio.timeout(30):
            while servicer.generations.live:
                await asyncio.sleep(0.001)
    finally:
        await server.stop()


MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_whole_completion_and_chat() -> None:
    async with serving() as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt="hi", max_tokens=3)
        assert completion.choices[0].text == "abc"
        assert completion.choices[0].finish_reason == "length"
        assert completion.id.startswith("cmpl-")
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 3)
        assert completion.usage.total_tokens == 5
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 1
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
        assert chat.choices[0].message.content == "abc"
        assert chat.choices[0].message.role == "assistant"
        assert door.scheduler.requests[-1].prompt_token_ids == tuple(TOKENIZER.encode("hi"))
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_streams_of_one_choice() -> None:
    play: Play = lambda _: [delta(A, text=""), delta(B, text="ab"), result(2, stop_string="x")]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        options: Any = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.completions.create(prompt="hi", **options)]
        # A token whose text is held back is a chunk all the same.
        assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["", "ab", ""]
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
        assert chunks[2].choices[0].model_extra == {"stop_reason": "x"}
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        assert len({chunk.id for chunk in chunks}) == 1
        deltas = [chunk async for chunk in await client.chat.completions.create(messages=MESSAGES, **options)]
        assert [chunk.choices[0].delta.content for chunk in deltas[:-1]] == ["", "", "ab", None]
        assert deltas[0].choices[0].delta.role == "assistant"
        assert deltas[-2].choices[0].finish_reason == "stop"
        assert deltas[-1].usage is not None


async def test_stream_as_it_travels() -> None:
    async with serving() as door:
        status, headers, body = await door.ask("/v1/completions", {"prompt": "hi", "stream": True, "request_id": "me"})
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert body.count(b"data: ") == 4
        assert body.rstrip(b"0\r\n").endswith(b"data: [DONE]")
        assert b'"id":"cmpl-me"' in body
        given = {"prompt": "hi", "stream": True, "return_token_ids": True, "echo": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, _, body = await door.ask("/v1/completions", given | {"stream_options": options}, x_request_id="proxy-7")
        parts = [part for line in body.split(b"\r\n") for part in line.split(b"\n\n") if part.startswith(b"data: {")]
        events = [json.loads(part.removeprefix(b"data: ")) for part in parts]
        assert events[0]["id"] == "cmpl-proxy-7"
        assert events[0]["choices"][0]["text"] == "hi"
        assert events[0]["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("hi")
        assert [event["choices"][0].get("token_ids") for event in events[1:-1]] == [[A, B], [C], None]
        assert [event["usage"]["completion_tokens"] for event in events[1:]] == [2, 3, 3, 3]


async def test_several_choices_and_several_prompts() -> None:
    async with serving() as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt=["x", "yz"], n=2, echo=True)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in completion.choices] == ["xabc", "xabc", "yzabc", "yzabc"]
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 12)
        assert [request.n for request in door.scheduler.requests] == [2, 2]
        texts = dict.fromkeys(range(4), "")
        async for chunk in await client.completions.create(model="tiny", prompt=["x", "yz"], n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == dict.fromkeys(range(4), "abc")
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in chat.choices] == ["abc", "abc"]


async def test_one_bad_prompt_of_several_ends_them_all_before_anything_is_sent() -> None:
    async with serving() as door, door.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=["x", ""], stream=True)
        assert caught.value.param == "prompt[1]"


async def test_log_probabilities_in_both_shapes() -> None:
    logprobs = TokenLogprobs(
        token_logprobs=[-0.5, -float("inf")],
        top_token_ids=[[A, C], [C, A]],
        top_logprobs=[[-0.5, -1.5], [-0.25, -2.5]],
    )
    play: Play = lambda _: [delta(A, B, text="ab", logprobs=logprobs), result(2)]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
        found = completion.choices[0].logprobs
        assert found is not None
        assert (found.tokens, found.token_logprobs, found.text_offset) == (["a", "b"], [-0.5, -9999.0], [0, 1])
        assert found.top_logprobs == [{"a": -0.5, "c": -1.5}, {"c": -0.25, "a": -2.5, "b": -9999.0}]
        assert door.scheduler.requests[-1].sampling.logprobs == 2
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
        content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert content
        assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
            ("a", -0.5, [97]),
            ("b", -9999.0, [98]),
        ]
        assert [(best.token, best.logprob) for best in content[1].top_logprobs] == [("c", -0.25), ("a", -2.5)]
        options: Any = {"model": "tiny", "stream": True}
        async for chunk in await client.completions.create(prompt="hi", logprobs=1, **options):
            if chunk.choices[0].text:
                assert chunk.choices[0].logprobs is not None
                assert chunk.choices[0].logprobs.tokens == ["a", "b"]
        async for chunk in await client.chat.completions.create(messages=MESSAGES, logprobs=True, **options):
            if chunk.choices[0].delta.content:
                assert chunk.choices[0].logprobs is not None
                assert chunk.choices[0].logprobs.content is not None
                assert [entry.top_logprobs for entry in chunk.choices[0].logprobs.content] == [[], []]


def verification(nodes: int, accepted: int) -> RoundRecord:
    return RoundRecord(
        index=0, step=1, length=2, submitted_ns=0, result_ns=1, waited_ns=0, step_ns=1, forward_ns=1,
        node_tokens=[A] * nodes, node_parents=[0] * nodes, node_values=[0.5] * nodes,
        accepted_nodes=list(range(1, accepted + 1)), emitted_token_ids=[A], growth=[],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_log_probabilities_are_not_left_to_the_end(kind: str) -> None:
    """Those of a long response, all at once, would keep the event loop from everybody else for seconds."""
    asked_for = []

    class Tokenizer:
        def token_text(self, token_id: int) -> str:
            asked_for.append(token_id)
            return "a"

        def piece(self, token_id: int) -> bytes:
            return b"a"

    names: Any = {"model": "tiny", "created": 1, "tokenizer": Tokenizer()}
    if kind == "chat":
        content = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        asked = read_chat(content, model="tiny", tokenizer=TOKENIZER, template=ChatTemplate("x"))
        form = ChatFormat(asked, **names)
    else:
        form = CompletionFormat(read_completion({"prompt": "x", "logprobs": 2}, model="tiny", tokenizer=None), **names)
    told = TokenLogprobs(token_logprobs=[-0.5], top_token_ids=[[A, B]], top_logprobs=[[-0.5, -1.0]])
    # Text may come without a token.
    no_token = delta(text="c", logprobs=TokenLogprobs(token_logprobs=[], top_token_ids=[], top_logprobs=[]))
    choice = WholeChoice([A], "")
    for each in (delta(A, text="a", logprobs=told), no_token, delta(A, text="a", logprobs=told)):
        choice.take(each, form.logprobs(each, 0))
    choice.result = result(2).choices[0]
    seen = len(asked_for)
    (whole,) = json.loads(form.whole([choice], {}, {}))["choices"]
    assert len(asked_for) == seen > 0
    found = whole["logprobs"]
    values = [entry["logprob"] for entry in found["content"]] if kind == "chat" else found["token_logprobs"]
    assert values == [-0.5] * 2
    assert kind == "chat" or found["text_offset"] == [0, 1]


async def test_metrics_of_speculation_where_they_are_asked_for() -> None:
    rounds = [verification(0, 0), verification(4, 2), verification(3, 0)]
    play: Play = lambda request: [delta(A, text="a"), *(rounds if request.trace else []), result(1)]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        asking: Any = {"per_request_spec_decode_metrics": "detailed"}
        completion = await client.completions.create(model="tiny", prompt="hi", extra_body=asking)
        metrics = (completion.model_extra or {})["metrics"]
        assert metrics["speculative_decoding"] == {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 2 / 7,
            "acceptance_histogram": [1, 0, 1, 0, 0, 0, 0, 0, 0],
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 2,
            "num_draft_tokens": 7,
            "num_spec_tokens": 8,
            "per_step_accepted": [2, 0],
            "per_step_drafted": [4, 3],
        }
        assert metrics["time_to_first_token_ms"] == pytest.approx(10)
        assert metrics["generation_time_ms"] == pytest.approx(20)
        asking = {"per_request_spec_decode_metrics": "summary"}
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": asking}
        chunks = [chunk async for chunk in await client.completions.create(model="tiny", prompt="hi", **options)]
        told = (chunks[-1].model_extra or {})["metrics"]["speculative_decoding"]
        assert told["num_draft_tokens"] == 7
        assert "per_step_accepted" not in told
        several = await client.completions.create(model="tiny", prompt=["hi", "ho"], extra_body=asking)
        assert (several.model_extra or {})["metrics"] is None
        assert "metrics" not in ((await client.completions.create(model="tiny", prompt="hi")).model_extra or {})


async def test_errors_have_openais_shape_and_status() -> None:
    async with serving() as door, door.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="hi", temperature=-1)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="hi")
        assert missing.value.code == "model_not_found"
        door.scheduler.error = WorkerUnavailable("no target")
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert unavailable.value.status_code == 503
        door.scheduler.error = InternalError("a defect")
        with pytest.raises(openai.InternalServerError) as defect:
            await client.completions.create(model="tiny", prompt="hi")
        assert (defect.value.status_code, defect.value.type) == (500, "server_error")
        door.scheduler.room = 0
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="tiny", prompt="hi")
        assert full.value.response.headers["retry-after"] == "3"
        assert full.value.response.headers["retry-after-ms"] == "2500"
        door.scheduler.room = 3
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt=["a", "b"], n=2)


async def test_requests_that_are_refused_by_this_door_alone_are_counted() -> None:
    told = list[str]()
    async with serving() as door:
        door.servicer.generations.on_refusal = lambda error: told.append(type(error).__name__)
        for content in (b"{", {"prompt": "x", "temprature": 1}, {"prompt": "x", "model": "other"}):
            await door.ask("/v1/completions", content)
        assert (await door.ask("/v1/completions", {"prompt": "x", "top_p": 2}))[0] == 400
    assert told == ["InvalidRequest", "InvalidRequest", "UnknownModel", "InvalidRequest"]


async def test_requests_that_are_none() -> None:
    async with serving() as door:

        async def refused(path: str, content: Any = None, **more: Any) -> tuple[int, Any]:
            status, _, body = await door.ask(path, content, **more)
            return status, json.loads(body)["error"]

        assert (await refused("/v1/completions", b"{"))[0] == 400
        assert (await refused("/v1/completions", b"[" * 100_000))[0] == 400
        assert (await refused("/v1/completions", b"[]"))[1]["param"] == "body"
        assert (await refused("/v1/completions", {"prompt": "x"}, content_type="text/plain"))[0] == 415
        assert (await refused("/v1/completions"))[0] == 405
        assert (await refused("/v1/completion", {}))[0] == 404
        assert (await refused("/v1/models/other"))[1]["code"] == "model_not_found"
        endless = b'{"prompt": "' + b"x" * (4 << 20) + b'"}'
        assert (await refused("/v1/completions", endless))[0] == 413
        assert door.scheduler.requests == []


async def test_however_deep_a_request_is_nested_it_is_no_defect() -> None:
    """A schema that can just be read cannot always be written again."""
    async with serving() as door:
        for depth in range(880, 990):
            schema = b'{"schema":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
            body = b'{"prompt":"a","response_format":{"type":"json_schema","json_schema":' + schema + b"}}"
            assert (await door.ask("/v1/completions", body))[0] == 400


async def test_a_defect_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as door:
        status, _, body = await door.ask("/defect")
        assert status == 500
        assert json.loads(body)["error"]["type"] == "server_error"
        assert b"secret" not in body
        assert "a secret" in caplog.text


async def test_an_error_after_the_first_tokens_is_an_event() -> None:
    play: Play = lambda _: [delta(A, text="a"), WorkerUnavailable("the target is gone")]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert (await anext(aiter(stream))).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="the target is gone"):
            await anext(aiter(stream))
        # As a whole it has a status.
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_generation(stream: bool) -> None:
    play: Play = lambda _: [delta(A, text="a"), None, result(1)]  # noqa: E731
    async with serving(play) as door:
        _, writer = await door.send("/v1/completions", {"prompt": ["hi", "ho"], "stream": stream})
        async with asyncio.timeout(30):
            while len(door.scheduler.generations) < 2 or not all(each.played for each in door.scheduler.generations):
                await asyncio.sleep(0.001)
            assert not any(each.is_cancelled.is_set() for each in door.scheduler.generations)
            writer.close()
            for generation in door.scheduler.generations:
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
        await door.server.stop(grace_s=0.01)
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
        writer.close()
        assert (await door.ask("/health"))[0] == 200


async def test_a_port_that_is_taken_says_so() -> None:
    async with serving() as door:
        port = int(door.server.address.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for HTTP"):
            HttpServer(None, host="127.0.0.1", port=port)
