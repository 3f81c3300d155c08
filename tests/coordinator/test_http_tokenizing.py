"""Routes beside generation at the HTTP door: tokens, versions, ids, other origins, and its own description."""

import json
from typing import Any

import pytest
from tests.coordinator.http_door import TOKENIZER, serving
from tests.coordinator.scripted_scheduler import delta, result

from outrider import __version__

IDS = TOKENIZER.encode("hi, you")


async def ask(door: Any, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
    status, _, body = await door.ask(path, content, **headers)
    return status, json.loads(body)


async def test_text_to_tokens_and_back() -> None:
    async with serving() as door:
        status, told = await ask(door, "/tokenize", {"prompt": "hi, you", "return_token_strs": True})
        names = [TOKENIZER.token_text(token_id) for token_id in IDS]
        assert status == 200
        assert told == {"count": len(IDS), "max_model_len": 2_000, "tokens": IDS, "token_strs": names}
        messages = [{"role": "user", "content": "hi, "}, {"role": "assistant", "content": "you"}]
        assert (await ask(door, "/tokenize", {"model": "tiny", "messages": messages}))[1]["tokens"] == IDS
        assert await ask(door, "/detokenize", {"tokens": IDS}) == (200, {"prompt": "hi, you"})
        assert await ask(door, "/tokenize", {"prompt": ""}) == (200, {"count": 0, "max_model_len": 2_000, "tokens": []})
        assert await ask(door, "/tokenizer_info") == (200, {"bos_token": "<s>", "eos_token": None})


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "prompts": "y"}, "prompts"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
    ],
)
async def test_what_cannot_be_turned_into_tokens_is_named(path: str, content: Any, field: str) -> None:
    async with serving() as door:
        status, told = await ask(door, path, content)
        assert (status, told["error"]["param"]) == (400, field)


async def test_version_and_ping() -> None:
    async with serving() as door:
        assert await ask(door, "/version") == (200, {"version": __version__})
        assert (await ask(door, "/ping"))[0] == (await ask(door, "/ping", {}))[0] == 200
        door.is_serving = False
        assert (await ask(door, "/ping"))[0] == 503


async def test_ids_of_requests_come_back_and_one_id_may_be_given_to_several() -> None:
    async with serving(lambda _: [delta(65, text="a"), None, result(1)]) as door:
        asked = {"prompt": "hi", "stream": True}
        connections = [await door.send("/v1/completions", asked, x_request_id="proxy-7") for _ in range(2)]
        heads = [await reader.readuntil(b"\r\n\r\n") for reader, _ in connections]
        assert all(b" 200 " in head and b"x-request-id: proxy-7" in head for head in heads)
        for generation in door.scheduler.generations:
            assert not generation.is_cancelled.is_set()
            generation.go_on.set()
        for reader, writer in connections:
            assert b"[DONE]" in await reader.read()
            writer.close()
        ids = {request.request_id for request in door.scheduler.requests}
        assert len(ids) == 2
        assert all(request_id.startswith("cmpl-proxy-7-") for request_id in ids)
        # An error has one, too; an id of another form is not used, and one is made.
        for given in ({"x_request_id": "a b"}, {}):
            status, headers, _ = await door.ask("/v1/completions", {}, **given)
            assert status == 400
            assert len(headers["x-request-id"]) == 32


async def test_pages_of_other_origins_may_ask_where_that_is_allowed() -> None:
    preflight = {"method": "OPTIONS", "access_control_request_method": "POST"}
    wanted: Any = preflight | {"access_control_request_headers": "authorization,content-type"}
    async with serving(cors=["https://a.example"]) as door:
        status, headers, _ = await door.ask("/v1/completions", origin="https://a.example", **wanted)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert "authorization" in headers["access-control-allow-headers"]
        assert (await door.ask("/v1/completions", origin="https://b.example", **wanted))[0] == 400
        _, headers, _ = await door.ask("/v1/models", origin="https://a.example")
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert headers["access-control-expose-headers"] == "x-request-id"
    async with serving() as door:
        _, headers, _ = await door.ask("/v1/models", origin="https://a.example")
        assert "access-control-allow-origin" not in headers


async def test_the_description_has_every_path_and_the_fields_that_are_read() -> None:
    async with serving() as door:
        status, told = await ask(door, "/openapi.json")
        assert status == 200
        paths = {
            "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/tokenize",
            "/detokenize", "/tokenizer_info", "/version", "/ping", "/health", "/hello",
        }  # fmt: skip
        assert paths <= told["paths"].keys()
        bodies = {
            path: told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        }
        assert [body["required"] for body in bodies.values()] == [["prompt"], ["messages"], ["input"]]
        known = bodies["/v1/completions"]["properties"]
        assert known["temperature"] == {"type": "number"}
        assert known["stream"] == {"type": "boolean"}
        assert {"echo", "logprobs", "max_tokens", "guided_json", "speculation"} <= known.keys()
        assert {"tools", "tool_choice", "top_logprobs"} <= bodies["/v1/chat/completions"]["properties"].keys()
        # What it has no name for is refused, and what it has is not.
        refused = (await ask(door, "/v1/completions", {"prompt": "hi", "zzz": 1}))[1]["error"]["param"]
        assert refused == "zzz"
        assert "zzz" not in known
        assert (await ask(door, "/v1/completions", {"prompt": "hi"} | dict.fromkeys(known.keys() - {"prompt"})))[
            0
        ] == 200
