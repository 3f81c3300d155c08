"""The one thread that runs a target's rounds: commands in, rounds launched one ahead, results out."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from outrider.errors import WorkerUnavailable
from outrider.front.inbox import Inbox
from outrider.roles import collector
from outrider.roles.worker import share_interpreter
from outrider.target_worker.rounds.commands import (
    BoundsCommand,
    CloseCommand,
    Command,
    HoldCommand,
    LeaveCommand,
    Load,
    OpenCommand,
    PlaceChange,
    PlaceCommand,
    RefuseCommand,
    RoundOwner,
)
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.notes import USUAL_S, RoundNotes
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions.requests import Code, SessionFault, SessionKey

T = TypeVar("T")

# Commands that are applied at most between two looks at a device that works: it must not wait for a launch.
_AT_ONCE = 4
# Messages of growth that are taken as one command.
_GROWTHS_AT_ONCE = 32
# Between two looks at a device that has written nothing; the next round waits for it already.
_GLANCE_S = 0.00005
# Several coordinators ask for reports at about the same time: what lies between them would say little.
_SHORTEST_WINDOW_NS = 200_000_000


class RoundThread:
    """Runs a `RoundLoop` on a thread of its own.

    Args:
        make_loop: called on that thread, so that everything of torch happens on one.
        inbox: where commands come from, beside `submit`.

    Attributes:
        ready: done when the model is loaded; its exception says why it could not be.
        stopped: done when the thread ends; its exception is what ended it.
        weights: version of the model's weights, where it is known; sessions that began with other ones are refused.
        watch: age of the oldest round under way.
        counts: of its rounds.
        holds: times that an owner's sessions had to rest, for their results were not read.
    """

    def __init__(self, make_loop: Callable[[], RoundLoop], inbox: Inbox[Command]) -> None:
        self.ready: Future[RoundLoop] = Future()
        self.stopped: Future[None] = Future()
        # Running futures cannot be cancelled by whoever stops waiting for them.
        self.ready.set_running_or_notify_cancel()
        self.stopped.set_running_or_notify_cancel()
        self._make_loop = make_loop
        self._inbox = inbox
        # Under the lock, for what is to run alone must be told of the thread's end.
        self._lock = threading.Lock()
        self._alone: deque[tuple[Callable[[RoundLoop], object], Future[Any]]] = deque()
        self._is_stopping = self._has_ended = False
        # Of the thread: commands that are not applied yet; by session, its owner and epoch; owners that do not read.
        self._waiting: deque[Command] = deque()
        self._owners: dict[SessionKey, tuple[RoundOwner, int]] = {}
        self._held: set[RoundOwner] = set()
        self._refused: list[tuple[RoundOwner, SessionResult]] = []
        # The device works, and the last look has found nothing.
        self._is_quiet = False
        self._notes = RoundNotes()
        self._gauges, self._busy = Load(), 0.0
        # When `busy` was measured last, and the busy time until then.
        self._reported = (time.perf_counter_ns(), 0)
        self._thread = threading.Thread(target=self._run, name="target-rounds", daemon=True)
        self.weights = ""
        self.watch, self.counts = self._notes.watch, self._notes.counts
        self.holds = 0

    def start(self) -> None:
        """Start the thread; `ready` tells when the model is there."""
        self._thread.start()

    def submit(self, commands: Sequence[Command]) -> None:
        """Queue commands, applied in order; any thread may call this."""
        self._inbox.put(commands)

    def run_alone(self, work: Callable[[RoundLoop], T]) -> "Future[T]":
        """Have the thread run something while no round is under way; commands that come meanwhile wait.

        What `work` raises ends the thread, as what a round raises does.
        """
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        with self._lock:
            if self._is_stopping or self._has_ended:
                done.set_exception(WorkerUnavailable("the target worker is stopping"))
                return done
            self._alone.append((work, done))
        self._inbox.put()
        return done

    def stop(self) -> None:
        """End the thread after the rounds under way; `stopped` tells when."""
        with self._lock:
            self._is_stopping = True
        self._inbox.put()

    @property
    def load(self) -> Load:
        """The load, `busy` as at the last report."""
        return replace(self._gauges, busy=self._busy)

    def report(self) -> Load:
        """Return the load, `busy` measured anew; of calls that follow each other closely, by the first."""
        now, busy = time.perf_counter_ns(), self._notes.busy_ns
        then, busy_then = self._reported
        if now - then >= _SHORTEST_WINDOW_NS:
            self._reported = (now, busy)
            self._busy = min((busy - busy_then) / (now - then), 1.0)
        return replace(self.load, step_age_s=self.watch.age_s, is_preparing=self.watch.is_preparing)

    @property
    def waiting(self) -> int:
        """Commands that have come and not been applied."""
        return len(self._waiting)

    def _run(self) -> None:
        share_interpreter()
        error: BaseException | None = None
        try:
            loop = self._make_loop()
            loop.observer, loop.wake = self._notes, self._inbox.put
            self._note(loop)
            self._notes.slow_steps.begin()
            self.ready.set_result(loop)
            self._serve(loop)
        except BaseException as failure:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            error = failure
        with self._lock:
            self._has_ended = True
        reason = "the target worker is stopping" if error is None else f"the target worker failed: {error}"
        for _, done in self._alone:
            done.set_exception(WorkerUnavailable(reason))
        if error is None:
            self.stopped.set_result(None)
            return
        if not self.ready.done():
            self.ready.set_exception(error)
        self.stopped.set_exception(error)

    def _serve(self, loop: RoundLoop) -> None:
        while self._receive(loop):
            if self._alone:
                self._run_alone(loop)
            self._apply(loop)
            read = loop.rounds_read
            results = loop.turn()
            self._is_quiet = loop.is_busy and loop.rounds_read == read and not results
            self._deliver(loop, results)
            if self._is_quiet:
                loop.wait()
            else:
                collector.between_rounds()
        self._deliver(loop, loop.drain())

    def _receive(self, loop: RoundLoop) -> bool:
        """Wait until there is something to do, and take new commands; return False if the thread is to end."""
        if self._waiting or self._alone or self._is_stopping or (loop.has_work and not self._is_quiet):
            taken = self._inbox.take()
        elif loop.has_work:
            taken = self._inbox.take(_GLANCE_S)
        else:
            self.watch.idle()
            taken = self._inbox.take(loop.due_s)
            self.watch.begin(USUAL_S)
        self._waiting.extend(taken)
        return not self._is_stopping

    def _apply(self, loop: RoundLoop) -> None:
        """Apply the commands that wait; some of them while a device works."""
        left = min(len(self._waiting), _AT_ONCE) if loop.is_busy else len(self._waiting)
        while left and self._waiting:
            left -= 1
            match command := self._waiting.popleft():
                case Growth():
                    loop.grow(Growth.joined([command, *self._following_growth()]))
                case BoundsCommand(key, epoch, allow, is_alone):
                    loop.limit(key, epoch, allow)
                    loop.separate(key, epoch, is_alone=is_alone)
                case PlaceCommand(key, epoch, place, change):
                    apply = {
                        PlaceChange.TAKEN: loop.forget,
                        PlaceChange.LEFT: loop.leave,
                        PlaceChange.RESENT: loop.resend,
                    }
                    apply[change](key, epoch, place)
                case OpenCommand():
                    self._open(loop, command)
                case RefuseCommand(owner, key, epoch, fault):
                    self._refuse(loop, owner, key, epoch, fault)
                case CloseCommand(key, epoch):
                    self._close(loop, key, epoch)
                case HoldCommand(owner, is_held):
                    self._hold(loop, owner, is_held=is_held)
                case LeaveCommand(owner):
                    for key, epoch in self._sessions_of(owner):
                        self._close(loop, key, epoch)
                    self._held.discard(owner)

    def _following_growth(self) -> Iterator[Growth]:
        """Take the growth that waits before any other command, up to a bound: most of what it costs it costs once."""
        for _ in range(_GROWTHS_AT_ONCE - 1):
            if not self._waiting or not isinstance(growth := self._waiting[0], Growth):
                return
            self._waiting.popleft()
            yield growth

    def _sessions_of(self, owner: RoundOwner) -> list[tuple[SessionKey, int]]:
        return [(key, epoch) for key, (other, epoch) in self._owners.items() if other is owner]

    def _open(self, loop: RoundLoop, command: OpenCommand) -> None:
        owner, request = command.owner, command.request
        try:
            if request.weights and self.weights and request.weights != self.weights:
                message = f"weights were replaced: {self.weights} runs here, the session began with {request.weights}"
                raise SessionFault(Code.ABORTED, message)
            loop.open(request)
        except SessionFault as fault:
            self._refuse(loop, owner, request.key, request.epoch, fault)
            return
        self._owners[request.key] = owner, request.epoch
        loop.hold(request.key, is_held=owner in self._held)

    def _refuse(self, loop: RoundLoop, owner: RoundOwner, key: SessionKey, epoch: int, fault: SessionFault) -> None:
        self._close(loop, key, epoch)
        self._refused.append((owner, SessionResult(key=key, epoch=epoch, fault=fault)))

    def _close(self, loop: RoundLoop, key: SessionKey, epoch: int) -> None:
        loop.close(key, epoch)
        if key in self._owners and self._owners[key][1] <= epoch:
            del self._owners[key]

    def _hold(self, loop: RoundLoop, owner: RoundOwner, *, is_held: bool) -> None:
        self.holds += is_held
        if is_held:
            self._held.add(owner)
        else:
            self._held.discard(owner)
        for key, _ in self._sessions_of(owner):
            loop.hold(key, is_held=is_held)

    def _run_alone(self, loop: RoundLoop) -> None:
        self._deliver(loop, loop.drain())
        work, done = self._alone[0]
        # Nobody knows how long it takes.
        self._notes.is_watching = False
        self.watch.begin(None)
        result = work(loop)
        self._notes.is_watching = True
        self.watch.begin(USUAL_S)
        self._alone.popleft()
        for key, (owner, epoch) in list(self._owners.items()):
            if key not in loop.keys:
                fault = SessionFault(Code.ABORTED, "weights were replaced: the session is closed")
                self._refuse(loop, owner, key, epoch, fault)
        self._deliver(loop, [])
        done.set_result(result)

    def _deliver(self, loop: RoundLoop, results: Sequence[SessionResult]) -> None:
        """Hand results to their owners, those of each round together."""
        if not self._is_quiet:
            self._note(loop)
        groups: dict[tuple[int, RoundOwner], list[SessionResult]] = {}
        for owner, result in self._refused:
            groups.setdefault((0, owner), []).append(result)
        self._refused.clear()
        for result in results:
            owner, epoch = self._owners.get(result.key, (None, -1))
            # The session may have been opened anew.
            if owner is None or epoch != result.epoch:
                continue
            groups.setdefault((result.round, owner), []).append(result)
            if result.has_ended:
                del self._owners[result.key]
        for (number, owner), part in groups.items():
            owner.deliver(part, self._notes.costs.get(number))
        self._notes.costs.clear()

    def _note(self, loop: RoundLoop) -> None:
        kv, counts = loop.kv, self.counts
        self._gauges = Load(
            sessions=loop.session_count,
            slots_used=kv.slots.used,
            slots_cached=kv.slots.remembered,
            slots_total=kv.slots.num_slots,
            steps=counts.verify_steps + counts.prefill_steps,
        )
