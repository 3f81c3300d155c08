"""The coordinator's ends of the worker streams: messages to protocol buffers and back."""

from collections.abc import Callable
from enum import IntEnum

from google.protobuf.message import Message

from outrider import tracing
from outrider.coordinator.sessions.messages import GrowthBatch, RoundResults, SessionFault
from outrider.coordinator.workers.answers import check_report, check_results, growth_batch
from outrider.coordinator.workers.worker_link import WorkerLink
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

# Fields of bytes in `RelayedGrowth` and in its distributions.
_NODE_COLUMNS, _DISTRIBUTION_COLUMNS = ("node_ids", "parents", "tokens", "acceptance"), ("token_ids", "weights")


def _check_readable(message: Message | None) -> None:
    # What gRPC gives in place of a message that it could not read.
    if message is None:
        raise ValueError("its bytes are none of this protocol's")


class TargetLink(WorkerLink[target_pb2.RoundCommands]):
    """The stream to one target worker: commands go out, results come in, and neither answers the other."""

    def __init__(
        self,
        address: str,
        *,
        incarnation: int,
        on_results: Callable[[RoundResults], None],
        on_lost: Callable[[str], None],
        vocab_size: int,
        tls: TlsConfig | None = None,
    ) -> None:
        super().__init__(address, tls=tls, role=Role.TARGET, on_lost=on_lost)
        self._incarnation, self._vocab_size, self._on_results = incarnation, vocab_size, on_results
        self._received = 0
        metadata = tracing.stream_metadata("target", address)
        self._start(target_pb2_grpc.TargetServiceStub(self._channel).Verify(metadata=metadata))

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        """Have the worker verify this session from now on."""
        self._commands(_Part.OPENS).opens.append(opening)

    def change_place(self, session_id: int, epoch: int, place: int, change: target_pb2.PlaceChange) -> None:
        """Tell what has become of a draft's place."""
        changes = self._commands(_Part.PLACES).places
        changes.session_ids.append(session_id)
        changes.epochs.append(epoch)
        changes.places.append(place)
        changes.changes.append(change)

    def grow(self, growth: target_pb2.RelayedGrowth) -> None:
        """Hand on what a draft has grown, at once; while a message is being written all that comes joins the next one.

        A message is written in a turn of the event loop of its own. With one for each part, those of several drafts
        came faster than they left.
        """
        _join(self._commands(_Part.GROWTH).growth, growth)
        self._flush()

    def bound(self, session_id: int, epoch: int, allow: int, *, alone: bool) -> None:
        """Say how far a session may go, and whether by itself."""
        bounds = self._commands(_Part.BOUNDS).bounds
        bounds.session_ids.append(session_id)
        bounds.epochs.append(epoch)
        bounds.allow.append(allow)
        bounds.alone.append(alone)

    def close_session(self, session_id: int, epoch: int) -> None:
        """Free a session at the worker."""
        commands = self._commands(_Part.CLOSES)
        commands.close_session_ids.append(session_id)
        commands.close_epochs.append(epoch)

    def _commands(self, part: "_Part") -> target_pb2.RoundCommands:
        """The message that a part is added to: parts of one take effect in their order."""
        if not self._takes(part):
            self._begin()
        return self._outgoing[-1]

    def _takes(self, part: "_Part") -> bool:
        if not self._outgoing:
            return False
        last = self._outgoing[-1]
        later = [last.close_session_ids, last.bounds.session_ids, last.growth.session_ids, last.places.session_ids]
        return not any(later[: len(_Part) - 1 - part])

    def _begin(self) -> None:
        self._outgoing.append(target_pb2.RoundCommands(incarnation=self._incarnation))
        self._outgoing_ready.set()

    async def _read(self) -> None:
        async for response in self._call:
            _check_readable(response)
            check_results(response, vocab_size=self._vocab_size)
            if response.report.step_ns:
                self.step_latency.observe(response.report.step_ns)
            self._received += 1
            self._on_results(RoundResults(response, self._received))


class _Part(IntEnum):
    """Parts of `RoundCommands`, in the order in which they take effect."""

    OPENS = 0
    PLACES = 1
    GROWTH = 2
    BOUNDS = 3
    CLOSES = 4


def _join(growth: target_pb2.RelayedGrowth, following: target_pb2.RelayedGrowth) -> None:
    """Add growth behind other growth, perhaps none."""
    if not growth.session_ids:
        growth.CopyFrom(following)
        return
    for part, other in ((growth, following), (following, growth)):
        # Columns that may be empty.
        nodes = len(part.node_ids) // 4
        if other.sources and not part.sources:
            part.sources.extend([common_pb2.GROWTH_SOURCE_MODEL] * nodes)
        if other.complete and not part.complete:
            part.complete.extend([False] * len(part.session_ids))
        if other.distributions.counts and not part.distributions.counts:
            part.distributions.counts.extend([0] * nodes)
    # Merging messages puts repeated fields behind each other, but not bytes.
    joined = {name: getattr(growth, name) + getattr(following, name) for name in _NODE_COLUMNS}
    drawn = {
        name: getattr(growth.distributions, name) + getattr(following.distributions, name)
        for name in _DISTRIBUTION_COLUMNS
    }
    growth.MergeFrom(following)
    for name, column in joined.items():
        setattr(growth, name, column)
    if growth.HasField("distributions"):
        for name, column in drawn.items():
            setattr(growth.distributions, name, column)


class DraftLink(WorkerLink[draft_pb2.DraftCommands]):
    """The stream to one draft worker. Nothing sent here is ever waited for.

    Growth that no target would take ends the stream: a broken draft costs its own sessions their speed, not their
    requests, which a target would refuse.
    """

    # A step or two of many sessions. What a draft is further ahead of its reader would be stale when it is read, so
    # growth gathers there (`draft_worker.rounds.loop`), and many steps in one message take little more time than one.
    unread_bytes = 8 << 10

    def __init__(
        self,
        address: str,
        *,
        incarnation: int,
        vocab_size: int,
        on_growth: Callable[[GrowthBatch], None],
        on_fault: Callable[[int, int, SessionFault], None],
        on_lost: Callable[[str], None],
        tls: TlsConfig | None = None,
    ) -> None:
        super().__init__(address, tls=tls, role=Role.DRAFT, on_lost=on_lost)
        self._incarnation, self._vocab_size = incarnation, vocab_size
        self._on_growth, self._on_fault = on_growth, on_fault
        metadata = tracing.stream_metadata("draft", address)
        self._start(draft_pb2_grpc.DraftServiceStub(self._channel).Speculate(metadata=metadata))

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        """Ask the worker to grow this session's tree from now on."""
        commands = self._commands()
        if commands.close_session_ids:
            # Within a message openings come first: the room that a close makes would not be there yet.
            commands = self._begin()
        commands.opens.append(opening)

    def commit(self, commits: draft_pb2.CommitBatch) -> None:
        """Tell the worker what was committed, now; what was to be sent before leaves with it."""
        self._commands().commits.MergeFrom(commits)
        self._flush()

    def ask_again(self, session_id: int, epoch: int) -> None:
        """Have the worker send a session's live tree again."""
        commands = self._commands()
        commands.resend_session_ids.append(session_id)
        commands.resend_epochs.append(epoch)

    def close_session(self, session_id: int, epoch: int) -> None:
        """Free a session at the worker."""
        commands = self._commands()
        commands.close_session_ids.append(session_id)
        commands.close_epochs.append(epoch)

    def _commands(self) -> draft_pb2.DraftCommands:
        return self._outgoing[-1] if self._outgoing else self._begin()

    def _begin(self) -> draft_pb2.DraftCommands:
        self._outgoing.append(draft_pb2.DraftCommands(incarnation=self._incarnation))
        self._outgoing_ready.set()
        return self._outgoing[-1]

    async def _read(self) -> None:
        async for message in self._call:
            _check_readable(message)
            check_report(message.report)
            if message.report.step_ns:
                self.step_latency.observe(message.report.step_ns)
            for error in message.errors:
                self._on_fault(error.session_id, error.epoch, SessionFault.of(error))
            if message.session_ids:
                self._on_growth(growth_batch(message, self._vocab_size))
