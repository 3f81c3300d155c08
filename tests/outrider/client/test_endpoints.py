"""Several coordinators: requests are spread, and go on where somebody is left to serve them."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from outrider.client import AsyncClient, Client
from outrider.client import endpoints as client_endpoints
from outrider.client.endpoints import Endpoints, endpoint_list
from outrider.client.progress import Progress
from outrider.errors import InternalError, Overloaded, WorkerUnavailable


def test_addresses_are_given_one_by_one_or_with_commas() -> None:
    assert endpoint_list("a:1") == ("a:1",)
    assert endpoint_list(" a:1, b:2 ,,a:1") == endpoint_list(["a:1", "b:2"]) == ("a:1", "b:2")
    for nothing in ("", " , ", []):
        with pytest.raises(ValueError, match="host:port needed"):
            endpoint_list(nothing)


def three() -> Endpoints[str]:
    endpoints = Endpoints(["a", "b", "c"], str.upper, lambda channel: channel)
    endpoints._turn = 0
    return endpoints


def addresses(route: Iterator[client_endpoints.Endpoint[str]], count: int) -> str:
    return "".join(next(route).address for _ in range(count))


def test_each_request_begins_at_the_next_one_and_goes_round() -> None:
    endpoints = three()
    assert [addresses(endpoints.route(), 4) for _ in range(4)] == ["abca", "bcab", "cabc", "abca"]
    assert [endpoint.channel for endpoint in endpoints] == ["A", "B", "C"]


def test_one_that_has_failed_comes_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = three()
    next(iter(endpoints)).note_failure()
    assert [addresses(endpoints.route(), 3) for _ in range(2)] == ["bca", "bca"]
    assert [endpoint.address for endpoint in endpoints.in_order()] == ["b", "c", "a"]
    now_s = time.monotonic()
    monkeypatch.setattr(client_endpoints.time, "monotonic", lambda: now_s + 6)
    endpoints._turn = 0
    assert addresses(endpoints.route(), 3) == "abc"


def test_what_nobody_may_be_there_for_is_tried_everywhere_once_and_at_once() -> None:
    progress = Progress("x", {}, max_resumes=8, endpoints=3)
    gone = WorkerUnavailable("nobody there")
    assert [progress.pause_before_resuming_s(gone, is_new=True) for _ in range(2)] == [0, 0]
    with pytest.raises(WorkerUnavailable):
        progress.pause_before_resuming_s(gone, is_new=True)
    full = Progress("x", {}, max_resumes=8, endpoints=2)
    assert full.pause_before_resuming_s(Overloaded("full", retry_after_s=3), is_new=False) == 0
    with pytest.raises(Overloaded):
        full.pause_before_resuming_s(Overloaded("full", retry_after_s=3), is_new=False)
    with pytest.raises(InternalError):
        Progress("x", {}, max_resumes=8, endpoints=2).pause_before_resuming_s(InternalError("a defect"), is_new=False)


def test_what_has_started_waits_only_when_all_have_been_tried() -> None:
    progress = Progress("x", {}, max_resumes=3, endpoints=2)
    progress._started = object()  # type: ignore[assignment]
    pauses = [progress.pause_before_resuming_s(WorkerUnavailable("gone"), is_new=True) for _ in range(6)]
    assert pauses[0::2] == [0, 0, 0]
    assert 0 < pauses[1] < pauses[3] < pauses[5]
    with pytest.raises(WorkerUnavailable):
        progress.pause_before_resuming_s(WorkerUnavailable("gone"), is_new=True)


def test_what_has_not_started_goes_on_as_if_it_had_where_somebody_was_there() -> None:
    progress = Progress("x", {}, max_resumes=2, endpoints=1)
    assert all(progress.pause_before_resuming_s(WorkerUnavailable("gone"), is_new=False) > 0 for _ in range(2))
    with pytest.raises(WorkerUnavailable):
        progress.pause_before_resuming_s(WorkerUnavailable("gone"), is_new=False)


def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def test_nobody_anywhere() -> None:
    with Client([nobody(), nobody()]) as client:
        for call in (lambda: client.generate("x"), client.model_info, client.server_info, lambda: client.abort("r")):
            with pytest.raises(WorkerUnavailable, match="is it running"):
                call()


def test_nobody_anywhere_for_the_async_client() -> None:
    async def ask() -> None:
        async with AsyncClient(f"{nobody()},{nobody()}") as client:
            for call in (client.generate("x"), client.model_info(), client.abort("r")):
                with pytest.raises(WorkerUnavailable, match="is it running"):
                    await call

    asyncio.run(ask())
