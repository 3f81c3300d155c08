"""Autoscaler of draft workers, run every second on the coordinators' counters.

Pure: no clock, no Ray.

    samples -> window -> speed of every count -> most tokens per cost -> steady over time -> decision

docs/autoscaling.md explains it. One count is better than another if it gives more tokens a second and unit of cost:

    value(M) = speed(M) / (targets + cost * M)

A decision never rests on less than all coordinators: while one of them is silent, everything stays as it is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.deploy.autoscaler_model import DemandWindow, Sample, speeds, window_of
from outrider.deploy.config import DeployConfig
from outrider.v1 import generation_pb2

# A count has to promise so much more than the one that is there.
_HYSTERESIS = 0.02
# Rounds that a window needs: the share of those that ended one way is then known to about 6 %.
_LEAST_ROUNDS = 64
_LONGEST_WINDOW_S = 30.0
# A coordinator that answered less than this ago, and does not now, is waited for; then it counts as gone.
_MISSED_FOR_S = 10.0
# A worker that is tried gets so long a window to show what it is worth.
_TRIAL_S = 5.0
# Trials that failed one after the other make the pause before the next one longer, up to so many times.
_MOST_PATIENCE = 8
# Sessions by this factor more or fewer are a load of which the last trial says nothing.
_OTHER_LOAD = 2.0
# Between two workers that are ended.
_PAUSE_S = 5.0
# How many times `autoscale_down_s` the wait before a worker is ended may become.
_MOST_CAUTION = 8
# Looks are about a second apart: so much may lack at the far end of a span that counts as covered.
_SLACK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The number of drafts there should be now, and why."""

    drafts: int  # workers, between min and max
    reason: str
    serving: int  # workers that all coordinators together can use
    sessions: int
    speedup: float | None = None  # tokens a second by those of plain decoding; None while it is not known
    gain_of_next: float | None = None  # what one more than serve now would add to that, as a share; None likewise


@dataclass(frozen=True)
class _Advice:
    """A count for the moment, before time has its say; `drafts` is None where nothing is known better than now's."""

    drafts: int | None
    reason: str
    speedup: float | None = None
    gain_of_next: float | None = None
    at_once: bool = False


@dataclass
class _Trial:
    """Speculation that did not pay, and when it is tried again."""

    sessions: float
    next_s: float
    failures: int


class _Damping:
    """A count that follows advice quickly upwards and slowly downwards.

    Up to what was advised at every look of the last `up_s` at least; down, one at a time, where no look of the last
    `down_s` advised as many. A count that had to be raised again soon after it was lowered is lowered later the next
    time.
    """

    def __init__(self, *, up_s: float, down_s: float) -> None:
        self._up_s, self._down_s = up_s, down_s
        self._wait_s = down_s
        self._advised: deque[tuple[float, int]] = deque()
        self._raised_s = self._lowered_s = -float("inf")

    def forget(self) -> None:
        """Forget earlier advice: signals were lost."""
        self._advised.clear()

    def count(self, advised: int, now: int, now_s: float) -> int:
        """Return the count to have."""
        held = self._advised
        held.append((now_s, advised))
        while now_s - held[0][0] > self._wait_s + _SLACK_S:
            held.popleft()
        covered_s = now_s - held[0][0] + _SLACK_S
        least = min(count for at_s, count in held if now_s - at_s <= self._up_s)
        if least > now and covered_s >= self._up_s:
            return least
        most = max(count for _, count in held)
        if most < now and covered_s >= self._wait_s and now_s - self._lowered_s >= _PAUSE_S:
            return now - 1
        return now

    def note_change(self, change: int, now_s: float) -> None:
        """Note by how many the count has changed."""
        if change < 0:
            if now_s - self._raised_s > 2 * self._wait_s:
                self._wait_s = self._down_s
            self._lowered_s = now_s
        else:
            if now_s - self._lowered_s < 2 * self._wait_s:
                self._wait_s = min(2 * self._wait_s, _MOST_CAUTION * self._down_s)
            self._raised_s = now_s


class Autoscaler:
    """Decides, for a configuration with `max_drafts`; call `decide` about every second."""

    def __init__(self, config: DeployConfig) -> None:
        assert config.max_drafts is not None, "nothing is left to demand"
        self._config, self._least, self._most = config, config.min_drafts, config.max_drafts
        self._samples: list[Sample] = []
        self._heard: dict[int, tuple[float, float]] = {}
        """Coordinator's incarnation to when it last spoke, and its uptime then."""
        self._damping = _Damping(up_s=config.autoscale_up_s, down_s=config.autoscale_down_s)
        self._trial: _Trial | None = None
        self._is_trying = False

    def decide(self, infos: Sequence[generation_pb2.ServerInfo], *, drafts: int, now_s: float) -> Decision:
        """Return the number of drafts to have.

        Args:
            infos: what the coordinators that can be reached say now.
            now_s: of a monotonic clock.
        """
        sample = Sample.of(infos, now_s)
        silence = self._silence(infos, now_s)
        if silence is not None:
            self._samples.clear()
            self._damping.forget()
            advice = _Advice(None, silence)
        else:
            self._remember(sample)
            advice = self._advice(drafts, now_s)
        wanted = drafts if advice.drafts is None else min(max(advice.drafts, self._least), self._most)
        if advice.drafts is not None and not advice.at_once:
            wanted = self._damping.count(wanted, drafts, now_s)
        wanted = min(max(wanted, self._least), self._most)
        self._note(wanted, drafts, advice, now_s)
        return Decision(
            drafts=wanted,
            reason=advice.reason,
            serving=len(sample.drafts),
            sessions=sample.sessions,
            speedup=advice.speedup,
            gain_of_next=advice.gain_of_next,
        )

    # ---------------------------------------------------------------------------------------------------- what is known

    def _silence(self, infos: Sequence[generation_pb2.ServerInfo], now_s: float) -> str | None:
        """Return why this second's signals are to be ignored; None if they are not."""
        stale = [info for info in infos if self._heard.get(info.incarnation, (0.0, -1.0))[1] == info.uptime_s]
        self._heard |= {info.incarnation: (now_s, info.uptime_s) for info in infos if info not in stale}
        self._heard = {own: heard for own, heard in self._heard.items() if now_s - heard[0] <= _MISSED_FOR_S}
        if not infos:
            return "no coordinator answers"
        if stale:
            return f"{len(stale)} of {len(infos)} coordinators say the same as before"
        missing = len(self._heard) - len(infos)
        return f"{missing} of {len(self._heard)} coordinators have stopped answering" if missing else None

    def _remember(self, sample: Sample) -> None:
        """Store a sample; drop earlier ones of other coordinators or drafts."""
        last = self._samples[-1] if self._samples else None
        if last is not None and not last.compares_with(sample):
            self._samples.clear()
        self._samples.append(sample)
        while sample.at_s - self._samples[0].at_s > _LONGEST_WINDOW_S:
            del self._samples[0]

    def _window(self, least_s: float) -> DemandWindow | None:
        """The shortest one up to now that says enough."""
        for first in range(len(self._samples) - 2, -1, -1):
            if self._samples[-1].at_s - self._samples[first].at_s < least_s:
                continue
            window = window_of(self._samples[first:])
            if window.rounds >= _LEAST_ROUNDS or not window.drafts or first == 0:
                return window
        return None

    # ------------------------------------------------------------------------------------------------------ what to do

    def _advice(self, drafts: int, now_s: float) -> _Advice:
        sample, up_s = self._samples[-1], self._config.autoscale_up_s
        window = self._window(_TRIAL_S if self._is_trying else up_s)
        if window is None:
            return _Advice(None, "looking since the last change")
        if not any(own.gauges[0] or own.gauges[2] for own in self._samples if now_s - own.at_s <= up_s):
            return _Advice(self._least, "no session speculates")
        if not sample.drafts and not drafts:
            return self._without_drafts(window, now_s)
        if not sample.drafts or not window.targets:
            return _Advice(None, "drafts or targets are still starting")
        if window.rounds < _LEAST_ROUNDS:
            return _Advice(None, f"only {window.rounds} rounds with a draft in {window.seconds:.0f} s")
        return self._best(window, drafts)

    def _without_drafts(self, window: DemandWindow, now_s: float) -> _Advice:
        """Advise whether to start a draft while there is none to learn from."""
        trial = self._trial
        sessions = f"{window.sessions:.0f} sessions without a draft"
        if trial is None:
            return _Advice(1, sessions)
        if not 1 / _OTHER_LOAD < window.sessions / trial.sessions < _OTHER_LOAD:
            return _Advice(1, f"{sessions}, {trial.sessions:.0f} when speculation did not pay: tried anew")
        if now_s >= trial.next_s:
            return _Advice(
                1, f"speculation did not pay: after {self._pause_s(trial):.0f} s it is tried anew", at_once=True
            )
        return _Advice(0, f"speculation did not pay: tried anew in {trial.next_s - now_s:.0f} s")

    def _best(self, window: DemandWindow, drafts: int) -> _Advice:
        serving = window.drafts
        speed = speeds(window, max(self._most, serving, drafts) + 1)
        # Who waits for a place gains by every token, like those that run.
        cost = self._config.autoscale_draft_cost * window.sessions / max(window.sessions + window.waiting, 1.0)
        values = [tokens / (window.targets + cost * count) for count, tokens in enumerate(speed)]
        best = max(range(self._least, self._most + 1), key=values.__getitem__)
        if values[best] < (1 + _HYSTERESIS) * values[drafts]:
            best = drafts
        found = (
            f"{window.sessions:.0f} sessions on {_drafts(serving)} run {speed[serving]:.2f} times as fast as plain "
            f"({window.tokens_per_round:.2f} tokens a round, {window.levels_per_round:.1f} levels); "
        )
        if best == drafts:
            reason = found + f"{_drafts(drafts)} will do"
        elif best == 0:
            reason = found + "that does not pay for a draft"
        else:
            reason = found + f"{_drafts(best)} would make that {speed[best]:.2f}"
        gain = speed[serving + 1] / speed[serving] - 1
        at_once = self._is_trying and best == 0
        return _Advice(best, reason, speedup=speed[serving], gain_of_next=gain, at_once=at_once)

    # -------------------------------------------------------------------------------------------------------- trials

    def _note(self, wanted: int, drafts: int, advice: _Advice, now_s: float) -> None:
        """Remember that speculation was given up, or is tried, and that it pays after all."""
        if wanted != drafts:
            self._damping.note_change(wanted - drafts, now_s)
        sessions = self._samples[-1].sessions if self._samples else 0
        if wanted == 0 and drafts and advice.speedup is not None and sessions:
            failures = self._trial.failures + 1 if self._trial is not None else 0
            self._trial = _Trial(sessions, 0.0, failures)
            self._trial.next_s = now_s + self._pause_s(self._trial)
            self._is_trying = False
        elif wanted and not drafts:
            self._is_trying = self._trial is not None
        elif advice.speedup is not None and advice.drafts:
            self._trial, self._is_trying = None, False

    def _pause_s(self, trial: _Trial) -> float:
        return self._config.autoscale_probe_s * min(2**trial.failures, _MOST_PATIENCE)


def _drafts(count: int) -> str:
    return "1 draft" if count == 1 else f"{count} drafts"
