"""The growth loop: commands in, growth and failures out to their owners, holds, and its end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.draft_worker.table_model import VOCAB, Bench, session_start, sync_start

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.rounds import loop as loop_module
from outrider.draft_worker.rounds.commands import (
    CloseCommand,
    Command,
    CommitCommand,
    HoldCommand,
    LeaveCommand,
    ResendCommand,
)
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.loop import GrowthLoop
from outrider.draft_worker.rounds.session import SessionStart
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import CommitMismatch, InvalidRequest, OutriderError, Superseded
from outrider.front.inbox import Inbox

_LONG_S = 60


class Owner:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.growths: list[Growth] = []
        self.sessions: list[SessionGrowth] = []
        self.failures: list[tuple[int, int, type[OutriderError]]] = []
        self._changed = threading.Condition()

    def deliver(self, growth: Growth) -> None:
        with self._changed:
            self.growths.append(growth)
            self.sessions += sessions_of(growth)
            self._changed.notify_all()

    def fail(self, session_id: int, epoch: int, error: OutriderError) -> None:
        with self._changed:
            self.failures.append((session_id, epoch, type(error)))
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, _LONG_S)

    def until_grown(self, as_of: int, session_id: int = 1) -> None:
        self.until(lambda: any((own.session_id, own.as_of) == (session_id, as_of) for own in self.sessions))


@contextmanager
def running(drafters: Drafters) -> Iterator[GrowthLoop]:
    with closing(Inbox[Command]()) as inbox:
        loop = GrowthLoop(lambda: drafters, inbox)
        loop.start()
        assert loop.ready.result(_LONG_S) is drafters
        yield loop
        loop.stop()
        loop.stopped.result(_LONG_S)


def opening(owner: Owner, number: int = 1, **fields: Any) -> SessionStart:
    return session_start(number, owner=owner, **fields)


def test_growth_goes_to_the_owner_of_its_session():
    one, other = Owner(), Owner()
    drafters = Drafters(Bench().drafter, None)
    with running(drafters) as loop:
        loop.submit([opening(one, 1), opening(other, 2, prompt=[4, 5]), opening(one, 3, prompt=[6])])
        one.until_grown(3, 1)
        one.until_grown(1, 3)
        other.until_grown(2, 2)
        loop.submit([CommitCommand(one, (7, 1), 1, 3, [9]), CloseCommand(other, (7, 2), 1)])
        one.until_grown(4)
    assert {own.session_id for own in one.sessions} == {1, 3}
    assert {own.session_id for own in other.sessions} == {2}
    assert drafters.num_sessions == 2
    assert not one.failures
    load = loop.load()
    assert (load.sessions, load.slots_total) == (2, 600)
    assert load.steps >= len(one.growths)
    assert load.slots_used > 0 < load.busy <= 1
    assert loop.counts.verify_steps == drafters.steps


def test_failures_go_to_whoever_commanded_and_the_others_go_on():
    faulty, other = Owner(), Owner()
    with running(Drafters(Bench().drafter, None)) as loop:
        loop.submit([opening(faulty, epoch=2), opening(other, 2), opening(faulty, 3, prompt=[VOCAB])])
        loop.submit([opening(faulty, epoch=1), CommitCommand(faulty, (7, 1), 1, 3, [9])])
        loop.submit([CommitCommand(faulty, (7, 1), 2, 9, [9]), CommitCommand(other, (7, 2), 1, 3, [9])])
        other.until_grown(4, 2)
    assert faulty.failures == [(3, 1, InvalidRequest), (1, 1, Superseded), (1, 1, Superseded), (1, 2, CommitMismatch)]
    assert not other.failures


def test_sessions_rest_once_much_of_their_growth_is_not_read_and_the_others_go_on(
    ngram: NgramDrafter, monkeypatch: pytest.MonkeyPatch
):
    unread, other = Owner(), Owner()
    monkeypatch.setattr(loop_module, "_MOST_GATHERED", 1)
    with running(Drafters(Bench().drafter, ngram)) as loop:
        loop.submit([opening(unread, 1), opening(other, 2)])
        unread.until_grown(3, 1)
        loop.submit([HoldCommand(unread, is_held=True), CommitCommand(unread, (7, 1), 1, 3, [3, 1])])
        while not loop.holds:
            time.sleep(0.001)
        # One that is opened meanwhile rests as well, and so does one that is opened anew.
        loop.submit([opening(unread, 3, prompt=[3, 1]), opening(unread, 3, prompt=[3, 1, 4], epoch=2)])
        loop.submit([CommitCommand(other, (7, 2), 1, 3, [9])])
        other.until_grown(4, 2)
        loop.submit([CommitCommand(other, (7, 2), 1, 4, [9])])
        other.until_grown(5, 2)
        assert {(own.session_id, own.as_of) for own in unread.sessions} == {(1, 3)}
        assert loop.holds == 1
        loop.submit([HoldCommand(unread, is_held=False)])
        unread.until_grown(5, 1)
        unread.until_grown(3, 3)
        # Whoever leaves is not held any more when it comes again.
        loop.submit([HoldCommand(unread, is_held=True), LeaveCommand(unread)])
        loop.submit([opening(unread, 4, prompt=(1, 2))])
        unread.until_grown(2, 4)
    assert {(own.session_id, own.as_of) for own in unread.sessions} == {(1, 3), (1, 5), (3, 3), (4, 2)}


def test_who_waits_for_slots_needs_no_command_to_go_on():
    owner = Owner()
    with running(Drafters(Bench(num_slots=100).drafter, None)) as loop:
        loop.submit([opening(owner, 1, prompt=[1] * 60)])
        owner.until_grown(60, 1)
        loop.submit([opening(owner, 2, prompt=[2] * 60), opening(owner, 3, prompt=[3] * 10)])
        # The eldest needs what the third holds.
        owner.until_grown(10, 3)
        loop.submit([CommitCommand(owner, (7, 1), 1, 60, [4] * 35)])
        owner.until_grown(95, 1)
        loop.submit([CloseCommand(owner, (7, 1), 1)])
        owner.until_grown(60, 2)


def test_it_sleeps_when_there_is_nothing_to_do():
    class Counting(Drafters):
        advances = 0

        def advance(self, *arguments: Any) -> Iterator[Growth]:
            self.advances += 1
            return super().advance(*arguments)

    owner, drafters = Owner(), Counting(Bench().drafter, None)
    with running(drafters) as loop:
        loop.submit([sync_start(owner=owner)])
        owner.until_grown(3)
        loop.submit([])
        before = -1
        # Once it has seen that there is nothing it does not look again; one that looked on would count for ever.
        while drafters.advances != before:
            before = drafters.advances
            time.sleep(0.05)
        assert (loop.watch.age_s, loop.watch.is_preparing, loop.waiting) == (0, False, 0)
    assert [own.complete for own in owner.sessions] == [True]


def test_it_says_since_when_a_step_has_been_running():
    bench, owner = Bench(), Owner()
    began, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        began.set()
        assert goes_on.wait(_LONG_S)

    bench.model.on_step = stop
    with running(Drafters(bench.drafter, None)) as loop:
        assert loop.watch.age_s == 0
        loop.submit([opening(owner)])
        assert began.wait(_LONG_S)
        assert loop.watch.age_s > 0
        goes_on.set()
        owner.until_grown(3)


def test_a_tree_is_sent_again_behind_the_growth_of_a_step_under_way():
    bench, owner = Bench(), Owner()
    began, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        if len(bench.model.steps) == 3:
            began.set()
            assert goes_on.wait(_LONG_S)

    bench.model.on_step = stop
    with running(Drafters(bench.drafter, None)) as loop:
        loop.submit([opening(owner)])
        assert began.wait(_LONG_S)
        loop.submit([ResendCommand(owner, (7, 9), 1), ResendCommand(owner, (7, 1), 1)])
        goes_on.set()
        owner.until(lambda: len(owner.sessions) > 4)
    place = next(place for place, own in enumerate(owner.sessions) if own.again)
    before, (tree, *after) = owner.sessions[:place], owner.sessions[place:]
    # The step's growth and all before is in it, and nothing of later.
    assert tree.node_ids == [node_id for own in before for node_id in own.node_ids]
    assert tree.parents == [parent for own in before for parent in own.parents]
    assert len(before) == 3
    known = {0, *tree.node_ids}
    for own in after:
        assert not known & set(own.node_ids)
        known.update(own.node_ids)
        assert known >= set(own.parents)
    assert not owner.failures


def test_a_worker_without_a_model_answers(ngram: NgramDrafter, song: list[int]):
    owner = Owner()
    with running(Drafters(None, ngram)) as loop:
        loop.submit([opening(owner, prompt=song[:2])])
        owner.until_grown(2)
        loop.submit([CommitCommand(owner, (7, 1), 1, 2, song[2:4])])
        owner.until_grown(4)
        assert (loop.load().steps, loop.load().slots_total) == (2, 0)
    assert {growth.source for growth in owner.growths} == {GrowthSource.NGRAM}
    # Matches are no steps of a model.
    assert loop.counts.verify_steps == 0


@pytest.mark.parametrize("loads", [False, True])
def test_an_error_ends_the_thread_with_its_reason(*, loads: bool):
    bench, owner = Bench(), Owner()

    def fail() -> Any:
        raise RuntimeError("out of memory")

    bench.model.on_step = fail
    with closing(Inbox[Command]()) as inbox:
        loop = GrowthLoop((lambda: Drafters(bench.drafter, None)) if loads else fail, inbox)
        loop.start()
        loop.submit([opening(owner)])
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.stopped.result(_LONG_S)
    if loads:
        loop.ready.result(0)
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.ready.result(0)
    assert not owner.growths


class Steps(Drafters):
    """Drafters whose steps a test says, one for each `advance`; under way until the last has ended."""

    def __init__(self, *steps: Growth) -> None:
        super().__init__(Bench().drafter, None)
        self._steps, self._goes_on = list(steps), False

    @property
    def is_busy(self) -> bool:
        return self._goes_on

    def advance(self, *_arguments: Any) -> Iterator[Growth]:
        self._goes_on = len(self._steps) > 1
        return iter([self._steps.pop(0)] if self._steps else [])


def _step(owner: Owner, number: int, **fields: Any) -> Growth:
    growth = Growth(rows=1, step_ns=1, num_sessions=1)
    growth.add(opening(owner, number), 3, [number], [0], [5], [0.5], **fields)
    return growth


def test_growth_of_steps_that_follow_closely_leaves_together_and_in_order(monkeypatch: pytest.MonkeyPatch):
    owner = Owner()
    # None leaves before the last step has ended, but the first, and what stands before growth that says more.
    monkeypatch.setattr(loop_module, "_BETWEEN_MESSAGES_NS", 10**15)
    steps = [_step(owner, number, complete=number == 4) for number in range(1, 8)]
    with running(Steps(*steps)) as loop:
        loop.submit([])
        owner.until(lambda: len(owner.sessions) == len(steps))
    assert [part.session_id for part in owner.sessions] == [1, 2, 3, 4, 5, 6, 7]
    assert [growth.steps for growth in owner.growths] == [1, 2, 1, 3]
    assert loop.counts.verify_steps == len(steps)


def test_growth_leaves_at_once_where_the_last_left_long_ago(monkeypatch: pytest.MonkeyPatch):
    owner = Owner()
    monkeypatch.setattr(loop_module, "_BETWEEN_MESSAGES_NS", 0)
    with running(Steps(*(_step(owner, number) for number in range(1, 5)))) as loop:
        loop.submit([])
        owner.until(lambda: len(owner.sessions) == 4)
    assert [growth.steps for growth in owner.growths] == [1, 1, 1, 1]


def test_growth_gathers_while_its_owner_has_not_read_what_came_before():
    unread, other = Owner(), Owner()
    steps = [_step(owner, number, complete=number == 5) for number in range(1, 8) for owner in (unread, other)]
    with running(Steps(*steps)) as loop:
        loop.submit([HoldCommand(unread, is_held=True)])
        other.until(lambda: len(other.sessions) == 7)
        loop.submit([])
        assert not unread.growths
        loop.submit([HoldCommand(unread, is_held=False)])
        unread.until(lambda: len(unread.sessions) == 7)
    assert [part.session_id for part in unread.sessions] == [1, 2, 3, 4, 5, 6, 7]
    assert [growth.steps for growth in unread.growths] == [4, 1, 2]
    assert not loop.holds


class Working(Drafters):
    """Drafters whose device works until a test has seen enough; counts commits between two looks."""

    def __init__(self) -> None:
        super().__init__(Bench().drafter, None)
        self.goes_on, self.commits, self.asks = True, [0], list[Any]()

    @property
    def is_busy(self) -> bool:
        return self.goes_on

    def commit(self, *_arguments: Any) -> None:
        self.commits[-1] += 1

    def advance(self, left_out: Any = ()) -> Iterator[Growth]:
        self.asks.append(left_out)
        if self.commits[-1]:
            self.commits.append(0)
        return iter(())


@pytest.mark.parametrize(("commits", "at_a_look"), [(20_000, [19_488] + [32] * 16), (320, [32] * 10)])
def test_commits_are_never_far_behind_however_busy_the_device_is(commits: int, at_a_look: list[int]):
    drafters, owner = Working(), Owner()
    with running(drafters) as loop:
        loop.submit([CommitCommand(owner, (7, 1), 1, 3, [9])] * commits)
        while sum(drafters.commits) < commits:
            time.sleep(0.001)
        drafters.goes_on = False
    assert [count for count in drafters.commits if count] == at_a_look
    # Without n-grams nobody asks which sessions have commits that wait.
    assert not any(drafters.asks)
    assert loop.waiting == 0
