"""The autoscaler on virtual time, before a model of the service: seconds are steps of a loop."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from outrider.deploy.autoscaler import Autoscaler, Decision
from outrider.deploy.config import DeployConfig
from outrider.v1 import generation_pb2, registry_pb2

FOUR = DeployConfig(max_drafts=4)
ROUND_S = 0.01
STEPS_A_ROUND = 8
# A draft this wrong makes rounds longer, and no session faster.
USELESS = 0.9


@dataclass
class Service:
    """Targets, drafts and coordinators by simple laws.

    A round takes 10 ms, or `plain_s` without trees; a draft's step, an eighth of that, grows `nodes` of its sessions
    by a level. A token takes a level; `missed` of the tokens end a round because the draft was wrong.
    """

    start_s: int = 3
    missed: float = 0.1
    plain_s: float = 0.0095
    coordinators: int = 1
    places: int = 64
    nodes: int = 2
    drafts: int = 1
    starting: list[int] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    at_s: int = 0

    def wants(self, drafts: int) -> None:
        """As the controller would do: new ones take their time, old ones end at once."""
        missing = drafts - self.drafts - len(self.starting)
        self.starting += [self.at_s + self.start_s] * max(0, missing)
        for _ in range(max(0, -missing)):
            if self.starting:
                self.starting.pop()
            else:
                self.drafts -= 1

    def second(self, sessions: int) -> list[generation_pb2.ServerInfo]:
        """A second goes by; what the coordinators say then."""
        self.at_s += 1
        self.drafts += sum(at_s <= self.at_s for at_s in self.starting)
        self.starting = [at_s for at_s in self.starting if at_s > self.at_s]
        drafted = min(sessions, self.drafts * self.places)
        rounds = drafted / ROUND_S
        if rounds:
            levels = STEPS_A_ROUND * min(1.0, self.nodes * self.drafts / drafted)
            tokens = rounds * max(1.0, 1 / (self.missed + 1 / levels))
            self._count(
                rounds=rounds, tokens=tokens, missed_rounds=self.missed * tokens, grown_sessions=levels * rounds
            )
            steps = STEPS_A_ROUND / ROUND_S * self.drafts
            self._count(draft_steps=steps, draft_ns=1e9 * self.drafts, expanded_nodes=self.nodes * steps)
        self._count(target_ns=1e9, plain_ns=1e9 * self.plain_s / ROUND_S, steps=1 / ROUND_S)
        return [self._info(number, sessions) for number in range(self.coordinators)]

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self.counters[name] = self.counters.get(name, 0.0) + value

    def _info(self, number: int, sessions: int) -> generation_pb2.ServerInfo:
        info = generation_pb2.ServerInfo(incarnation=number + 1, uptime_s=float(self.at_s))
        for name, value in self.counters.items():
            # A draft's step tells every coordinator of its own sessions.
            part = int(value if name in {"draft_steps", "draft_ns"} else value / self.coordinators)
            if name == "steps":
                info.steps_total = part
            else:
                setattr(info.draft_demand, f"{name}_total", part)
        info.draft_demand.sessions = sessions // self.coordinators
        drafted = min(info.draft_demand.sessions, self.drafts * self.places // self.coordinators)
        info.draft_demand.undrafted_sessions = info.draft_demand.sessions - drafted
        roles = {"target": registry_pb2.WORKER_ROLE_TARGET}
        roles |= {f"draft-{number}": registry_pb2.WORKER_ROLE_DRAFT for number in range(self.drafts)}
        for worker_id, role in roles.items():
            worker = info.workers.add(state="serving")
            worker.introduction.worker_id, worker.introduction.role = worker_id, role
            worker.introduction.limits.max_sessions = self.places
        return info


def play(
    service: Service,
    sessions: Iterable[int],
    *,
    config: DeployConfig = FOUR,
    heard: Callable[[int, list[generation_pb2.ServerInfo]], list[generation_pb2.ServerInfo]] = lambda _, infos: infos,
) -> list[Decision]:
    """A decision each second, of what is `heard` of the service's answers."""
    scaler, wanted, decisions = Autoscaler(config), service.drafts, []
    for second, now in enumerate(sessions):
        infos = heard(second, service.second(now))
        decisions.append(scaler.decide(infos, drafts=wanted, now_s=float(second)))
        wanted = decisions[-1].drafts
        service.wants(wanted)
    return decisions


def counts(decisions: Iterable[Decision]) -> list[int]:
    return [decision.drafts for decision in decisions]


def changes(decisions: Iterable[Decision]) -> int:
    return sum(before != after for before, after in pairwise(counts(decisions)))


def test_a_load_that_grows_has_the_most_drafts_within_15_s_and_gives_them_back_slowly():
    service = Service()
    decisions = play(service, [1] * 40 + [12] * 60 + [1] * 70)
    drafts = counts(decisions)
    served = [decision.serving for decision in decisions]
    assert set(drafts[10:40]) == {1}
    assert drafts[46] == 4
    assert served[40 + 15] == 4  # a worker takes 3 s to start
    assert set(drafts[46 : 100 + 28]) == {4}
    assert drafts[100 + 50] == 1
    assert changes(decisions[100:]) == 3
    assert "4 drafts would make that" in next(own.reason for own in decisions if own.drafts == 4)
    assert decisions[60].speedup == pytest.approx(0.95 / (0.1 + 3 / 16), rel=1e-2)


def test_a_load_that_flaps_changes_nothing_after_the_first_peak():
    drafts = counts(play(Service(), ([12] * 6 + [2] * 6) * 15))
    assert set(drafts[12:]) == {4}


def test_a_count_that_is_raised_soon_after_it_was_lowered_is_lowered_later_the_next_time():
    decisions = play(Service(), ([12] * 10 + [2] * 50) * 10)
    drafts = counts(decisions)
    first, rest = decisions[:120], decisions[-240:]
    assert changes(first) > 2
    assert changes(rest) <= changes(first)
    assert set(drafts[-120:]) == {4}


def test_speculation_that_does_not_pay_is_given_up_and_tried_anew_ever_more_rarely():
    decisions = play(Service(missed=USELESS), [4] * 1200)
    drafts = counts(decisions)
    assert drafts[:30] == [1] * 30
    assert drafts[40] == 0
    starts = [at for at, (before, after) in enumerate(pairwise(drafts), start=1) if after > before]
    assert 120 <= starts[0] - 31 <= 125
    assert 240 <= starts[1] - starts[0] <= 250
    assert 480 <= starts[2] - starts[1] <= 490
    assert 5 < sum(drafts[150:290]) <= 15
    assert "does not pay" in next(own.reason for own in decisions if own.drafts == 0)


def test_speculation_that_pays_again_is_found_by_the_trial_or_by_another_load():
    for later, sessions, seconds in ((0.1, 4, 150), (USELESS, 1, 20)):
        service = Service(missed=USELESS)
        scaler, wanted, drafts = Autoscaler(FOUR), 1, []
        for second in range(60 + seconds):
            if second == 60:
                service.missed = later
            infos = service.second(4 if second < 60 else sessions)
            wanted = scaler.decide(infos, drafts=wanted, now_s=float(second)).drafts
            service.wants(wanted)
            drafts.append(wanted)
        assert drafts[59] == 0
        assert drafts[-1] >= 1 or later == USELESS
        assert max(drafts[60:]) >= 1


def test_without_sessions_the_fewest_are_kept_and_the_first_session_gets_a_draft_at_once():
    decisions = play(Service(), [4] * 10 + [0] * 60 + [4] * 20)
    assert counts(decisions)[69] == 0
    assert counts(decisions)[74] >= 1


@pytest.mark.parametrize("lost", ["all", "one", "stale"])
def test_signals_that_are_lost_change_nothing(lost):
    service = Service(coordinators=2)
    old: list[generation_pb2.ServerInfo] = []

    def heard(second: int, infos: list[generation_pb2.ServerInfo]) -> list[generation_pb2.ServerInfo]:
        if not 20 <= second < 28:
            return infos
        old.append(infos[0])
        return {"all": [], "one": infos[:1], "stale": [old[0], infos[1]]}[lost]

    decisions = play(service, [2] * 20 + [12] * 20, heard=heard)
    drafts = counts(decisions)
    # The first of the lost answers may still be news.
    assert set(drafts[15:28]) == {drafts[15]}
    assert drafts[15] < 4
    assert drafts[-1] == 4
    assert "coordinator" in decisions[25].reason


def test_sessions_that_find_no_place_at_a_draft_are_worth_one():
    # A draft that keeps up with all of them, if only it takes them.
    config = DeployConfig(max_drafts=8)
    assert counts(play(Service(nodes=64, places=64), [12] * 30, config=config))[-1] == 1
    assert counts(play(Service(nodes=64, places=4), [12] * 30, config=config))[-1] == 3


def test_requests_that_wait_make_a_draft_worth_more():
    def advised(waiting: int) -> int:
        def heard(second: int, infos: list[generation_pb2.ServerInfo]) -> list[generation_pb2.ServerInfo]:
            infos[0].waiting_requests = waiting
            return infos

        config = DeployConfig(max_drafts=8, autoscale_draft_cost=0.2)
        return play(Service(), [12] * 20, config=config, heard=heard)[-1].drafts

    assert advised(0) < advised(36)


def test_several_coordinators_decide_as_one_does():
    load = [4] * 20 + [12] * 20
    assert counts(play(Service(coordinators=2), load)) == counts(play(Service(), load))


def test_min_and_max_hold_whatever_is_advised():
    bounds = DeployConfig(min_drafts=2, drafts=2, max_drafts=3)
    assert set(counts(play(Service(), [12] * 20 + [0] * 60, config=bounds))[1:]) == {2, 3}
