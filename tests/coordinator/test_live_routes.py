"""The live page's paths: the door's application around a scheduler whose workers are fake."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from tests.coordinator.fake_workers import make_request
from tests.coordinator.running import coordinator_running
from tests.polling import until

from outrider.coordinator.api.access import Access
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.app import create_app
from outrider.coordinator.api.service import GenerationServicer
from outrider.coordinator.live import routes
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.models import embedded_target_path
from outrider.security.tokens import TokenEntry, add_token, hash_of, new_token
from outrider.v1 import common_pb2, generation_pb2

TOKENIZER = TextTokenizer.load(embedded_target_path())


class Answer:
    """Response of the application, as it comes; `blocks` makes a reader that reads no more."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.is_gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.body.decode().splitlines() if line.startswith("data: ")]


class Page:
    """The application, asked without a socket."""

    def __init__(self, bench: Any, *, token_file: Path | None = None) -> None:
        generations = Generations(
            bench.scheduler,
            model=common_pb2.ModelInfo(name="tiny", vocab_size=8192, max_model_len=2_000, eos_token_ids=[0]),
            tokenizer=TOKENIZER,
            limits=RequestLimits(),
        )
        self.servicer = GenerationServicer(
            generations, server_info=generation_pb2.ServerInfo, access=Access(token_file)
        )
        extra = routes.live_routes(self.servicer.generations, lambda: bench.scheduler.sessions, hosts=["ours.example"])
        self._app = create_app(self.servicer, extra_routes=extra, open_paths=routes.OPEN_PATHS)

    @contextlib.asynccontextmanager
    async def asking(self, path: str, body: Any = None, **headers: str) -> AsyncIterator[Answer]:
        """A request that goes on while the block runs; behind it the reader is gone."""
        answer = Answer()
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await answer.is_gone.wait()
            return {"type": "http.disconnect"}

        given = {"host": "127.0.0.1:80", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
            "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()], "server": ("127.0.0.1", 80),
        }  # fmt: skip
        task = asyncio.create_task(self._app(scope, receive, answer.send))  # type: ignore[arg-type]
        answer.ended = task  # type: ignore[attr-defined]
        try:
            yield answer
        finally:
            answer.is_gone.set()
            answer.may_send.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """The whole answer."""
        async with self.asking(path, body, **headers) as answer:
            await answer.ended  # type: ignore[attr-defined]
        return answer


def counts(lines: list[dict[str, Any]]) -> dict[str, int]:
    verdicts = [line for line in lines if line.get("e") == "verdict"]
    told = {name: sum(len(verdict[name]) for verdict in verdicts) for name in ("accepted", "emitted")}
    return told | {"selected": sum(verdict["selected"] for verdict in verdicts)}


async def test_a_demo_sessions_lines_are_all_of_it(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    page = Page(bench)
    answer = await page.ask("/live/api/demo", {"prompt": 3, "max_new_tokens": 40})
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert answer.lines[0]["format"] == "outrider-tree"
    assert answer.lines[-1]["e"] == "end"
    assert counts(answer.lines)["emitted"] == 40
    assert (
        counts(answer.lines)["accepted"]
        == answer.lines[-1]["counts"]["accepted"]
        == bench.scheduler.totals.accepted_tokens
    )
    assert not page.servicer.generations.live


async def test_a_demo_session_ends_when_its_reader_goes(bench):
    bench.add_target(step_s=0.001)
    page = Page(bench)
    async with page.asking("/live/api/demo", {"max_new_tokens": 512}) as answer:
        await until(lambda: answer.lines)
        assert len(page.servicer.generations.live) == 1
    assert not page.servicer.generations.live
    bench.check_idle()


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_a_request_may_have_its_trees_lines_beside_its_answer(bench, *, is_asked_for):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    request = generation_pb2.GenerateRequest(
        text="def", sampling_params=generation_pb2.SamplingParams(max_new_tokens=30), record_tree=is_asked_for
    )
    context = SimpleNamespace(peer=lambda: "a connection")
    responses = [each async for each in Page(bench).servicer.Generate(request, context)]
    assert [responses[0].WhichOneof("event"), responses[-1].WhichOneof("event")] == ["started", "finished"]
    lines = [json.loads(line) for each in responses for line in each.tree.lines]
    if not is_asked_for:
        assert not lines
        return
    assert (lines[0]["format"], lines[0]["prompt"], lines[-1]["e"]) == ("outrider-tree", "def", "end")
    told, finished = counts(lines), responses[-1].finished.speculation
    assert told["accepted"] == finished.spec_accepted_tokens
    assert told["selected"] == finished.spec_draft_tokens


async def test_a_running_session_is_listed_and_watched(bench):
    bench.add_target(step_s=0.01)
    bench.add_draft()
    page = Page(bench)
    assert (await page.ask("/live/api/sessions")).json["sessions"] == []
    generation = bench.submit(make_request())
    (entry,) = (await page.ask("/live/api/sessions")).json["sessions"]
    assert entry["request_id"] == "request-1"
    session = generation.sessions[0]
    async with page.asking(f"/live/api/sessions/{entry['session_id']}/events") as answer:
        await until(lambda: counts(answer.lines)["emitted"])
        assert session.tap is not None
    assert session.tap is None
    generation.cancel()
    gone = await page.ask(f"/live/api/sessions/{entry['session_id']}/events")
    assert gone.status == 404


async def test_a_reader_that_reads_nothing_holds_up_nobody_and_sees_the_gap(bench, monkeypatch):
    monkeypatch.setattr(routes, "MAX_LINES", 10)
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    page = Page(bench)
    generation = bench.submit(make_request())
    async with page.asking(f"/live/api/sessions/{generation.sessions[0].session_id}/events") as answer:
        answer.may_send.clear()
        events = [event async for event in generation]
        generation.cancel()
        answer.may_send.set()
        await answer.ended  # type: ignore[attr-defined]
    assert events
    (gap,) = [line for line in answer.lines if line.get("e") == "gap"]
    assert gap["lost"] > 0
    assert answer.lines[answer.lines.index(gap) + 1]["e"] == "tree"
    assert answer.lines[-1]["e"] == "end"
    assert len(answer.lines) <= 2 * 10 + 3


async def test_with_tokens_the_page_is_open_and_its_data_is_its_owners(bench, tmp_path):
    file, tokens = tmp_path / "tokens.json", {}
    for name in ("ann", "bob"):
        tokens[name] = new_token()
        add_token(file, TokenEntry(name=name, sha256=hash_of(tokens[name])))
    bench.add_target(step_s=0.01)
    page = Page(bench, token_file=file)
    assert (await page.ask("/live")).status == 200
    assert (await page.ask("/live/static/main.js")).status == 200
    for path in ("/live/api/sessions", "/live/api/sessions/1/events"):
        assert (await page.ask(path)).status == 401
    assert (await page.ask("/live/api/demo", {})).status == 401
    generation = bench.submit(make_request(caller="ann"))
    path = f"/live/api/sessions/{generation.sessions[0].session_id}/events"
    bearer = {name: f"Bearer {token}" for name, token in tokens.items()}
    assert len((await page.ask("/live/api/sessions", authorization=bearer["ann"])).json["sessions"]) == 1
    assert (await page.ask("/live/api/sessions", authorization=bearer["bob"])).json["sessions"] == []
    assert (await page.ask(path, authorization=bearer["bob"])).status == 404
    async with page.asking(path, authorization=bearer["ann"]) as answer:
        await asyncio.sleep(1)
        assert answer.status == 200
    generation.cancel()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "ours.example"}, 200),
        ({"host": "rebound.example"}, 403),
        ({"host": "rebound.example:99999"}, 403),
        ({"host": "["}, 403),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
    ],
)
async def test_other_sites_in_a_browser_read_nothing(bench, *, headers, status):
    answer = await Page(bench).ask("/live/api/sessions", **headers)
    assert answer.status == status


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"prompt": -1}, {}, 400),
        ({"prompt": True}, {}, 400),
        ({"max_new_tokens": 100_000}, {}, 400),
        ({"temperature": "hot"}, {}, 400),
        ({"speculation": "always"}, {}, 400),
        ({"speculation": ["async"]}, {}, 400),
        ({"temperature": float("nan")}, {}, 400),
        ({"text": "\ud800"}, {}, 400),
        (b"[" * 5_000, {}, 400),
        ({"text": ""}, {}, 400),
        ({"unknown": 1}, {}, 400),
        ([], {}, 400),
        (b"{", {}, 400),
        (b" " * 70_000, {}, 413),
        ({}, {"content_type": "text/plain"}, 415),
    ],
)
async def test_a_demo_that_cannot_be_says_why(bench, *, body, headers, status):
    bench.add_target()
    answer = await Page(bench).ask("/live/api/demo", body, **headers)
    assert answer.status == status
    assert answer.json["error"]["message"]
    assert bench.scheduler.totals.requests == 0


async def test_pages_that_watch_are_limited(bench, monkeypatch):
    monkeypatch.setattr(routes, "MAX_DEMOS", 1)
    bench.add_target(step_s=0.01)
    page = Page(bench)
    async with page.asking("/live/api/demo", {}) as first:
        await until(lambda: first.lines)
        assert (await page.ask("/live/api/demo", {})).status == 429
    assert (await page.ask("/live/api/demo", {"max_new_tokens": 2})).status == 200


async def test_demos_that_come_at_once_are_limited(bench, monkeypatch):
    async def elsewhere(check: Any, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.01)
        return check(*arguments, **options)

    monkeypatch.setattr(asyncio, "to_thread", elsewhere)
    monkeypatch.setattr(routes, "MAX_DEMOS", 1)
    bench.add_target(step_s=0.01)
    # So long that it is checked in another thread, which has no place in virtual time.
    body = {"text": "\u4e00" * 8_000, "max_new_tokens": 1}
    page = Page(bench)
    answers = await asyncio.gather(*(page.ask("/live/api/demo", body) for _ in range(4)))
    assert [answer.status for answer in answers].count(429) == 3


async def test_a_reader_that_is_gone_before_the_first_line_leaves_nothing(bench):
    bench.add_target(step_s=0.01)
    page = Page(bench)
    for _ in range(routes.MAX_DEMOS + 1):
        async with page.asking("/live/api/demo", {}) as answer:
            answer.may_send.clear()
            await until(lambda: page.servicer.generations.live)
        assert not page.servicer.generations.live
    bench.check_idle()


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_the_page_is_served_where_it_is_asked_for(*, is_asked_for):
    options: dict[str, Any] = {"live_page": True} if is_asked_for else {"http_port": 0}
    async with coordinator_running(**options) as server, httpx2.AsyncClient(verify=False) as client:
        answer = await client.get(f"http://{server.http_address}/live")
        assert answer.status_code == (200 if is_asked_for else 404)
        if is_asked_for:
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
            for name in ("main.js", "page.css", "icon.svg"):
                found = await client.get(f"http://{server.http_address}/live/static/{name}")
                assert found.status_code == 200
                assert found.headers["x-content-type-options"] == "nosniff"
            assert (await client.get(f"http://{server.http_address}/live/static/../routes.py")).status_code == 404
