"""A short run of faults against real processes: clients hear what they would have heard, and nothing is left."""

from collections import Counter

import pytest
from benchmarks.faults.gauges import settled_gauges, until_equal
from benchmarks.faults.history import End, ToldDelta, check_all
from benchmarks.faults.load import Habit, Load, make_scripts, without_faults
from benchmarks.faults.processes import Cluster, ClusterOptions
from benchmarks.faults.proxy import BOTH, Conditions
from benchmarks.faults.running import FaultRun
from benchmarks.faults.schedule import FaultKind, PlannedFault, make_schedule

ROLES = ["target-0", "target-1", "draft-0", "draft-1", "coordinator-0", "coordinator-1"]


def test_a_seed_gives_the_same_faults_again_and_all_roles_and_kinds_have_their_share():
    schedule = make_schedule(300, ROLES, seed=11)
    assert schedule == make_schedule(300, ROLES, seed=11)
    assert schedule != make_schedule(300, ROLES, seed=12)
    hits = Counter(fault.role.partition("-")[0] for fault in schedule)
    assert set(hits.values()) == {100}
    assert set(Counter(fault.role for fault in schedule)) == set(ROLES)
    assert {fault.kind for fault in schedule} == set(FaultKind)
    assert not any(
        fault.kind is FaultKind.PARTITION_DATA and fault.role.startswith("coordinator") for fault in schedule
    )


def test_scripts_are_mixed_and_of_their_seed():
    scripts = make_scripts(200, seed=5)
    assert scripts == make_scripts(200, seed=5)
    temperatures = Counter(script.options["temperature"] for script in scripts)
    assert {0.0, 0.7, 1.0} == set(temperatures)
    assert 10 < sum(script.choices > 1 for script in scripts) < 100
    assert len({script.options["seed"] for script in scripts}) == 200


def fault(number: int, kind: FaultKind, role: str, *, gap_s: float, duration_s: float, **more) -> PlannedFault:
    return PlannedFault(number=number, kind=kind, role=role, gap_s=gap_s, duration_s=duration_s, **more)


# Frozen and cut off for longer and for shorter than a lease; what takes longest to come back is hit first.
SHORT = [
    fault(1, FaultKind.KILL, "draft-0", gap_s=0.3, duration_s=0.0),
    fault(2, FaultKind.KILL, "coordinator-0", gap_s=0.5, duration_s=0.0),
    fault(3, FaultKind.PARTITION_DATA, "target-0", gap_s=0.5, duration_s=1.0, conditions=Conditions(held=BOTH)),
    fault(4, FaultKind.RESET, "target-0", gap_s=0.1, duration_s=0.2),
    fault(5, FaultKind.BLOCKED_LOG, "coordinator-1", gap_s=0.1, duration_s=1.0),
    fault(6, FaultKind.FREEZE, "target-0", gap_s=0.1, duration_s=2.5),
    fault(7, FaultKind.DELAY, "draft-0", gap_s=0.1, duration_s=0.5, conditions=Conditions(delay_s=0.02, jitter_s=0.05)),
    fault(8, FaultKind.FREEZE, "draft-0", gap_s=0.1, duration_s=0.5),
]


@pytest.mark.slow
async def test_faults_lose_double_and_change_nothing(tmp_path):
    said: list[str] = []
    scripts = make_scripts(6, seed=1, longest=48)
    options = ClusterOptions(
        folder=tmp_path,
        targets=1,
        drafts=1,
        # So many faults in so little time: nobody waits for the end of a quarantine here.
        coordinator_args=["--quarantine-losses", "100"],
        seed=3,
    )
    async with Cluster(options) as cluster:
        wanted = await without_faults(cluster.endpoints[1], scripts)
        before = await settled_gauges(cluster, timeout_s=100)
        load = Load(cluster.endpoints, scripts, clients=3, seed=1, pause_s=0.5)
        faults = FaultRun(cluster, SHORT, at_once=4, say=said.append)
        await load.until_asked()
        await faults.run()
        await load.stop()
        left = await until_equal(cluster, before, timeout_s=100)
    assert [str(violation) for violation in check_all(load.histories, wanted)] == []
    assert faults.crashes == []
    assert [outcome.trouble for outcome in faults.outcomes] == [""] * len(SHORT), said
    # Descriptors and tasks of processes that were restarted, too.
    assert left == []
    ends = Counter(history.end.end for history in load.histories if history.end is not None)
    assert ends[End.FINISHED] >= 5, ends
    # Or it was no test: clients of more than one kind, streams that broke, tokens that came all the same.
    assert len({history.client.partition(",")[0] for history in load.histories} & {str(h.value) for h in Habit}) > 2
    assert sum(history.resumes for history in load.histories) > 0
    assert any(isinstance(event, ToldDelta) for history in load.histories for event in history.events)
