"""The one thread that runs the target's rounds: commands in, rounds back to back, results out."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from outrider import collector
from outrider.errors import WorkerUnavailable
from outrider.kernels.verification.report import RoundTime
from outrider.kernels.verification.walk import Finish
from outrider.metrics.worker import StepCounts
from outrider.step_holdups import StepHoldups
from outrider.step_watch import StepWatch
from outrider.target_worker.commands import (
    BoundCommand,
    CloseCommand,
    Command,
    GrowthCommand,
    HoldCommand,
    LeaveCommand,
    Load,
    OpenCommand,
    PlaceCommand,
    ResultOwner,
    RoundCost,
    WorkCommand,
)
from outrider.target_worker.rounds.loop import WITHOUT_LIMIT, RoundLoop
from outrider.target_worker.rounds.observer import RoundObserver
from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions import Code, SessionFault, SessionKey
from outrider.worker import share_interpreter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Several coordinators ask for the load at about the same time: what lies between them would say little.
_SHORTEST_WINDOW_NS = 200_000_000
# How long a round is expected to take before the first has been seen; what it is taken for afterwards forgets.
_USUAL_S, _SHARE = 1.0, 0.2


class RoundThread(RoundObserver):
    """Runs rounds on a thread of its own.

    Args:
        make_loop: called on that thread, so that everything of torch happens on one.

    Attributes:
        ready: done when the model is loaded; its exception says why it could not be.
        stopped: done when the thread ends; its exception is what ended it.
        watch: age of the running round.
        counts: of its rounds.
        weights: version of the model's weights, where it is known; sessions that began with other ones are refused.
    """

    def __init__(self, make_loop: Callable[[], RoundLoop]) -> None:
        self.ready: Future[RoundLoop] = Future()
        self.stopped: Future[None] = Future()
        # Whoever waits may give up waiting; that must not cancel what others wait for.
        self.ready.set_running_or_notify_cancel()
        self.stopped.set_running_or_notify_cancel()
        self._make_loop = make_loop
        # None ends the thread.
        self._inbox: SimpleQueue[Sequence[Command] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="target-rounds", daemon=True)
        self._owners: dict[SessionKey, ResultOwner] = {}
        self._allows: dict[SessionKey, int] = {}
        # Owners whose sessions rest.
        self._held: list[ResultOwner] = []
        self.watch, self.counts, self.weights = StepWatch(), StepCounts(), ""
        self._holdups = StepHoldups(logger, "rounds")
        self._cost, self._usual_s, self._ended_ns, self._watched = RoundCost(), _USUAL_S, 0, -1
        self._busy_ns, self._busy = 0, 0.0
        self._reported = (time.perf_counter_ns(), 0)
        self._gauges = Load()

    def start(self) -> None:
        """Start the thread; `ready` tells when the model is there."""
        self._thread.start()

    def submit(self, commands: Sequence[Command]) -> None:
        """Queue commands, applied in order; any thread may call this."""
        self._inbox.put(commands)

    def run_alone(self, work: "Callable[[RoundLoop], Result]") -> "Future[Result]":
        """Have the thread run something while no round is under way.

        What `work` raises ends the thread, as what a round raises does.
        """
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        if self.stopped.done():
            done.set_exception(WorkerUnavailable("the target worker is stopping"))
        else:
            self.submit([WorkCommand(work, done)])
        return done

    def stop(self) -> None:
        """End the thread; `stopped` tells when."""
        self._inbox.put(None)

    @property
    def load(self) -> Load:
        """The load, `busy` as at the last report."""
        return replace(self._gauges, busy=self._busy)

    def report(self) -> Load:
        """The load, `busy` measured anew since the last call; of calls that follow each other closely, by the first."""
        now, busy = time.perf_counter_ns(), self._busy_ns
        then, busy_then = self._reported
        if now - then >= _SHORTEST_WINDOW_NS:
            self._reported = (now, busy)
            self._busy = min((busy - busy_then) / max(now - then, 1), 1.0)
        return replace(self.load, step_age_s=self.watch.age_s, is_preparing=self.watch.is_preparing)

    @property
    def waiting(self) -> int:
        """Messages of commands that have not been applied, about."""
        return self._inbox.qsize()

    def reported(self, report: RoundReport, results: Sequence[SessionResult], *, prefill_rows: int) -> None:
        """See `RoundObserver`."""
        times = report.times_ns
        step_ns = max(times[RoundTime.ENDED] - max(times[RoundTime.BEGAN], self._ended_ns), 0)
        forward_ns = max(times[RoundTime.WALKED] - times[RoundTime.PACKED], 0)
        self._ended_ns = times[RoundTime.ENDED]
        self._busy_ns += forward_ns
        rows = report.verified_rows + prefill_rows
        self._cost = RoundCost(step_ns, forward_ns, rows, report.sessions)
        self._usual_s += _SHARE * (step_ns / 1e9 - self._usual_s)
        self.counts.note(step_ns, forward_ns, rows=rows, sessions=report.sessions, is_prefill=not report.sessions)
        self._holdups.note(step_ns, rows=rows, sessions=report.sessions)

    def _run(self) -> None:
        share_interpreter()
        error: BaseException | None = None
        try:
            rounds = self._make_loop()
            rounds.observer, rounds.wake = self, lambda: self.submit(())
            self._note(rounds)
            self._holdups.begin()
            self.ready.set_result(rounds)
            while self._turn(rounds):
                pass
        except BaseException as failure:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            error = failure
        if error is not None and not self.ready.done():
            self.ready.set_exception(error)
        if error is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(error)
        reason = "the target worker is stopping" if error is None else f"the target worker failed: {error}"
        while not self._inbox.empty():
            for command in self._inbox.get() or ():
                if isinstance(command, WorkCommand):
                    command.done.set_exception(WorkerUnavailable(reason))

    def _turn(self, rounds: RoundLoop) -> bool:
        """Take what has come, and let the rounds go on; False once the thread is to end."""
        try:
            block = not rounds.has_work
            while True:
                commands = self._inbox.get() if block else self._inbox.get_nowait()
                block = False
                if commands is None:
                    return False
                for command in commands:
                    self._apply(rounds, command)
        except Empty:
            pass
        results = rounds.turn()
        self._look(rounds)
        if results:
            self._note(rounds)
            self._deliver(results)
            collector.between_rounds()
        elif rounds.is_busy:
            # Other threads may have the interpreter while the device works.
            time.sleep(0)
        return True

    def _look(self, rounds: RoundLoop) -> None:
        """Say what is running for whoever watches it."""
        if not rounds.is_busy:
            self._watched = -1
            self.watch.rests()
        elif rounds.rounds_read != self._watched:
            self._watched = rounds.rounds_read
            self.watch.begins(self._usual_s)

    def _note(self, rounds: RoundLoop) -> None:
        kv = rounds.kv
        self._gauges = Load(
            sessions=rounds.session_count,
            slots_used=kv.used,
            slots_cached=kv.remembered,
            slots_total=kv.num_slots,
            steps=rounds.rounds_read,
        )

    def _deliver(self, results: Sequence[SessionResult]) -> None:
        """Hand results to their owners; a session's of two rounds that were read together go one after the other."""
        parts = defaultdict[int, list[SessionResult]](list)
        rounds_of = defaultdict[SessionKey, int](int)
        for result in results:
            parts[rounds_of[result.key]].append(result)
            rounds_of[result.key] += 1
        for part in parts.values():
            by_owner = defaultdict[int, list[SessionResult]](list)
            owners = {id(owner): owner for owner in self._owners.values()}
            for result in part:
                if (owner := self._owners.get(result.key)) is not None:
                    by_owner[id(owner)].append(result)
            for number, own in by_owner.items():
                owners[number].deliver(own, self._cost, self.load)
            for result in part:
                if result.finish is not Finish.NONE or result.fault is not None:
                    self._forget(result.key)

    def _forget(self, key: SessionKey) -> None:
        self._owners.pop(key, None)
        self._allows.pop(key, None)

    def _apply(self, rounds: RoundLoop, command: Command) -> None:  # noqa: PLR0912 - one case for each command
        match command:
            case GrowthCommand():
                rounds.grow(
                    command.key, command.epoch, command.place, command.as_of, command.node_ids, command.parents,
                    command.tokens, command.acceptances, drafter=command.drafter, distributions=command.distributions,
                )  # fmt: skip
            case OpenCommand():
                self._open(rounds, command)
            case PlaceCommand(key, epoch, place, is_resent):
                if is_resent:
                    rounds.resend(key, epoch, place)
                else:
                    rounds.forget(key, epoch, place)
            case BoundCommand(key, epoch, allow):
                if key in rounds.keys and rounds.epoch_of(key) == epoch:
                    self._allows[key] = allow
                    if self._owners[key] not in self._held:
                        rounds.limit(key, epoch, allow)
            case CloseCommand(key, epoch):
                rounds.close(key, epoch)
                if key not in rounds.keys:
                    self._forget(key)
            case LeaveCommand(owner):
                self._held = [other for other in self._held if other is not owner]
                for key in [key for key, other in self._owners.items() if other is owner]:
                    if key in rounds.keys:
                        rounds.close(key, rounds.epoch_of(key))
                    self._forget(key)
            case HoldCommand(owner, is_held):
                self._hold(rounds, owner, is_held=is_held)
            case WorkCommand(work, done):
                self.watch.begins(None)
                self._deliver(rounds.drain())
                done.set_result(work(rounds))
        self._note(rounds)

    def _open(self, rounds: RoundLoop, command: OpenCommand) -> None:
        request, owner = command.request, command.owner
        try:
            if request.weights and self.weights and request.weights != self.weights:
                message = f"weights were replaced: {self.weights} runs here, the session began with {request.weights}"
                raise SessionFault(Code.ABORTED, message)
            rounds.open(request)
        except SessionFault as fault:
            owner.fail(request.key[1], request.epoch, fault)
            return
        self._owners[request.key] = owner
        self._allows.pop(request.key, None)
        if any(held is owner for held in self._held):
            rounds.limit(request.key, request.epoch, 0)

    def _hold(self, rounds: RoundLoop, owner: ResultOwner, *, is_held: bool) -> None:
        self._held = [other for other in self._held if other is not owner] + [owner] * is_held
        for key, other in self._owners.items():
            if other is owner and key in rounds.keys:
                allow = 0 if is_held else self._allows.get(key, WITHOUT_LIMIT)
                rounds.limit(key, rounds.epoch_of(key), allow)
