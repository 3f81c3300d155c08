"""The draft worker's loop: commands in, steps launched one ahead, growth out, on one thread of its own."""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

from outrider.draft_worker.rounds.commands import (
    CloseCommand,
    Command,
    CommitCommand,
    GrowthOwner,
    HoldCommand,
    LeaveCommand,
    Load,
    ResendCommand,
)
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import Key, SessionStart
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import OutriderError
from outrider.front.inbox import Inbox
from outrider.metrics.worker import StepCounts
from outrider.roles.log_output import about
from outrider.roles.slow_steps import SlowStepLog
from outrider.roles.step_watch import StepWatch
from outrider.roles.worker import share_interpreter

logger = logging.getLogger(__name__)

_BUSY_WINDOW_NS = 1_000_000_000
# Objects made and not freed until the collector runs: several times what a worker's sessions hold.
_COLLECT_AFTER = 200_000
# Commands that are applied at most between two looks at a device that works, for it must not wait for a launch; and
# those that may wait for the next look: what is grown while commits are late is worth nothing.
_AT_ONCE, _MOST_WAITING = 32, 512
# Between two messages of growth, unless no more is on its way. A message takes the coordinator and the target some
# 0.3 ms each: short steps would make thousands a second, and what waits in a queue comes too late.
_BETWEEN_MESSAGES_NS = 1_000_000
# Steps whose growth gathers while an owner has not read what was sent before: more of them do not cost it much more,
# but what it reads then is ever older.
_MOST_GATHERED = 16
# How long a step is expected to take before the first of its size has been seen.
_USUAL_S = 1.0


class GrowthLoop:
    """Runs drafters on a thread of its own.

    Args:
        make_drafters: called on that thread, so that everything of torch happens on one.
        inbox: where commands come from, beside `submit`.

    Attributes:
        ready: done when the model is loaded; its exception says why it could not be.
        stopped: done when the thread ends; its exception is what ended it.
        watch: age of the running step.
        counts: of its steps.
        holds: times that an owner's sessions had to rest, for what they had grown was not read.
    """

    def __init__(self, make_drafters: Callable[[], Drafters], inbox: Inbox[Command]) -> None:
        self.ready: Future[Drafters] = Future()
        self.stopped: Future[None] = Future()
        # Running futures cannot be cancelled by whoever stops waiting for them.
        self.ready.set_running_or_notify_cancel()
        self.stopped.set_running_or_notify_cancel()
        self._make_drafters = make_drafters
        self._inbox = inbox
        self._is_stopping = False
        # Taken from the inbox, but not applied yet.
        self._waiting: deque[Command] = deque()
        # Growth of the last steps that has not been sent, and from when on it may be though more is on its way.
        self._pending: dict[GrowthOwner, list[Growth]] = {}
        self._earliest_ns = 0
        # Owners that have not read what was sent, and those of them whose sessions rest.
        self._unread: set[GrowthOwner] = set()
        self._resting: set[GrowthOwner] = set()
        self._thread = threading.Thread(target=self._run, name="draft-growth", daemon=True)
        self.holds = 0
        self.watch = StepWatch()
        self.counts = StepCounts()
        self._slow_steps = SlowStepLog(logger, "growth")
        # When the window of `busy` began, and the time in steps until then.
        self._window, self._busy_ns = (time.perf_counter_ns(), 0), 0

    def start(self) -> None:
        """Start the thread; `ready` tells when the model is there."""
        self._thread.start()

    def submit(self, commands: Sequence[Command]) -> None:
        """Queue commands, applied in order; any thread may call this."""
        self._inbox.put(commands)

    def stop(self) -> None:
        """End the thread; `stopped` tells when."""
        self._is_stopping = True
        self._inbox.put()

    def load(self) -> Load:
        """Return how full and how busy the worker is; any thread may call this once `ready` is done."""
        drafters = self.ready.result(timeout=0)
        began, busy_before = self._window
        elapsed = max(time.perf_counter_ns() - began, 1)
        busy = min((self._busy_ns - busy_before) / elapsed, 1.0)
        return Load(drafters.num_sessions, *drafters.slots, drafters.steps, busy)

    @property
    def waiting(self) -> int:
        """Commands that have come and not been applied."""
        return len(self._waiting)

    def _run(self) -> None:
        share_interpreter()
        try:
            drafters = self._make_drafters()
            drafters.set_wake(lambda: self.submit(()))
            self._slow_steps.begin()
            self.ready.set_result(drafters)
            self._grow(drafters)
        except BaseException as error:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            if not self.ready.done():
                self.ready.set_exception(error)
            self.stopped.set_exception(error)
        else:
            self.stopped.set_result(None)

    def _grow(self, drafters: Drafters) -> None:
        has_work, watched = False, None
        while True:
            self._waiting.extend(self._inbox.take(0.0 if has_work else None))
            if self._is_stopping:
                return
            self._apply(drafters)
            now = drafters.launches, drafters.is_preparing
            if now != watched or not self.watch.age_s:
                watched = now
                self.watch.begin(None if drafters.is_preparing else _USUAL_S)
            has_grown = False
            for growth in drafters.advance(self._without_matches(drafters)):
                self._note(growth)
                self._gather(drafters, growth)
                has_grown = True
            if not drafters.is_busy or time.perf_counter_ns() >= self._earliest_ns:
                self._deliver()
            has_work = drafters.is_busy or has_grown or bool(self._waiting)
            if not has_work:
                self.watch.idle()
            elif not has_grown:
                # Other threads may have the interpreter while the device works.
                time.sleep(0)

    def _without_matches(self, drafters: Drafters) -> Container[Key]:
        """Keys of sessions that n-grams are not matched for: those that rest, and those with commits that wait."""
        if drafters.ngram is None:
            # Nobody asks, and this goes through all that waits at every look.
            return ()
        waiting = {command.key for command in self._waiting if isinstance(command, CommitCommand)}
        return waiting.union(*map(drafters.keys_of, self._resting))

    def _apply(self, drafters: Drafters) -> None:
        """Apply the commands that wait; some of them while a device works."""
        count = len(self._waiting)
        if drafters.is_busy:
            count = min(count, max(_AT_ONCE, count - _MOST_WAITING))
        for _ in range(count):
            command = self._waiting.popleft()
            if isinstance(command, LeaveCommand):
                drafters.close_owned(command.owner)
                self._pending.pop(command.owner, None)
                self._unread.discard(command.owner)
                self._resting.discard(command.owner)
            elif isinstance(command, HoldCommand):
                self._hold(drafters, command.owner, is_held=command.is_held)
            else:
                _apply_to_session(drafters, command)
                if isinstance(command, SessionStart) and command.owner in self._resting:
                    drafters.hold(command.key, "unread", is_held=True)

    def _hold(self, drafters: Drafters, owner: GrowthOwner, *, is_held: bool) -> None:
        """Gather growth while its owner does not read what it was sent."""
        if is_held:
            self._unread.add(owner)
        else:
            self._unread.discard(owner)
            self._rest(drafters, owner, is_resting=False)

    def _rest(self, drafters: Drafters, owner: GrowthOwner, *, is_resting: bool) -> None:
        if is_resting == (owner in self._resting):
            return
        self.holds += is_resting
        self._resting ^= {owner}
        for key in drafters.keys_of(owner):
            drafters.hold(key, "unread", is_held=is_resting)

    def _gather(self, drafters: Drafters, growth: Growth) -> None:
        """Put growth to what waits for its owners, joined where it can be; they get it at once where it cannot."""
        for owner, part in growth.by_owner():
            waiting = self._pending.setdefault(owner, [])
            if waiting and waiting[-1].can_be_joined and part.can_be_joined:
                waiting[-1].join(part)
            else:
                waiting.append(part)
            # Whole trees, which are sent once, are no steps.
            if owner in self._unread and sum(each.steps for each in waiting if each.rows) >= _MOST_GATHERED:
                self._rest(drafters, owner, is_resting=True)
        if not growth.can_be_joined:
            self._deliver()

    def _deliver(self) -> None:
        """Hand growth that waits to those owners that have read what they got before."""
        if not (owners := self._pending.keys() - self._unread):
            return
        for owner in owners:
            for growth in self._pending.pop(owner):
                owner.deliver(growth)
        self._earliest_ns = time.perf_counter_ns() + _BETWEEN_MESSAGES_NS

    def _note(self, growth: Growth) -> None:
        now = time.perf_counter_ns()
        if now - self._window[0] > _BUSY_WINDOW_NS:
            self._window = (now - growth.step_ns, self._busy_ns)
        self._busy_ns += growth.step_ns
        if growth.source is GrowthSource.MODEL and growth.rows:
            self.counts.note(growth.step_ns, growth.forward_ns, rows=growth.rows, sessions=growth.num_sessions)
            self._slow_steps.note(growth.step_ns, rows=growth.rows, sessions=growth.num_sessions)


def spare_collector() -> None:
    """Keep Python's collector from going through the whole process whenever sessions have come and gone.

    What is loaded by now stays. Sessions leave no circles behind, so what remains to be collected is little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _apply_to_session(drafters: Drafters, command: SessionStart | CommitCommand | ResendCommand | CloseCommand) -> None:
    try:
        if isinstance(command, CommitCommand):
            drafters.commit(command.key, command.epoch, command.position, command.token_ids)
        elif isinstance(command, SessionStart):
            drafters.open(command)
        elif isinstance(command, ResendCommand):
            drafters.resend(command.key, command.epoch)
        else:
            drafters.close(command.key, command.epoch)
    except OutriderError as error:
        (_, session_id), epoch = command.key, command.epoch
        ids = about(session_id=session_id, epoch=epoch)
        logger.info("session %d, epoch %d: %s", session_id, epoch, error, extra=ids)
        command.owner.fail(session_id, epoch, error)
