"""The one way from a public door to the scheduler: check a request, start it, hand on its events, let go of it.

    gRPC  ─┐
    HTTP  ─┼── GenerateRequest ──> Generations ── GenerationRequest ──> scheduler
    ...   ─┘  <── the checked request, then its events ──

Doors differ in what they unpack and pack. What may be asked for, who may ask, and what a cancelled caller frees is the
same for all of them, as it is done here.
"""

import asyncio
import functools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from outrider import tracing
from outrider.coordinator.api.access import Caller
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.validation import MAX_REQUEST_ID_CHARS, RequestValidator
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import GenerationEvent, GenerationRequest, GenerationResult, TokenDelta
from outrider.coordinator.sessions.request_trace import RequestTrace
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.coordinator.workers.peers import Peers
from outrider.errors import OutriderError, Overloaded, Superseded
from outrider.roles.log_output import about
from outrider.v1 import common_pb2, generation_pb2

logger = logging.getLogger(__name__)

# A request of this size is checked, its prompt tokenised, outside the event loop.
LARGE_REQUEST_BYTES = 16 << 10
# Different ones, each of which may take a quarter of a second to compile.
_MOST_STRUCTURED_WAITING = 32
_TAKEN_OVER = "another stream took it over"


class Generations:
    """Requests of all doors over one scheduler.

    Args:
        model: that is served; read at every request, so that it may be completed when a target registers.
        tokenizer: None where the model has none.
        peers: the other coordinators, where a request may run that is asked for here; None: there are none.
        other_names: by which HTTP requests may ask for the model as well.

    Attributes:
        model: as given, like the next two.
        live: by caller and request id, what runs now. By caller: nobody learns of another's requests, or ends them,
            by guessing their ids.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        model: common_pb2.ModelInfo,
        tokenizer: TextTokenizer | None,
        limits: RequestLimits,
        peers: Peers | None = None,
        other_names: Sequence[str] = (),
    ) -> None:
        self._scheduler, self._peers = scheduler, peers or Peers(incarnation=0)
        self._validator = RequestValidator(model, tokenizer, limits)
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.other_names = tuple(other_names)
        self._structured_checks = ThreadPoolExecutor(1, thread_name_prefix="structured")
        # By what is asked for, requests that wait for it: an HTTP request of many prompts asks the same for each.
        self._structured_waiting = Counter[bytes]()
        self.live: dict[tuple[str, str], Generation] = {}
        self.on_refusal: Callable[[OutriderError], None] = lambda error: None
        """Hears of every request that ends before it has begun."""

    def with_own_name(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a request's JSON with another name of the model replaced by its own."""
        return content | {"model": self.model.name} if content.get("model") in self.other_names else content

    def check_room(self) -> None:
        """Look for room for one more request; a door that prepares much asks before.

        Raises:
            Overloaded: there is none.
        """
        try:
            self._scheduler.check_room()
        except OutriderError as error:
            self.on_refusal(error)
            raise

    async def stream(
        self,
        request: generation_pb2.GenerateRequest,
        caller: Caller,
        *,
        connection: str = "",
        queued_as: str = "",
        traceparent: str = "",
        is_new: bool = False,
    ) -> AsyncGenerator[GenerationRequest | GenerationEvent, None]:
        """The request with every default filled in, then its events; the last one is the GenerationResult.

        Closing the iterator (`contextlib.aclosing`) ends the generation and frees all that it holds.

        Args:
            connection: that it came by: where nobody is asked for a name, connections take turns in the queue.
            queued_as: name of the entry in the queue that it shares with other prompts of one request.
            traceparent: of the caller's span, where it traces.
            is_new: its id was made up by the door: it runs nowhere else.

        Raises:
            InvalidRequest: names every field that is wrong.
            Overloaded: no room, or a limit of the caller is reached.
            WorkerUnavailable: there is no target, or none any more.
            Superseded: another stream took it over, or it was aborted.
        """
        request_id = request.request_id or uuid.uuid4().hex
        told_id = _told(request_id)
        spans = None
        if tracing.active is not None:
            spans = RequestTrace(tracing.active, told_id, parent=traceparent)
        has_begun = False
        try:
            # First of all: under overload, time spent on the tokens of prompts is taken from those that run.
            self._scheduler.check_room(entry=queued_as)
            with caller.admitted(request_id, choices=request.sampling_params.n or 1):
                key = (caller.name, request_id)
                seed_elsewhere = None if is_new else await self._seed_elsewhere(request, key)
                checked, text_streams = await self._check(request, key, seed_elsewhere)
                checked = replace(
                    checked, caller=caller.name, client=caller.name or connection, queued_as=queued_as, spans=spans
                )
                generation = self._scheduler.submit(checked, text_streams)
                has_begun = True
                logger.debug("request %s begins", request_id, extra=about(request_id=request_id))
                # Only now: a request that cannot be taken over is better off with its old stream.
                self.end(key, _TAKEN_OVER)
                self.live[key] = generation
                try:
                    if seed_elsewhere is not None:
                        await self._peers.end(caller.name, [request_id], _TAKEN_OVER)
                    yield checked
                    begun: set[int] = set()
                    async for event in generation:
                        if isinstance(event, TokenDelta):
                            caller.note_output(len(event.token_ids))
                            if event.index not in begun:
                                begun.add(event.index)
                                yield replace(event, weights=generation.weights)
                                continue
                        elif isinstance(event, GenerationResult):
                            yield replace(event, weights=generation.weights)
                            continue
                        yield event
                finally:
                    # Reached also when the client cancels or disconnects: the handler is then cancelled or closed.
                    generation.cancel()
                    logger.debug("request %s has ended", request_id, extra=about(request_id=request_id))
                    if self.live.get(key) is generation:
                        del self.live[key]
        except OutriderError as error:
            if not has_begun:
                self.on_refusal(error)
                if spans is not None:
                    spans.refuse(error)
            said = "ends" if has_begun else "is refused"
            ids = about(request_id=told_id)
            logger.info("request %s %s with %s: %s", told_id, said, type(error).__name__, error, extra=ids)
            raise

    async def check(self, request: generation_pb2.GenerateRequest) -> GenerationRequest:
        """Return a request with every default filled in, without running it.

        Raises:
            InvalidRequest: names every field that is wrong.
            Overloaded: too many others wait to be checked.
        """
        try:
            return (await self._check(request, ("", request.request_id), None))[0]
        except OutriderError as error:
            self.on_refusal(error)
            raise

    async def _seed_elsewhere(self, request: generation_pb2.GenerateRequest, key: tuple[str, str]) -> int | None:
        """Return the seed of a request to be taken over from another coordinator; None if none has it."""
        if 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARS and key not in self.live:
            return await self._peers.find(key)
        return None

    async def _check(
        self, request: generation_pb2.GenerateRequest, key: tuple[str, str], seed_elsewhere: int | None
    ) -> tuple[GenerationRequest, list[TextStream]]:
        request_id = key[1]
        seed = self.seed_of(key) if seed_elsewhere is None else seed_elsewhere
        if request.sampling_params.HasField("structured_outputs"):
            return await self._check_structured(request, request_id, seed)
        if request.ByteSize() < LARGE_REQUEST_BYTES:
            return self._validator.check(request, request_id=request_id, known_seed=seed)
        return await asyncio.to_thread(self._validator.check, request, request_id=request_id, known_seed=seed)

    async def _check_structured(
        self, request: generation_pb2.GenerateRequest, request_id: str, seed: int | None
    ) -> tuple[GenerationRequest, list[TextStream]]:
        """In a thread of its own: grammars that take long to compile hold up nobody else's prompts."""
        asked, waiting = request.sampling_params.structured_outputs.SerializeToString(), self._structured_waiting
        if asked not in waiting and len(waiting) >= _MOST_STRUCTURED_WAITING:
            raise Overloaded(f"{len(waiting)} structured_outputs wait to be compiled", retry_after_s=1.0)
        waiting[asked] += 1
        try:
            check = functools.partial(self._validator.check, request, request_id=request_id, known_seed=seed)
            return await asyncio.get_running_loop().run_in_executor(self._structured_checks, check)
        finally:
            waiting[asked] -= 1
            if not waiting[asked]:
                del waiting[asked]

    def seed_of(self, key: tuple[str, str]) -> int | None:
        """Return the seed of a live request by caller and id; None if there is none."""
        live = self.live.get(key)
        return None if live is None else live.request.sampling.seed

    async def abort(self, caller: Caller, request_ids: Iterable[str]) -> list[str]:
        """End a caller's live requests, at whichever coordinator they run; return the ids of those that were live."""
        asked, reason = list(dict.fromkeys(request_ids)), "it was aborted"
        ended = {request_id for request_id in asked if self.end((caller.name, request_id), reason)}
        others = [request_id for request_id in asked if request_id not in ended]
        if others:
            ended |= await self._peers.abort(caller.name, others, reason)
        return [request_id for request_id in asked if request_id in ended]

    def end(self, key: tuple[str, str], reason: str) -> bool:
        """End a live request here, by caller and id; return False if there is none."""
        live = self.live.pop(key, None)
        if live is not None:
            live.abort(Superseded(f"request {key[1]} ended: {reason}"))
        return live is not None


def _told(request_id: str) -> str:
    """Escape and shorten a request id for logs and traces."""
    return ascii(request_id[:MAX_REQUEST_ID_CHARS])[1:-1]
