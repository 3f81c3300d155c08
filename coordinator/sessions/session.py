"""One choice of one request while it is generated."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    FinishReason,
    Outcome,
    RoundResults,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.sessions.text_stream import StreamedText, TextStream
from outrider.coordinator.sessions.totals import SourceTally
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource, sources_to_proto
from outrider.errors import InternalError
from outrider.roles.log_output import about
from outrider.sampling import MODE_NUMBERS, SpeculationMode, VerificationRule
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire import uints_to_bytes

if TYPE_CHECKING:
    from outrider.coordinator.live.tap import SessionTap

logger = logging.getLogger(__name__)

PLACES = 4
"""Drafters that may grow one session's tree."""


class Drafter(NamedTuple):
    """One source of growth at one draft worker."""

    worker_id: str
    source: GrowthSource


class Session:
    """A choice's committed tokens, and its places at the workers.

    Everything a worker needs to take the session up is here.

    Attributes:
        places: what grows its tree, by place at the target.
        draft_epochs: by worker id, under which epoch each knows it.
        asked_again: drafters that have been asked for their trees, and have not sent them.
    """

    def __init__(self, session_id: int, generation: Generation, index: int, text_stream: TextStream) -> None:
        request = generation.request
        self.session_id = session_id
        self.generation = generation
        self.index = index
        self.request = request
        self.mode = request.mode
        self.sampling = replace(request.sampling, choice_index=index)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.prompt_length = len(self.token_ids)
        self.text_stream = text_stream
        self.text_bytes = 0
        self.result: ChoiceResult | None = None
        self.verify_steps = self.drafted_tokens = self.accepted_tokens = 0
        self.sources = SourceTally()
        self.cached_tokens: int | None = None
        """Prompt tokens that the first target had cached; None before it answered."""
        self.epoch = 0
        self.target_id: str | None = None
        self.target_epoch = 0
        self.places: list[Drafter | None] = [None] * PLACES
        self.draft_epochs: dict[str, int] = {}
        self.asked_again: set[Drafter] = set()
        self.refused_by: set[Drafter] = set()
        """Drafters that cannot grow this session, now or later."""
        self.arrivals: list[generation_pb2.GrowthArrival] = []
        self.committed_ns = 0
        """When tokens were last committed; before there are any, when the session was placed."""
        self.is_held = False
        """Its target waits for its client."""
        self.reopenings = 0
        """Number of reopenings since it last emitted tokens."""
        self.without_room_since_ns: int | None = None
        """When its target first had no room for it since then, by the monotonic clock; None while it has room."""
        self.probation = 0
        """Results for which it is to be verified alone, after a worker crashed with it."""
        self.tap: SessionTap | None = None
        """Only while somebody watches its tree."""
        self._take_received(request.received.get(index, ()))
        self._delivered = len(self.token_ids)
        """Tokens of the prompt and of the output that the client has."""
        # Parts of the next event: text (where stop strings are looked for), log probabilities, the last round.
        self._found_text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._record: generation_pb2.Round | None = None
        self.end = self.prompt_length + self.sampling.max_new_tokens
        """Tokens with which it ends at the latest, the prompt's included."""
        self.is_chain = self.sampling.rule is VerificationRule.REJECTION
        """Its drafts are chains of one worker."""

    def join_draft(self, worker_id: str, epoch: int, sources: Sequence[GrowthSource]) -> list[int]:
        """Give each of a draft's sources a place, of which enough are free; return the places."""
        for source in sources:
            self.places[self.places.index(None)] = Drafter(worker_id, source)
        self.draft_epochs[worker_id] = epoch
        return self.places_of(worker_id)

    def leave_draft(self, worker_id: str) -> list[int]:
        """Free the places of a draft, perhaps none; what it has grown stays. Return the places."""
        places = self.places_of(worker_id)
        self.asked_again.difference_update(self.drafters_of(worker_id))
        for place in places:
            self.places[place] = None
        self.draft_epochs.pop(worker_id, None)
        return places

    def places_of(self, worker_id: str) -> list[int]:
        """Return the places of a draft."""
        return [place for place, own in enumerate(self.places) if own is not None and own.worker_id == worker_id]

    def drafters_of(self, worker_id: str) -> list[Drafter]:
        """Return the drafters of a worker that have places, in the order of these."""
        return [own for own in self.places if own is not None and own.worker_id == worker_id]

    def _take_received(self, token_ids: Sequence[int]) -> None:
        """A resumed choice goes on after what the client has got; its text has been delivered."""
        if token_ids:
            text = self._extend(token_ids)
            self.text_bytes += len((self._text_of(token_ids) if text is None else text).encode())

    @property
    def ids(self) -> dict[str, Any]:
        """Ids for a log line."""
        return about(request_id=self.request.request_id, session_id=self.session_id)

    @property
    def output_length(self) -> int:
        """Output tokens committed."""
        return len(self.token_ids) - self.prompt_length

    @property
    def is_finished(self) -> bool:
        """True if nothing more is to be generated."""
        return self.result is not None or self.generation.is_closed

    def opening(
        self,
        *,
        max_live_nodes: int = 0,
        max_depth: int | None = None,
        sync_wait_ms: float = 0.0,
        sources: Collection[GrowthSource] | None = None,
    ) -> common_pb2.SessionOpen:
        """Return the message that opens this session at a worker, under the next epoch."""
        self.epoch += 1
        request = self.request
        sources = request.sources if sources is None else sources
        return common_pb2.SessionOpen(
            session_id=self.session_id,
            epoch=self.epoch,
            prompt=uints_to_bytes(self.token_ids[: self.prompt_length]),
            output=uints_to_bytes(self.token_ids[self.prompt_length :]),
            sampling=self.sampling.to_proto(),
            limits=common_pb2.SpeculationLimits(
                mode=MODE_NUMBERS[self.mode],
                max_live_nodes=max_live_nodes,
                max_depth=request.max_depth if max_depth is None else max_depth,
                max_nodes=request.max_nodes,
                sync_wait_ms=round(sync_wait_ms),
            ),
            traceparent="" if request.spans is None else request.spans.traceparent,
            sources=() if len(sources) == len(ALL_SOURCES) else sources_to_proto(sources),
            weights=self.generation.weights,
        )

    def note_growth(self, worker_id: str, *, as_of: int, nodes: int) -> None:
        """Growth has come, for the trace."""
        if self.request.trace:
            arrived_ns = clock.now_ns()
            self.arrivals.append(
                generation_pb2.GrowthArrival(worker_id=worker_id, arrived_ns=arrived_ns, as_of=as_of, nodes=nodes)
            )

    @property
    def is_watched(self) -> bool:
        """True if somebody traces its request, or watches its tree."""
        return self.tap is not None or self.request.trace

    @property
    def may_speculate(self) -> bool:
        """True if a tree could save this session a step."""
        return self.mode is not SpeculationMode.OFF and self.end - len(self.token_ids) > 1

    def take(self, outcome: Outcome, results: RoundResults, result_ns: int) -> Outcome:
        """Append what the target has committed; `deliver` tells the client.

        Returns:
            The part of it that counts: a stop string may end the choice before the last token.
        """
        if self.is_watched:
            # Each round's tokens stand before its record, and are told by themselves.
            self.deliver()
        if self.sampling.forced_token_ids:
            # Its nodes were the target's own: they say nothing of drafts.
            outcome = outcome._replace(accepted=0, selected=0, sources=())
        before, token_ids = len(self.token_ids), outcome.token_ids
        since_ns, self.committed_ns = self.committed_ns, result_ns
        try:
            text = self._extend(token_ids)
        except InternalError as error:
            text = ""
            self.generation.abort(error)
        if (kept := len(self.token_ids) - before) < len(token_ids):
            accepted = min(outcome.accepted, kept)
            outcome = outcome._replace(
                token_ids=token_ids[:kept], accepted=accepted, sources=outcome.sources[:accepted]
            )
        self.verify_steps += 1
        self.drafted_tokens += outcome.selected
        self.accepted_tokens += outcome.accepted
        self.sources.note_round(outcome)
        if self.cached_tokens is None:
            self.cached_tokens = outcome.cached_tokens
        if self.tap is not None:
            self.tap.note_verdict(outcome, results)
        if (spans := self.request.spans) is not None:
            spans.note_round(self.index, outcome, results, since_ns=since_ns, now_ns=result_ns)
        if self.request.trace:
            self._record = self._round_record(outcome, results, before)
        if text is not None:
            self._found_text.append(text)
        if outcome.logprobs is not None:
            self._logprobs.append(outcome.logprobs)
        self.generation.note_round()
        return outcome

    @property
    def has_news(self) -> bool:
        """True if tokens are committed that the client has not been told of."""
        return self._delivered < len(self.token_ids)

    def deliver(self) -> None:
        """Tell the client of what was committed since the last time, if anything was, as one event."""
        if not self.has_news:
            return
        offset, token_ids = self._delivered - self.prompt_length, self.token_ids[self._delivered :]
        self._delivered = len(self.token_ids)
        try:
            text = "".join(self._found_text) if self.request.stop else self._text_of(token_ids)
        except InternalError as error:
            self.generation.abort(error)
            return
        if self.tap is not None:
            self.tap.note_delivered(text)
        self.generation.emit(
            TokenDelta(
                index=self.index,
                token_ids=token_ids,
                text=text,
                offset=offset,
                text_offset=self.text_bytes,
                logprobs=TokenLogprobs.of(self._logprobs).head(len(token_ids)) if self._logprobs else None,
            )
        )
        self._found_text.clear()
        self._logprobs.clear()
        self.text_bytes += len(text.encode())
        if self._record is not None:
            self.generation.emit(self._record)
            self._record = None

    def _extend(self, token_ids: Sequence[int]) -> str | None:
        """Append tokens up to the one that ends the choice; return their text where finding it took that."""
        sampling = self.sampling
        ends_with_stop_id = (
            token_ids[-1] in sampling.stop_token_ids
            and len(self.token_ids) + len(token_ids) - self.prompt_length > sampling.min_new_tokens
        )
        text = stop_string = None
        kept = token_ids
        if self.request.stop:
            # The stop token itself is counted, but has no text.
            streamed = self._push(token_ids[:-1] if ends_with_stop_id else token_ids)
            text, stop_string = streamed.text, streamed.stop_string
            kept = token_ids if stop_string is None else token_ids[: streamed.consumed]
        self.token_ids.extend(kept)
        if stop_string is not None:
            self._finish(FinishReason.STOP, stop_string=stop_string)
        elif ends_with_stop_id:
            self._finish(FinishReason.STOP, stop_token_id=token_ids[-1])
        elif len(self.token_ids) - self.prompt_length >= sampling.max_new_tokens:
            self._finish(FinishReason.LENGTH)
        if text is not None and self.result is not None and stop_string is None:
            text += self._flush()
        return text

    def _finish(
        self, reason: FinishReason, *, stop_token_id: int | None = None, stop_string: str | None = None
    ) -> None:
        self.result = ChoiceResult(
            index=self.index,
            finish_reason=reason,
            completion_tokens=self.output_length,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """The text of the last tokens, to the end of the choice if that is reached."""
        if self.result is None:
            return self._push(token_ids).text
        visible = token_ids if self.result.stop_token_id is None else token_ids[:-1]
        return self._push(visible).text + self._flush()

    def _push(self, token_ids: Sequence[int]) -> StreamedText:
        """Push tokens to the text stream. An error ends this request only."""
        try:
            return self.text_stream.push(token_ids)
        except Exception as error:
            raise self._without_text(error) from error

    def _flush(self) -> str:
        try:
            return self.text_stream.flush()
        except Exception as error:
            raise self._without_text(error) from error

    def _without_text(self, error: Exception) -> InternalError:
        request_id = self.request.request_id
        logger.exception("request %s: its tokens cannot be turned into text", request_id, extra=self.ids)
        return InternalError(
            f"the tokens of request {request_id} cannot be turned into text: {type(error).__name__}: {error}"
        )

    def _round_record(self, outcome: Outcome, results: RoundResults, before: int) -> generation_pb2.Round:
        growth, self.arrivals = self.arrivals, []
        return generation_pb2.Round(
            index=self.index,
            step=results.number,
            length=before,
            result_ns=self.committed_ns,
            step_ns=results.report.step_ns,
            forward_ns=results.report.forward_ns,
            selected=outcome.selected,
            accepted=outcome.accepted,
            emitted_token_ids=outcome.token_ids,
            growth=growth,
        )
