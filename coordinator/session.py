"""One choice of one request while it is generated."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.coordinator import clock
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.live.tap import SessionTap
from outrider.coordinator.messages import (
    ChoiceResult,
    FinishReason,
    GrowthArrival,
    RoundRecord,
    SessionOpening,
    SessionVerdict,
    SpeculationMode,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.mirror import Mirror, TreeMirror
from outrider.coordinator.source_mix import Count, Kind
from outrider.coordinator.text_stream import StreamedText, TextStream
from outrider.coordinator.trees import Tree
from outrider.errors import InternalError
from outrider.growth_source import GrowthSource
from outrider.log_output import about
from outrider.sampling import VerificationRule

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Flight, Step

logger = logging.getLogger(__name__)


class Submission(NamedTuple):
    """What a session has in flight, and since when."""

    tree: Tree
    submitted_ns: int
    waited_ns: int


class Undelivered(NamedTuple):
    """Tokens that are committed, and that the client has not been told of."""

    token_ids: Sequence[int]
    text: str | None
    """None: still to be made."""
    logprobs: TokenLogprobs | None
    accepted_nodes: Sequence[int]
    step: "Step"
    growth: Sequence[GrowthArrival] = ()


class Session:
    """A choice's committed tokens, its mirror and its place at the workers.

    The coordinator owns the truth: everything a worker needs to take the session up is here.
    """

    # Every round looks at every session: as a dictionary of that many attributes each would be all over the memory.
    __slots__ = (
        "accepted_tokens",
        "arrivals",
        "cached_tokens",
        "draft_epochs",
        "drafted_tokens",
        "end",
        "epoch",
        "flight",
        "generation",
        "grafted_nodes",
        "index",
        "is_plain",
        "lets_target_draft",
        "mirror",
        "mode",
        "probation",
        "prompt_length",
        "refused_by",
        "request",
        "rests_until_ns",
        "result",
        "row",
        "rows",
        "sampling",
        "session_id",
        "stop_ids",
        "tap",
        "target_epoch",
        "target_id",
        "text_bytes",
        "text_stream",
        "token_ids",
        "undelivered",
        "verify_steps",
    )

    def __init__(
        self, session_id: int, generation: Generation, index: int, text_stream: TextStream, forest: Forest
    ) -> None:
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
        self.verify_steps = self.drafted_tokens = self.accepted_tokens = self.grafted_nodes = 0
        self.cached_tokens: int | None = None
        """Of the prompt, what the first target had; None before it answered."""
        self.epoch = 0
        self.target_id: str | None = None
        self.target_epoch = 0
        self.draft_epochs: dict[str, int] = {}
        self.refused_by: set[str] = set()
        """Draft workers that gave this session up."""
        self.flight: Flight | None = None
        """The batch that it is in."""
        self.arrivals: list[GrowthArrival] = []
        self.rests_until_ns = 0
        """A full target turned it away: not to be submitted before."""
        self.probation = 0
        """Results for which it is to be verified alone, after a worker crashed with it."""
        self.tap: SessionTap | None = None
        """Only while somebody watches its tree."""
        self.undelivered: Undelivered | None = None
        self._take_received(request.received.get(index, ()))
        self.mirror: Mirror
        self.rows = forest.rows
        if self.sampling.rule is VerificationRule.REJECTION:
            self.mirror = ChainMirror(self.token_ids)
            self.row = forest.rows.add(len(self.token_ids))
        else:
            self.mirror = TreeMirror(forest, self.token_ids, self._kind)
            self.row = self.mirror.row
        self.stop_ids = frozenset(self.sampling.stop_token_ids)
        self.end = self.prompt_length + self.sampling.max_new_tokens
        """Tokens with which it ends at the latest, the prompt's included."""
        self.is_plain = not request.stop and request.spans is None and not request.trace
        """Nothing is asked of its tokens but where they end."""
        self.lets_target_draft = (
            self.mode is SpeculationMode.ASYNC
            and GrowthSource.EAGLE in request.sources
            and self.sampling.rule is VerificationRule.COUPLED
            and not self.sampling.is_synthetic
            and not self.sampling.grammar
        )
        """Whether a target may draft for it in the graph that verifies."""

    def close(self) -> None:
        """It has ended: its tree goes."""
        self.mirror.close()
        if self.mirror.is_chain:
            self.rows.remove(self.row)

    def join_draft(self, worker_id: str, number: int, epoch: int) -> None:
        """A draft grows its tree from now on."""
        self.rows.draft[self.row] = -1 if self.draft_epochs else number
        self.rows.draft_epoch[self.row] = epoch
        self.draft_epochs[worker_id] = epoch

    def leave_draft(self, worker_id: str) -> int | None:
        """A draft does so no more, what it has grown stays; its epoch there, if it did."""
        epoch = self.draft_epochs.pop(worker_id, None)
        self.rows.draft[self.row] = -1 if self.draft_epochs else 0
        self.mirror.forget_worker(worker_id)
        return epoch

    @property
    def committed_ns(self) -> int:
        """When tokens were last committed, or the session was placed."""
        return int(self.rows.committed_ns[self.row])

    @committed_ns.setter
    def committed_ns(self, at_ns: int) -> None:
        self.rows.committed_ns[self.row] = at_ns

    @property
    def unanswered_commits(self) -> int:
        """Commits since the draft last showed that it knows all."""
        return int(self.rows.unanswered[self.row])

    @property
    def submission(self) -> Submission | None:
        """What it has in flight."""
        flight = self.flight
        if flight is None:
            return None
        return Submission(flight.tree_of(self.session_id), flight.begun_ns, flight.waited_ns)

    @property
    def _kind(self) -> Kind:
        """Of sessions of which a source's estimates are off alike."""
        if not self.sampling.temperature:
            return Kind.GREEDY
        return Kind.COUPLED if self.sampling.rule is VerificationRule.COUPLED else Kind.OTHER

    def _take_received(self, token_ids: Sequence[int]) -> None:
        """A resumed choice goes on after what the client has got; its text has been delivered."""
        if token_ids:
            text = self._extend(token_ids)
            self.text_bytes += len((self._text_of(token_ids) if text is None else text).encode())

    @property
    def ids(self) -> dict[str, Any]:
        """What it is called by clients and by workers, for a line of the log."""
        return about(request_id=self.request.request_id, session_id=self.session_id)

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
            traceparent="" if self.request.spans is None else self.request.spans.traceparent,
            sources=self.request.sources,
            weights=self.generation.weights,
        )

    def note_growth(self, worker_id: str, *, as_of: int, nodes: int, grafted: int) -> None:
        """Growth has come, for the trace."""
        if self.request.trace:
            arrival = GrowthArrival(
                worker_id=worker_id,
                arrived_ns=clock.now_ns(),
                as_of=as_of,
                nodes=nodes,
                grafted=grafted,
                during_verify=self.flight is not None,
            )
            self.arrivals.append(arrival)

    @property
    def is_target_drafted(self) -> bool:
        """Whether a target has drafted for it."""
        return bool(self.mirror.source_counts[Count.DRAFTED, GrowthSource.EAGLE])

    @property
    def may_speculate(self) -> bool:
        """Whether a tree could save this session a step."""
        return self.mode is not SpeculationMode.OFF and self.end - len(self.token_ids) > 1

    def take_with_care(self, verdict: SessionVerdict, step: "Step") -> Sequence[int]:
        """Appends what the target accepted where this may be the last of it, or somebody looks on.

        `taking.py` does so for all others at once; `deliver` tells the client, when the next batch has left.

        Returns:
            The tokens that are kept.
        """
        before, token_ids = len(self.token_ids), verdict.token_ids
        self.committed_ns = step.result_ns
        try:
            text = self._extend(token_ids)
        except InternalError as error:
            text = ""
            self.generation.abort(error)
        token_ids = token_ids[: len(self.token_ids) - before]
        submission = self.submission
        assert submission is not None
        if self.tap is not None:
            self.tap.note_verdict(submission, verdict, step.result, token_ids)
        if (spans := self.request.spans) is not None:
            nodes, accepted, held_ns = len(submission.tree.tokens), len(verdict.accepted_nodes), submission.waited_ns
            since = {"submitted_ns": submission.submitted_ns, "now_ns": step.result_ns, "held_ns": held_ns}
            spans.note_round(self.index, step.result, nodes=nodes, accepted=accepted, tokens=len(token_ids), **since)
        growth, self.arrivals = self.arrivals, []
        self.undelivered = Undelivered(token_ids, text, verdict.logprobs, verdict.accepted_nodes, step, growth)
        return token_ids

    def deliver(self) -> None:
        """Tells the client of what was committed, if anything was since the last time."""
        news, self.undelivered = self.undelivered, None
        if news is None:
            return
        try:
            text = self._text_of(news.token_ids) if news.text is None else news.text
        except InternalError as error:
            self.generation.abort(error)
            return
        if self.tap is not None:
            self.tap.note_delivered(text)
        logprobs = news.logprobs
        self.generation.emit(
            TokenDelta(
                index=self.index,
                token_ids=news.token_ids,
                text=text,
                offset=self.output_length - len(news.token_ids),
                text_offset=self.text_bytes,
                logprobs=None if logprobs is None else logprobs.head(len(news.token_ids)),
            )
        )
        self.text_bytes += len(text.encode())
        if self.request.trace:
            self.generation.emit(self._round_record(news))

    def _extend(self, token_ids: Sequence[int]) -> str | None:
        """Appends tokens up to the one that ends the choice; returns their text where finding it took that."""
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
        """What the text stream makes of tokens. Its defects end this request, not the loop that serves all."""
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

    def _round_record(self, news: Undelivered) -> RoundRecord:
        flight, result, kept = news.step.flight, news.step.result, len(news.token_ids)
        tree = flight.tree_of(self.session_id)
        return RoundRecord(
            index=self.index,
            step=result.step,
            length=len(self.token_ids) - kept,
            submitted_ns=flight.begun_ns,
            result_ns=news.step.result_ns,
            waited_ns=flight.waited_ns,
            step_ns=result.step_ns,
            forward_ns=result.forward_ns,
            node_tokens=tree.tokens,
            node_parents=tree.parents,
            node_values=tree.values,
            accepted_nodes=news.accepted_nodes[:kept],
            emitted_token_ids=news.token_ids,
            growth=news.growth,
            held_ns=flight.held_ns,
            ahead_ns=None if flight.successor is None else result.ahead_ns,
        )
