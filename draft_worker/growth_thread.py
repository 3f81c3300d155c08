"""The one thread that grows: applies commands between steps, grows, and hands growth to its owners.

It grows while there is anything to grow and sleeps on its queue otherwise. While a forward runs on its device, the
growth of the one before is handed out, the next one is begun where that is possible, and commands are applied as they
arrive; where none runs, the next one comes first. A target commits to all its sessions at once, which takes longer than
a forward: then the next forward does not wait for all, but leaves out the sessions whose commands still wait.
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeGuard

from outrider.draft_worker.growth_protocol import Growth
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.inbox import SocketInbox
from outrider.draft_worker.session import SessionStart
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.errors import OutriderError
from outrider.log_output import about
from outrider.metrics.worker import StepCounts
from outrider.step_holdups import StepHoldups
from outrider.step_watch import StepWatch
from outrider.worker import share_interpreter

logger = logging.getLogger(__name__)

_BUSY_WINDOW_NS = 1_000_000_000
# Objects made and not freed until the collector runs: several times what the trees of a worker hold.
_COLLECT_AFTER = 200_000
# Commands that are applied at least, before a forward is launched for those who need not wait.
_AT_ONCE = 2
# So long before a forward's expected end the thread no longer sleeps for commands: it might wake up late.
_WAKE_UP_NS = 150_000
# What is not worth a sleep, and how long it sleeps at most without a look at the device.
_SHORTEST_SLEEP_NS = 100_000
_LONGEST_SLEEP_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class SessionFailure:
    """Why a session is not open here (any more)."""

    session_id: int
    epoch: int
    error: OutriderError | CommitMismatch


@dataclass(frozen=True, slots=True)
class Load:
    """How full the worker is, and the share of its time, of about the last second, that steps took."""

    sessions: int
    slots_used: int
    slots_total: int
    steps: int
    busy: float


class GrowthOwner(Protocol):
    """Whom sessions belong to. Called on the growth thread; must not block."""

    def deliver(self, growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> None:
        """New nodes of this owner's sessions, from one step."""
        ...

    def fail(self, failure: SessionFailure) -> None:
        """A command that could not be carried out; its session is not open."""
        ...


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """Opens a session for `owner`."""

    owner: GrowthOwner
    start: SessionStart

    @property
    def key(self) -> tuple[int, int]:
        """Of the session."""
        return self.start.key


@dataclass(frozen=True, slots=True)
class CommitCommand:
    """Commits tokens of a session."""

    owner: GrowthOwner
    key: tuple[int, int]
    epoch: int
    position: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class CloseCommand:
    """Closes a session."""

    owner: GrowthOwner
    key: tuple[int, int]
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaveCommand:
    """Closes all sessions of an owner."""

    owner: GrowthOwner


@dataclass(frozen=True, slots=True)
class HoldCommand:
    """An owner's growth is not read any more: its sessions rest; or it is again, and they go on."""

    owner: GrowthOwner
    is_held: bool


Command = OpenCommand | CommitCommand | CloseCommand | LeaveCommand | HoldCommand
Inbox = SimpleQueue[Sequence[Command] | None] | SocketInbox[Sequence[Command]]


class GrowthThread:
    """Runs growth on a thread of its own.

    Args:
        make_growth: called on that thread, so that everything of torch happens on one.
        inbox: where commands come from, beside `submit`.

    Attributes:
        ready: done when the model is loaded; its exception says why it could not be.
        stopped: done when the thread ends; its exception is what ended it.
        watch: whether it still gets on.
        counts: of its steps.
        holds: times that an owner's sessions had to rest, for their growth was not read.
    """

    def __init__(self, make_growth: Callable[[], Growth], inbox: Inbox | None = None) -> None:
        self.ready: Future[Growth] = Future()
        self.stopped: Future[None] = Future()
        # Running futures cannot be cancelled by whoever stops waiting for them.
        self.ready.set_running_or_notify_cancel()
        self.stopped.set_running_or_notify_cancel()
        self._make_growth = make_growth
        # None ends the thread.
        self._commands: Inbox = SimpleQueue() if inbox is None else inbox
        # Taken from the queue, but not applied yet.
        self._backlog: deque[Command | None] = deque()
        self._thread = threading.Thread(target=self._run, name="draft-growth", daemon=True)
        self._busy_ns = 0
        # Owners whose sessions rest.
        self._held: list[GrowthOwner] = []
        self.holds = 0
        self.watch = StepWatch()
        self.counts = StepCounts()
        self._holdups = StepHoldups(logger, "growth")
        # By rows: about how long a step took last.
        self._usual_s: dict[int, float] = {}
        # When the window of `busy` began, and the time in steps until then.
        self._window = (time.perf_counter_ns(), 0)

    def start(self) -> None:
        """Starts the thread; `ready` tells when the model is there."""
        self._thread.start()

    def submit(self, commands: Sequence[Command]) -> None:
        """Queues commands, applied together and in order; any thread may call this."""
        self._commands.put(commands)

    def stop(self) -> None:
        """Ends the thread after the step it is in; `stopped` tells when."""
        self._commands.put(None)

    def load(self) -> Load:
        """How full and how busy the worker is; any thread may call this once `ready` is done."""
        growth = self.ready.result(timeout=0)
        slots = growth.slots
        began, busy_before = self._window
        elapsed = max(time.perf_counter_ns() - began, 1)
        busy = min((self._busy_ns - busy_before) / elapsed, 1.0)
        return Load(growth.num_sessions, slots.used, slots.num_slots, growth.steps, busy)

    @property
    def waiting(self) -> int:
        """Messages of commands that have not been applied, about."""
        return len(self._backlog) + self._commands.qsize()

    def _run(self) -> None:
        share_interpreter()
        try:
            growth = self._make_growth()
            growth.wake = lambda: self.submit(())
            self._holdups.begin()
            self.ready.set_result(growth)
            self._grow(growth)
        except BaseException as error:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            if not self.ready.done():
                self.ready.set_exception(error)
            self.stopped.set_exception(error)
        else:
            self.stopped.set_result(None)

    def _grow(self, growth: Growth) -> None:
        step: GrowthStep | None = None
        idle = True
        while self._apply_some(growth, block=idle):
            self.watch.begins(None)
            left_out = self._left_out(growth)
            self._match(growth, left_out)
            begun = growth.begin(left_out)
            idle = not growth.num_begun
            self.watch.begins(self._usual_s.get(growth.step_tokens.bit_length()))
            if step is not None:
                # Only now: the device has work by this time.
                self._hand_out(step)
                step = None
            if begun and growth.takes_another:
                continue
            if not idle and self._apply_meanwhile(growth):
                step = growth.finish()
                self._count(step)
                if growth.num_begun or not growth.overlaps:
                    # The device has work, or never works on its own: nothing is more urgent.
                    self._hand_out(step)
                    step = None
            if idle:
                self.watch.rests()
        if step is not None:
            self._hand_out(step)
        while growth.num_begun:
            self._hand_out(growth.finish())

    def _apply_some(self, growth: Growth, *, block: bool) -> bool:
        """Applies commands that wait: half of them, and more while the device works; all where it never does by itself.

        A target commits to all its sessions at once. Half of them go on while the other half's commits wait: so
        forwards are wide, and nobody waits for many.

        Args:
            growth: to which.
            block: whether to wait for at least one.

        Returns:
            False once the thread is to end.
        """
        self._receive(block=block and not self._backlog)
        count = len(self._backlog)
        if growth.overlaps:
            count = max(_AT_ONCE, count // 2)
        while self._backlog and (count > 0 or not growth.is_done):
            command = self._backlog.popleft()
            if command is None:
                return False
            self._apply(growth, command)
            count -= 1
        return True

    def _apply_meanwhile(self, growth: Growth) -> bool:
        """Applies commands as they arrive, until the forward's end, or shortly before it where none come.

        Returns:
            Whether the step is to be finished; else another one may be begun by what was applied.
        """
        end = growth.expected_end_ns - _WAKE_UP_NS
        while not growth.is_done:
            if self._backlog:
                if self._backlog[0] is None:
                    return True
                command = self._backlog.popleft()
                assert command is not None
                self._apply(growth, command)
                if not self._backlog:
                    self._match(growth, self._left_out(growth))
                    if growth.takes_another:
                        return False
            else:
                left = min(end - time.perf_counter_ns(), _LONGEST_SLEEP_NS)
                sleeps = left > _SHORTEST_SLEEP_NS
                if not self._receive(timeout_ns=left if sleeps else 0) and not sleeps:
                    return True
        return True

    def _receive(self, *, block: bool = False, timeout_ns: int = 0) -> bool:
        """Moves what waits in the queue to the backlog; whether there was anything.

        Args:
            block: whether to wait until there is.
            timeout_ns: otherwise, for how long.
        """
        received = False
        try:
            while True:
                if block or timeout_ns > 0:
                    commands = self._commands.get(timeout=None if block else timeout_ns * 1e-9)
                else:
                    commands = self._commands.get_nowait()
                self._backlog.extend([None] if commands is None else commands)
                received, block, timeout_ns = True, False, 0
        except Empty:
            return received

    def _left_out(self, growth: Growth) -> Container[tuple[int, int]]:
        """Keys of sessions whose commands wait, and of those whose growth would not be read."""
        left_out = {command.key for command in self._backlog if _is_keyed(command)}
        for owner in self._held:
            left_out |= growth.keys_of(owner)
        return left_out

    def _apply(self, growth: Growth, command: Command) -> None:
        if not isinstance(command, LeaveCommand | HoldCommand):
            _apply_to_session(growth, command)
            return
        self._held = [owner for owner in self._held if owner is not command.owner]
        if isinstance(command, LeaveCommand):
            growth.close_owned(command.owner)
        elif command.is_held:
            self._held.append(command.owner)
            self.holds += 1

    def _match(self, growth: Growth, left_out: Container[tuple[int, int]] = ()) -> None:
        """Hands out what grows without a forward, before one is begun."""
        step = growth.match(left_out)
        if step is not None:
            self._note_busy(step.step_ns)
            self._hand_out(step)

    def _note_busy(self, step_ns: int) -> None:
        now = time.perf_counter_ns()
        if now - self._window[0] > _BUSY_WINDOW_NS:
            self._window = (now - step_ns, self._busy_ns)
        self._busy_ns += step_ns

    def _count(self, step: GrowthStep) -> None:
        self._note_busy(step.step_ns)
        self.counts.note(step.step_ns, step.forward_ns, rows=step.tokens, sessions=step.sessions)
        self._holdups.note(step.step_ns, rows=step.tokens, sessions=step.sessions)
        self._usual_s[step.tokens.bit_length()] = step.step_ns / 1e9

    def _hand_out(self, step: GrowthStep) -> None:
        load = self.load()
        for owner, growths in step.by_owner():
            owner.deliver(growths, step, load)


def spare_collector() -> None:
    """Keeps Python's collector from going through the whole process whenever trees have grown.

    What is loaded by now stays. Trees leave no circles behind, so what remains to be collected is little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _is_keyed(command: Command | None) -> TypeGuard[OpenCommand | CommitCommand | CloseCommand]:
    """Whether the command is one session's."""
    return command is not None and not isinstance(command, LeaveCommand | HoldCommand)


def _apply_to_session(growth: Growth, command: OpenCommand | CommitCommand | CloseCommand) -> None:
    try:
        if isinstance(command, CommitCommand):
            session_id, epoch = command.key[1], command.epoch
            growth.commit(command.key, command.epoch, command.position, command.token_ids)
        elif isinstance(command, OpenCommand):
            session_id, epoch = command.start.key[1], command.start.epoch
            growth.open(command.start)
        else:
            growth.close(command.key, command.epoch)
    except (OutriderError, CommitMismatch) as error:
        ids = about(session_id=session_id, epoch=epoch)
        logger.info("session %d, epoch %d: %s", session_id, epoch, error, extra=ids)
        command.owner.fail(SessionFailure(session_id, epoch, error))
