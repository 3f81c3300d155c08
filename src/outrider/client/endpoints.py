"""The coordinators that a client may turn to (torch-free).

Requests are spread: each begins at the next one of the list, and a stream that breaks goes on at the one after that.
One that has failed comes last for a while, so that not every request has to find out anew.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from outrider.client.errors import was_answered, was_never_sent
from outrider.v1 import generation_pb2_grpc

_Channel = TypeVar("_Channel")

_AVOIDED_S = 5.0


def endpoint_list(endpoint: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses given one by one, or in one string with commas.

    Raises:
        ValueError: there is none.
    """
    entries = endpoint.split(",") if isinstance(endpoint, str) else endpoint
    found = tuple(dict.fromkeys(entry.strip() for entry in entries if entry.strip()))
    if not found:
        raise ValueError(f"endpoint: {endpoint!r} given, host:port needed")
    return found


class Endpoint(Generic[_Channel]):
    """One coordinator, and since when it is avoided."""

    def __init__(self, address: str, channel: _Channel, stub: generation_pb2_grpc.GenerationServiceStub) -> None:
        self.address, self.channel, self.stub = address, channel, stub
        self.has_answered = False
        self._failed_s = -_AVOIDED_S

    def note_failure(self) -> None:
        """Note that a call has found the endpoint out of service, or too busy."""
        self._failed_s = time.monotonic()

    @property
    def is_avoided(self) -> bool:
        """True for a few seconds after a failure."""
        return time.monotonic() - self._failed_s < _AVOIDED_S


class Endpoints(Generic[_Channel]):
    """All of them.

    Args:
        connect: opens a channel to one; gRPC dials when the first call is made.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], _Channel],
        make_stub: Callable[[Any], generation_pb2_grpc.GenerationServiceStub],
    ) -> None:
        channels = [connect(address) for address in addresses]
        self._all = [
            Endpoint(address, channel, make_stub(channel)) for address, channel in zip(addresses, channels, strict=True)
        ]
        # Clients that start together should not all begin with the first.
        self._turn = random.randrange(len(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Endpoint[_Channel]]:
        return iter(self._all)

    def is_new(self, error: grpc.RpcError) -> bool:
        """Return True if a failure may mean that no such service exists: no endpoint has ever answered this client.

        One that broke without a word, after it was sent, has found somebody.
        """
        if any(endpoint.has_answered for endpoint in self._all):
            return False
        return was_answered(error) or was_never_sent(error)

    def in_order(self) -> list[Endpoint[_Channel]]:
        """Return the endpoints in the given order, recently failed ones last."""
        return sorted(self._all, key=lambda endpoint: endpoint.is_avoided)

    def route(self) -> Iterator[Endpoint[_Channel]]:
        """Yield endpoints for the attempts of one request, without end."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._all)
        order = [*self._all[turn:], *self._all[:turn]]
        while True:
            yield from sorted(order, key=lambda endpoint: endpoint.is_avoided)
