"""The other coordinators of a service: a request may be aborted, or taken over, by way of any of them.

Which connection leads to which coordinator behind one address nobody knows beforehand. So one that is asked about a
request that does not run here asks the others. They are few, and what is asked is small: a request that names its id
costs each of them one message of some bytes, and waits for the slowest of those that answer.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio

from outrider import request_decoding, rpc
from outrider.addresses import AddressFollower, Resolve
from outrider.coordinator.api.field_checks import abort_unless_known
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import peer_pb2, peer_pb2_grpc

if TYPE_CHECKING:
    from outrider.coordinator.api.generations import Generations

logger = logging.getLogger(__name__)

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"]
# A peer that is frozen holds a request up for this long, and then nobody for a while.
_ANSWER_TIMEOUT_S = 0.5
_AVOIDED_S = 5.0
# No stream waits for an abort, and one that is lost on a busy peer leaves a request running that nobody wants.
_ABORT_TIMEOUT_S = 5.0
_SILENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

Key = tuple[str, str]
"""Caller and request id."""


class _Peer:
    """A coordinator of the list."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        self.address = address
        self.channel = rpc.open_channel(address, tls=tls, peer=None if tls is None else Role.COORDINATOR)
        self.stub = peer_pb2_grpc.PeerServiceStub(self.channel)
        self._failed_s = -_AVOIDED_S

    @property
    def is_avoided(self) -> bool:
        """True for a moment after a call without an answer."""
        return time.monotonic() - self._failed_s < _AVOIDED_S

    async def close(self) -> None:
        """End the connection."""
        await self.channel.close()

    async def ask(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Call the peer and return its answer; None without one."""
        try:
            return await getattr(self.stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            # Otherwise it has answered, if only that it was asked for too much.
            if error.code() in _SILENT:
                self._failed_s = time.monotonic()
            logger.warning("the coordinator at %s has no answer: %s", self.address, error.details())
            return None
        except asyncio.CancelledError:
            # Its connection was closed, as it is on the list no more; unless whoever asks has gone.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None


class Peers:
    """Asks the other coordinators.

    Args:
        incarnation: of this coordinator, which may stand in the list itself, by whatever name.
        resolve: gives the list, asked every second; None: there are no others.
    """

    def __init__(self, *, incarnation: int, resolve: Resolve | None = None, tls: TlsConfig | None = None) -> None:
        self._incarnation, self._resolve, self._own_address = incarnation, resolve, ""
        self._followed = AddressFollower(self._others, join=lambda address: _Peer(address, tls), leave=_Peer.close)

    def start(self, own_address: str = "") -> None:
        """Begin to follow the list; whoever stands there as `own_address` is not asked."""
        if self._resolve is not None:
            self._own_address = own_address
            self._followed.start()

    async def close(self) -> None:
        """End all connections."""
        await self._followed.close()

    async def find(self, key: Key) -> int | None:
        """The seed of a request that runs elsewhere; None where it runs nowhere."""
        request = peer_pb2.FindRequest(incarnation=self._incarnation, caller=key[0], request_id=key[1])
        answers = await self._ask_all("Find", request)
        return next((answer.seed for answer in answers if answer.is_live), None)

    async def end(self, caller: str, request_ids: Sequence[str], reason: str) -> set[str]:
        """End requests wherever else they run; return the ids that were live."""
        return _ended(await self._ask_all("End", self._end_request(caller, request_ids, reason)))

    async def abort(self, caller: str, request_ids: Sequence[str], reason: str) -> set[str]:
        """Abort requests at all peers; unlike `end`, asks those that failed a moment ago as well."""
        request = self._end_request(caller, request_ids, reason)
        return _ended(await _ask("End", request, list(self._followed.members.values()), timeout_s=_ABORT_TIMEOUT_S))

    def _end_request(self, caller: str, request_ids: Sequence[str], reason: str) -> peer_pb2.EndRequest:
        return peer_pb2.EndRequest(incarnation=self._incarnation, caller=caller, request_ids=request_ids, reason=reason)

    async def _ask_all(self, method: str, request: Any) -> list[Any]:
        peers = [peer for peer in self._followed.members.values() if not peer.is_avoided]
        return await _ask(method, request, peers, timeout_s=_ANSWER_TIMEOUT_S)

    async def _others(self) -> Sequence[str]:
        assert self._resolve is not None
        return [address for address in await self._resolve() if address != self._own_address]


async def _ask(method: str, request: Any, peers: Sequence[_Peer], *, timeout_s: float) -> list[Any]:
    """The answers of those that have one."""
    answers = await asyncio.gather(*(peer.ask(method, request, timeout_s=timeout_s) for peer in peers))
    return [answer for answer in answers if answer is not None]


def _ended(answers: Sequence[peer_pb2.EndResponse]) -> set[str]:
    return {request_id for answer in answers for request_id in answer.request_ids}


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """Answers the other coordinators.

    Args:
        incarnation: of this coordinator; what it asks itself is answered with nothing.
    """

    def __init__(self, live: "Generations", *, incarnation: int) -> None:
        self._live, self._incarnation = live, incarnation

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        request_decoding.add_service(self, SERVICE, server)

    async def Find(self, request: peer_pb2.FindRequest, context: Any) -> peer_pb2.FindResponse:  # noqa: N802
        """Return whether a request runs here."""
        await abort_unless_known(request, context)
        seed = None
        if request.incarnation != self._incarnation:
            seed = self._live.seed_of((request.caller, request.request_id))
        return peer_pb2.FindResponse(is_live=seed is not None, seed=seed)

    async def End(self, request: peer_pb2.EndRequest, context: Any) -> peer_pb2.EndResponse:  # noqa: N802
        """End requests that run here."""
        await abort_unless_known(request, context)
        if request.incarnation == self._incarnation:
            return peer_pb2.EndResponse()
        ended = [own for own in request.request_ids if self._live.end((request.caller, own), request.reason)]
        return peer_pb2.EndResponse(request_ids=ended)
