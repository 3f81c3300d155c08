"""Large bodies: the same values and refusals as json.loads, in small pieces, in a thread."""

import json
import random
import threading
from typing import Any

import pytest

from outrider.coordinator.api.http import fields, large_json
from outrider.errors import InvalidRequest


def made_up(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 4 else 6)
    if kind >= 6:
        count = chance.choice([0, 1, 2, 5, 30])
        if kind == 6:
            return {f"k{place}": made_up(chance, depth + 1) for place in range(count)}
        # Plain values alone, or with others in between.
        return [chance.randrange(10**6) if kind == 7 else made_up(chance, depth + 1) for _ in range(count)]
    return [chance.randrange(-9, 10**12), chance.random() * 1e9, True, None, 'te"xt ,]}\\ ü\n', ""][kind]


def outcome(load: Any, body: bytes) -> Any:
    try:
        return json.dumps(load(body))
    except (ValueError, RecursionError) as error:
        return "refused", type(error) is RecursionError


def test_values_and_refusals_are_those_of_json_loads(monkeypatch):
    # So that arrays are cut in many places.
    monkeypatch.setattr(large_json, "_PIECE", 11)
    chance, refused = random.Random(5), 0
    for _ in range(300):
        document = made_up(chance)
        body = json.dumps(document, indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5).encode()
        assert large_json.loads(body) == document
        spoilt = bytearray(body)
        for _ in range(chance.randrange(1, 3)):
            place = chance.randrange(len(spoilt) + 1)
            spoilt[place : place + chance.randrange(2)] = chance.choice([b",", b"]", b"{", b'"', b"1", b" ", b":", b""])
        assert outcome(large_json.loads, bytes(spoilt)) == outcome(json.loads, bytes(spoilt)), spoilt
        refused += outcome(json.loads, bytes(spoilt)) == ("refused", False)
    assert refused > 50
    for body in (b"", b" ", b"[1,]", b"[,1]", b"[1 2]", b'{"a":1,}', b"\xef\xbb\xbf[1]", b"\xff\xfe[", b"[NaN,1]"):
        assert outcome(large_json.loads, body) == outcome(json.loads, body), body
    for text in ('{"a": [1, "b"]}', "[1,2,3]"):
        assert large_json.loads(text.encode("utf-16")) == json.loads(text)
    deep = b"[" * 100_000
    assert outcome(large_json.loads, deep)[0] == "refused"


@pytest.mark.parametrize(
    "items", [list(range(20_000)), [f"text {number}" for number in range(8_000)]], ids=["ids", "texts"]
)
def test_others_have_their_turn_by_what_was_read_and_not_by_every_short_text(monkeypatch, items):
    """A turn lasts as long as whatever they do in it: 8,000 of them, of a busy event loop, took twelve seconds."""
    turns: list[float] = []
    monkeypatch.setattr(large_json.time, "sleep", turns.append)
    body = json.dumps({"prompt": items}).encode()
    assert large_json.loads(body) == {"prompt": items}
    pieces = len(body) / large_json._PIECE
    assert 0.9 * pieces - 1 <= len(turns) <= 2 * pieces


async def body_of(*parts: bytes) -> tuple[dict[str, Any], int]:
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    waiting.append({"type": "http.request", "body": b""})

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    scope = {"headers": [(b"content-type", b"application/json")]}
    return await fields.read_json_object(scope, receive, most_bytes=1 << 20)


async def test_a_large_body_is_parsed_elsewhere_piece_by_piece(monkeypatch):
    pieces: list[tuple[int, threading.Thread]] = []
    load = json.loads

    def noted(text: Any, **options: Any) -> Any:
        pieces.append((len(text), threading.current_thread()))
        return load(text, **options)

    monkeypatch.setattr(json, "loads", noted)
    document = {"prompt": list(range(50_000)), "stop": ["a"]}
    body = json.dumps(document).encode()
    assert len(body) > fields.LARGE_BODY_BYTES
    assert await body_of(body[:1000], body[1000:]) == (document, len(body))
    lengths, threads = zip(*pieces, strict=True)
    # None of them holds up the others for long.
    assert max(lengths) <= large_json._PIECE + 2
    assert sum(lengths) > 0.9 * len(body)
    assert threading.current_thread() not in threads
    with pytest.raises(InvalidRequest, match="not JSON: Expecting ',' delimiter"):
        await body_of(body[:-2] + b"{}}")
    pieces.clear()
    assert await body_of(b'{"prompt": [1, 2]}') == ({"prompt": [1, 2]}, 18)
    assert [thread for _, thread in pieces] == [threading.current_thread()]
