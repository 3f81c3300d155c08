"""Comparisons of a fault run before and after, and the troubles of its report: each of them can fail."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from benchmarks.faults import gauges as gauges_module
from benchmarks.faults.gauges import Gauges, differences, settled_gauges, until_equal
from benchmarks.faults.history import ChoiceWanted, End, Ended, History, check_all
from benchmarks.faults.processes import Cluster
from benchmarks.faults.report import Report
from benchmarks.faults.running import Outcome
from benchmarks.faults.schedule import FaultKind, PlannedFault

QUIET = Gauges(
    counts={"sessions": 0, "slots": 0, "tasks": 9, "threads": 4, "descriptors": 20, "Session objects": 2},
    tasks={"serve": 1, "watch": 8},
    descriptors={"pipe": 3, "TCP, port 50051, state 01": 17},
    resident_bytes=100 << 20,
    starts=1,
)
FAULT = PlannedFault(number=1, kind=FaultKind.KILL, role="target-0", gap_s=0.0, duration_s=1.0)
OUTCOME = Outcome(fault=FAULT, began_s=1.0, lifted_s=2.0, recovered_s=3.0)


def with_count(name: str, count: int) -> Gauges:
    return replace(QUIET, counts={**QUIET.counts, name: count})


@pytest.mark.parametrize("name", ["sessions", "slots", "tasks", "threads", "descriptors"])
@pytest.mark.parametrize("change", [1, -1])
def test_one_more_or_fewer_of_what_is_counted_is_a_difference(name, change):
    was = QUIET.counts[name]
    (words,) = differences({"draft-0": QUIET}, {"draft-0": with_count(name, was + change)})
    assert words.startswith(f"draft-0: {name} {was} before, {was + change} now")


def test_a_difference_says_of_what_and_no_difference_says_nothing():
    assert differences({"draft-0": QUIET}, {"draft-0": QUIET}) == []
    more = replace(with_count("tasks", 10), tasks={"serve": 2, "watch": 8})
    assert differences({"draft-0": QUIET}, {"draft-0": more}) == ["draft-0: tasks 9 before, 10 now (serve +1)"]
    # The last ones of a loop may stay; those of many requests may not.
    assert differences({"draft-0": QUIET}, {"draft-0": with_count("Session objects", 6)}) == []
    assert differences({"draft-0": QUIET}, {"draft-0": with_count("Session objects", 7)})
    assert differences({"draft-0": QUIET}, {"draft-0": with_count("ModelSession objects", 5)})


async def test_what_comes_back_late_is_waited_for_and_what_does_not_is_told(monkeypatch):
    readings = [with_count("sessions", 2), with_count("sessions", 1), QUIET]

    async def read(cluster):
        return {"draft-0": readings.pop(0) if len(readings) > 1 else readings[0]}

    monkeypatch.setattr(gauges_module, "read_gauges", read)
    monkeypatch.setattr(gauges_module, "_POLL_S", 0.0)
    cluster = cast("Cluster", None)
    assert await until_equal(cluster, {"draft-0": QUIET}, timeout_s=30) == []
    readings[:] = [with_count("tasks", 10), QUIET]
    assert await settled_gauges(cluster, timeout_s=30) == {"draft-0": QUIET}
    readings[:] = [with_count("sessions", 1)]
    assert await until_equal(cluster, {"draft-0": QUIET}, timeout_s=0.05) == ["draft-0: sessions 0 before, 1 now"]
    # What is held in the beginning would be as before for ever.
    with pytest.raises(TimeoutError, match="draft-0"):
        await settled_gauges(cluster, timeout_s=0.05)


def test_descriptors_are_counted_by_what_they_are():
    before = gauges_module._descriptors(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server, Path(os.devnull).open():
        now = gauges_module._descriptors(os.getpid())
        kind = f"TCP, port {server.getsockname()[1]}, state 0A"
    assert now[kind] == 1
    assert now["/dev/null"] == before.get("/dev/null", 0) + 1


# Three tasks that nobody ends, one that has ended, and two sessions, of a module of ours, in a list that only grows.
LEAKING = """
import asyncio

class Session:
    __module__ = "outrider.coordinator.sessions.session"

async def leaked():
    await asyncio.Event().wait()

async def main():
    kept = [Session(), Session(), *[asyncio.create_task(leaked()) for _ in range(3)]]
    await asyncio.create_task(asyncio.sleep(0))
    print("ready", flush=True)
    await leaked()

asyncio.run(main())
"""


def test_a_role_tells_what_it_has_left_behind(tmp_path):
    path = tmp_path / "role.socket"
    folder = Path(gauges_module.__file__).parent / "in_role"
    environment = {**os.environ, "PYTHONPATH": str(folder), "OUTRIDER_FAULTS_SOCKET": str(path)}
    with subprocess.Popen([sys.executable, "-c", LEAKING], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with socket.socket(socket.AF_UNIX) as asker:
                asker.settimeout(30)
                asker.connect(str(path))
                told = json.loads(asker.makefile("rb").read())
        finally:
            process.kill()
    assert told["tasks"] == {"leaked": 3, "main": 1}
    assert told["objects"] == {"Session": 2}


def troubles(**changes) -> list[str]:
    return Report(seed=1, command="again", **changes).troubles


def test_every_kind_of_trouble_is_in_the_report():
    assert troubles(outcomes=[OUTCOME], memory={"draft-0": 1.05}) == []
    (late,) = troubles(outcomes=[replace(OUTCOME, recovered_s=None)])
    assert "SIGKILL of target-0" in late
    assert troubles(outcomes=[replace(OUTCOME, trouble="it would not start")])
    assert troubles(crashes=["draft-0 ended by itself"]) == ["draft-0 ended by itself"]
    assert troubles(gauges=["draft-0: sessions 0 before, 1 now"])
    assert troubles(memory={"draft-0": 1.06}) == ["draft-0: its memory is 106% of what it was"]
    history = History(name="request 1", script="script 1", client="wire")
    wanted = {"script 1": [ChoiceWanted(token_ids=(5,), text="a", finish_reason="stop")]}
    assert troubles(violations=check_all([history], wanted))


def test_poison_has_to_be_possible():
    history = History(name="request 1", script="script 1", client="wire", began_s=10.0)
    history.add(Ended(end=End.REFUSED, at_s=20.0))
    first, second = (replace(OUTCOME, began_s=at_s) for at_s in (11.0, 19.0))
    assert troubles(histories=[history], outcomes=[first, second]) == []
    frozen = replace(second, fault=replace(FAULT, kind=FaultKind.FREEZE))
    of_a_draft = replace(second, fault=replace(FAULT, role="draft-0"))
    for other in (frozen, of_a_draft, replace(second, began_s=21.0), replace(second, began_s=1.0)):
        (words,) = troubles(histories=[history], outcomes=[first, other])
        assert "request 1" in words
    assert Report(seed=1, command="again", outcomes=[first, replace(second, hit=False)]).totals()["faults"] == 1
