"""One choice of one request while it is generated, and the stream of events of the whole request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from outrider.coordinator import clock
from outrider.coordinator.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    Growth,
    GrowthArrival,
    RoundRecord,
    SessionOpening,
    SessionVerdict,
    SpeculationCounts,
    SpeculationMode,
    TokenDelta,
    TokenLogprobs,
    VerifyResult,
)
from outrider.coordinator.mirror import MirrorTree
from outrider.coordinator.text_stream import TextStream
from outrider.errors import OutriderError
from outrider.sampling import VerificationRule
from outrider.tree import Node, parent_numbers


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a session has in flight: the nodes sent, in order, and when."""

    nodes: Sequence[Node]
    submitted_ns: int
    waited_ns: int


class Session:
    """A choice's committed tokens, its mirror and its place at the workers.

    The coordinator owns the truth: everything a worker needs to take the session up is here.
    """

    def __init__(self, session_id: int, generation: "Generation", index: int, text_stream: TextStream) -> None:
        request = generation.request
        self.session_id = session_id
        self.generation = generation
        self.index = index
        self.request = request
        self.sampling = replace(request.sampling, choice_index=index)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.prompt_length = len(self.token_ids)
        self.text_stream = text_stream
        self.text_bytes = 0
        self.result: ChoiceResult | None = None
        self.verify_steps = self.drafted_tokens = self.accepted_tokens = 0
        self.cached_tokens: int | None = None
        """Of the prompt, what the first target had; None before it answered."""
        self.epoch = 0
        self.target_id: str | None = None
        self.target_epoch = 0
        self.draft_epochs: dict[str, int] = {}
        self.refused_by: set[str] = set()
        """Draft workers that gave this session up."""
        self.submission: Submission | None = None
        self.arrivals: list[GrowthArrival] = []
        self.committed_ns = 0
        """When tokens were last committed, or the session was placed."""
        self.rests_until_ns = 0
        """A full target turned it away: not to be submitted before."""
        self.unanswered_commits = 0
        """Commits since the draft last showed that it knows all."""
        self._take_received(request.received.get(index, ()))
        self.mirror = MirrorTree(self.token_ids, is_chain=self.sampling.rule is VerificationRule.REJECTION)

    def _take_received(self, token_ids: Sequence[int]) -> None:
        """A resumed choice goes on after what the client has got; its text has been delivered."""
        if token_ids:
            text, _ = self._extend(token_ids)
            self.text_bytes += len(text.encode())

    @property
    def mode(self) -> SpeculationMode:
        """How this session speculates."""
        return self.request.mode

    @property
    def output_length(self) -> int:
        """Output tokens committed."""
        return len(self.token_ids) - self.prompt_length

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.result is not None or self.generation.is_closed

    def opening(self, *, max_live_nodes: int) -> SessionOpening:
        """Opens this session at a worker under the next epoch."""
        self.epoch += 1
        return SessionOpening(
            session_id=self.session_id,
            epoch=self.epoch,
            prompt=self.token_ids[: self.prompt_length],
            output=self.token_ids[self.prompt_length :],
            sampling=self.sampling,
            mode=self.mode,
            max_live_nodes=max_live_nodes,
            max_depth=self.request.max_depth,
            sync_nodes=self.request.max_nodes,
        )

    def take_growth(self, worker_id: str, growth: Growth) -> int:
        """Grafts growth; returns how many of its nodes were dropped."""
        if self.draft_epochs.get(worker_id) != growth.epoch:
            return len(growth.node_ids)
        grafted = self.mirror.graft(worker_id, growth)
        if self.request.trace:
            arrival = GrowthArrival(
                worker_id=worker_id,
                arrived_ns=clock.now_ns(),
                as_of=growth.as_of,
                nodes=len(growth.node_ids),
                grafted=grafted,
                during_verify=self.submission is not None,
            )
            self.arrivals.append(arrival)
        return len(growth.node_ids) - grafted

    @property
    def may_speculate(self) -> bool:
        """Whether a tree could save this session a step."""
        return self.mode is not SpeculationMode.OFF and self.sampling.max_new_tokens - self.output_length > 1

    def candidates(self, max_tree_nodes: int) -> list[Node]:
        """The best nodes to submit, in falling order of path value; nodes past the last output token are left out."""
        room = self.sampling.max_new_tokens - self.output_length - 1
        depth = min(self.request.max_depth, room)
        if depth < 1 or self.mode is SpeculationMode.OFF:
            return []
        return self.mirror.tree.best(min(self.request.max_nodes, max_tree_nodes), max_depth=depth)

    def commit(self, verdict: SessionVerdict, result: VerifyResult) -> list[int]:
        """Applies what the target accepted; returns the committed tokens (cut where a stop string ends the text)."""
        submission, self.submission = self.submission, None
        assert submission is not None
        self.committed_ns = clock.now_ns()
        token_ids = list(verdict.token_ids)
        offset, text_offset = self.output_length, self.text_bytes
        text, kept = self._extend(token_ids)
        token_ids = token_ids[:kept]
        if self.cached_tokens is None:
            self.cached_tokens = verdict.cached_tokens
        self.verify_steps += 1
        self.drafted_tokens += len(submission.nodes)
        self.accepted_tokens += min(len(verdict.accepted_nodes), kept)
        if self.mode is SpeculationMode.SYNC:
            self.mirror.commit(token_ids)
            self.mirror.clear()
        else:
            self.mirror.commit(token_ids)
        self.text_bytes += len(text.encode())
        self.generation.emit(
            TokenDelta(
                index=self.index,
                token_ids=token_ids,
                text=text,
                offset=offset,
                text_offset=text_offset,
                logprobs=_head(verdict.logprobs, kept),
            )
        )
        if self.request.trace:
            self.generation.emit(self._round_record(submission, verdict, result, kept=kept))
        return token_ids

    def _extend(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Appends tokens up to the one that ends the choice: (text to deliver, tokens kept)."""
        stop_ids = self.sampling.stop_token_ids
        ends_with_stop_id = (
            token_ids[-1] in stop_ids and self.output_length + len(token_ids) > self.sampling.min_new_tokens
        )
        # The stop token itself is counted, but has no text.
        visible = token_ids[:-1] if ends_with_stop_id else token_ids
        streamed = self.text_stream.push(visible)
        kept = streamed.consumed if streamed.stop_string is not None else len(token_ids)
        self.token_ids.extend(token_ids[:kept])
        finish = None
        if streamed.stop_string is not None:
            finish = FinishReason.STOP, None, streamed.stop_string
        elif ends_with_stop_id:
            finish = FinishReason.STOP, token_ids[-1], None
        elif self.output_length >= self.sampling.max_new_tokens:
            finish = FinishReason.LENGTH, None, None
        text = streamed.text
        if finish is not None:
            reason, stop_token_id, stop_string = finish
            text += "" if stop_string is not None else self.text_stream.flush()
            self.result = ChoiceResult(
                index=self.index,
                finish_reason=reason,
                completion_tokens=self.output_length,
                stop_token_id=stop_token_id,
                stop_string=stop_string,
            )
        return text, kept

    def _round_record(
        self, submission: Submission, verdict: SessionVerdict, result: VerifyResult, *, kept: int
    ) -> RoundRecord:
        arrivals, self.arrivals = self.arrivals, []
        return RoundRecord(
            index=self.index,
            step=result.step,
            length=len(self.token_ids) - kept,
            submitted_ns=submission.submitted_ns,
            result_ns=clock.now_ns(),
            waited_ns=submission.waited_ns,
            step_ns=result.step_ns,
            forward_ns=result.forward_ns,
            node_tokens=[node.token for node in submission.nodes],
            node_parents=parent_numbers(submission.nodes),
            node_values=[node.path_value for node in submission.nodes],
            accepted_nodes=verdict.accepted_nodes[:kept],
            emitted_token_ids=verdict.token_ids[:kept],
            growth=arrivals,
        )


def _head(logprobs: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    return None if logprobs is None else logprobs.head(count)


class Generation:
    """The events of one request, all its choices together; iterate, and always `cancel` in the end.

    Args:
        max_buffered_events: a reader this far behind is stalled, and its sessions rest until it reads on.
        release: called once when the request ends in whatever way, with the generation.
    """

    def __init__(
        self, request: GenerationRequest, *, max_buffered_events: int, release: Callable[["Generation"], None]
    ) -> None:
        self.request = request
        self._max_buffered_events = max_buffered_events
        self.sessions: list[Session] = []
        self.is_closed = False
        self._release = release
        self._events: deque[GenerationEvent] = deque()
        self._wake = asyncio.Event()
        self._error: OutriderError | None = None
        self._arrived_ns = clock.now_ns()
        self._admitted_ns = self._first_token_ns = 0
        self.on_resume: Callable[[], None] | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the reader is so far behind that generating more would only fill memory."""
        return len(self._events) >= self._max_buffered_events

    def note_admitted(self) -> None:
        """The request leaves the queue."""
        self._admitted_ns = self._admitted_ns or clock.now_ns()

    def emit(self, event: GenerationEvent) -> None:
        """Adds an event for the reader."""
        if self.is_closed:
            return
        if not self._first_token_ns and isinstance(event, TokenDelta):
            self._first_token_ns = clock.now_ns()
        self._events.append(event)
        self._wake.set()

    def finish_if_done(self) -> None:
        """Emits the result once every choice has ended."""
        results = [session.result for session in self.sessions]
        if self.is_closed or any(result is None for result in results):
            return
        now = clock.now_ns()
        first = self._first_token_ns or now
        self.emit(
            GenerationResult(
                choices=[result for result in results if result is not None],
                speculation=SpeculationCounts(
                    verify_steps=sum(session.verify_steps for session in self.sessions),
                    drafted_tokens=sum(session.drafted_tokens for session in self.sessions),
                    accepted_tokens=sum(session.accepted_tokens for session in self.sessions),
                ),
                queue_s=((self._admitted_ns or now) - self._arrived_ns) / 1e9,
                ttft_s=(first - self._arrived_ns) / 1e9,
                total_s=(now - self._arrived_ns) / 1e9,
                cached_tokens=min((session.cached_tokens or 0 for session in self.sessions), default=0),
            )
        )

    def abort(self, error: OutriderError) -> None:
        """Ends the stream with an error; what was delivered stays valid."""
        if self._error is None and not self.is_closed:
            self._error = error
            self._wake.set()
            self.cancel()

    def cancel(self) -> None:
        """Stops the work of this request and frees what it holds; harmless when it has ended."""
        if not self.is_closed:
            self.is_closed = True
            self._wake.set()
            self._release(self)

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self.cancel()

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self._read()

    async def _read(self) -> AsyncIterator[GenerationEvent]:
        while True:
            while self._events:
                was_stalled = self.is_stalled
                event = self._events.popleft()
                if was_stalled and not self.is_stalled and self.on_resume is not None:
                    self.on_resume()
                yield event
                if isinstance(event, GenerationResult):
                    return
            if self._error is not None:
                raise self._error
            if self.is_closed:
                return
            self._wake.clear()
            await self._wake.wait()
