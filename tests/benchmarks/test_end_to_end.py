"""The end-to-end benchmark: its cells, what its figures are made of, and a tiny run of it all."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.end_bench import command
from benchmarks.end_bench.cells import Cell, Plan, Setup, cells_of, setups_of
from benchmarks.end_bench.driving import Driven, Load, Round
from benchmarks.end_bench.figures import CellFigures, RoundFigures, Totals, as_dicts
from benchmarks.end_bench.links import LISTENING, PROXIED, Links
from benchmarks.end_bench.options import parse, plan_of, service_options
from benchmarks.end_bench.prompts import Answer, CategoryFigures, Prompts, by_category, prompts_of
from benchmarks.end_bench.services import places_of, visible_devices
from tests.chat_llama import write_chat_llama

from outrider.coordinator.bench.prompts import DEFAULT_FILE, read_prompts
from outrider.v1 import generation_pb2, registry_pb2

MS = 1_000_000


APART, SHARED, REPLICAS, RESIDENT = map(Setup.named, ("1+1", "shared", "0+2", "resident"))
THREE_TARGETS = Setup.named("1+3")


def plan(**changes: Any) -> Plan:
    return Plan(**{"sessions": [4], "temperatures": [0.0], "modes": ["async", "off"], "setups": [APART]} | changes)


def test_cells_are_those_asked_for_and_what_they_are_compared_with_comes_first():
    assert [(cell.setup, cell.mode) for cell in cells_of(plan())] == [(APART, "off"), (APART, "async")]
    everything = plan(setups=[REPLICAS, APART, THREE_TARGETS, SHARED, RESIDENT], baselines_at=[1.0], synthetic=(0.5,))
    found = [(cell.setup, cell.mode, cell.synthetic, cell.gpus) for cell in cells_of(everything)]
    assert found[2:] == [
        (APART, "async", (0.5,), 2),
        (REPLICAS, "off", (), 2),
        (THREE_TARGETS, "async", (), 4),
        (SHARED, "async", (), 1),
        (RESIDENT, "async", (), 1),
    ]
    assert [cell.gpus for cell in cells_of(plan())] == [1, 2]
    assert [cell.gpus for cell in cells_of(plan(gpus=1))] == [1, 1]
    # Two drafts for one target of two GPUs.
    assert [cell.gpus for cell in cells_of(plan(setups=[Setup.named("2+1")], target_gpus=2))] == [2, 4]
    alone = cells_of(plan(setups=[SHARED], baselines_at=[0.0]))
    assert [(cell.setup, cell.mode, cell.gpus) for cell in alone] == [(SHARED, "off", 1), (SHARED, "async", 1)]
    assert len(cells_of(plan(sessions=[1, 1]))) == 2
    longer = cells_of(plan(modes=["async"], round_trips=[1.0, 3.0]))
    assert [(cell.link, cell.added_ms) for cell in longer] == [
        ("", 0.0), ("draft", 1.0), ("draft", 3.0), ("target", 1.0), ("target", 3.0)
    ]  # fmt: skip
    assert longer[1].name == "async 1+1 1 ms to draft, 4 sessions, temperature 0"
    assert [cell.sessions for cell in cells_of(plan(setups=[REPLICAS], baselines_at=[0.0], sessions=[1, 2]))] == [2]
    assert setups_of(cells_of(everything)) == [APART, REPLICAS, THREE_TARGETS, SHARED, RESIDENT]
    alone = cells_of(plan(synthetic=(0.5,), only_synthetic=True))
    assert [(cell.mode, cell.synthetic) for cell in alone] == [("off", ()), ("async", (0.5,))]
    several = cells_of(plan(coordinators=(2, 1)))
    assert [cell.coordinators for cell in several] == [2, 2, 1, 1]
    assert several[0].name == "off 1+1 2 coordinators, 4 sessions, temperature 0"


def test_the_command_line_fills_in_what_a_device_can_do():
    assert plan_of(parse([])).setups == [APART]
    on_gpu = parse(["--device", "cuda", "--temperatures", "0", "1"])
    assert plan_of(on_gpu).setups == [APART, SHARED, REPLICAS]
    assert plan_of(on_gpu).baselines_at == [0, 1]
    options = service_options(parse(["--sessions", "1", "8"]), setups=3, most_s=7)
    assert options.start_timeout_s == 7
    # Eight sessions of one coordinator, and a place that it leaves to each of the others.
    assert options.worker_args == ["--max-num-seqs", "10"]
    several = service_options(parse(["--sessions", "8", "--coordinators", "1", "2"]), setups=3, most_s=7)
    assert (several.coordinators, several.worker_args) == (2, ["--max-num-seqs", "13"])
    for wrong in (["--target", "somewhere"], ["--coordinators", "0"], ["--prompt-count", "0"], ["--only-synthetic"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_workers_stand_on_gpus_of_their_own_unless_there_is_one():
    def standing(name: str, **options: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(place.name, place.gpus) for place in places_of(Setup.named(name), **options)]

    assert standing("1+3") == [("target-0", (0,)), ("target-1", (1,)), ("target-2", (2,)), ("draft-3", (3,))]
    assert standing("2+1", target_gpus=2) == [("target-0", (0, 1)), ("draft-2", (2,)), ("draft-3", (3,))]
    assert standing("shared") == [("target-0", (0,)), ("draft-0", (0,))]
    assert standing("resident") == [("resident-0", (0,))]
    assert standing("2xresident") == [("resident-0", (0,)), ("resident-1", (1,))]
    for name in ("1+0", "many", "", "1+3+1", "0xresident"):
        with pytest.raises(ValueError, match="shared, resident, 4xresident, or DRAFTS"):
            Setup.named(name)
    with pytest.raises(SystemExit):
        parse(["--setups", "apart"])


def test_a_links_round_trips_are_longer_and_no_others():
    with Links() as links, socket.socket() as target, socket.socket() as draft:
        ends = {}
        for role, listener in (("target", target), ("draft", draft)):
            port = int(links.add(role)[1])
            listener.bind((LISTENING, port))
            listener.listen()
            near = socket.create_connection((PROXIED, port))
            ends[role] = near, listener.accept()[0]

        near, far = ends["target"]
        links.lengthen("target", 30)
        for _ in range(3):
            began = time.perf_counter()
            near.sendall(b"?")
            far.sendall(far.recv(1))
            assert near.recv(1) == b"?"
            assert time.perf_counter() - began >= 0.03
        links.lengthen("draft", 100_000)
        for end, _ in ends.values():
            end.sendall(b"?")
        far.sendall(far.recv(1))
        assert near.recv(1) == b"?"
        # Asked before the target was, and far from there when the target has answered.
        _, far = ends["draft"]
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        for end in (end for pair in ends.values() for end in pair):
            end.close()


def test_long_prompts_are_made_of_several():
    whole = prompts_of(None, None).token_ids
    assert prompts_of(len(whole[3]) + 2, None).token_ids[3] == [*whole[3], *whole[4][:2]]
    assert {len(prompt) for prompt in prompts_of(300, None).token_ids} == {300}
    # Longer than all of them together.
    longest = prompts_of(32768, None, most=2).token_ids
    assert [len(prompt) for prompt in longest] == [32768, 32768]
    assert longest[1][:9] == whole[1][:9]
    assert prompts_of(None, None, most=3).token_ids == whole[:3]


def test_answers_are_counted_by_category():
    answers = [Answer("code", 30, 10, 2.0), Answer("chat", 7, 7, 1.0), Answer("code", 10, 10, 2.0)]
    assert by_category(answers) == [
        CategoryFigures(category="chat", requests=1, tokens_per_verification=1, request_tokens_per_s=7),
        CategoryFigures(category="code", requests=2, tokens_per_verification=2, request_tokens_per_s=10),
    ]


def rounds(*steps: int, first_ns: int = 0, each_ns: int = 10 * MS, step_ns: int = 8 * MS) -> list[Round]:
    return [Round(step, first_ns + step * each_ns, step_ns, step_ns // 2) for step in steps]


def test_exposed_time_is_what_a_round_takes_beside_the_targets_step():
    found = RoundFigures.of([rounds(1, 2, 3, 4)], begin_s=0, end_s=1)
    assert found == RoundFigures(
        rounds=3,
        round_ms=10,
        step_ms=8,
        device_ms=4,
        exposed_ms=2,
        exposed_mean_ms=2,
        busy=0.8,
        device=0.4,
    )


def test_rounds_outside_the_window_between_requests_and_of_steps_nobody_saw_do_not_count():
    # Steps 4 to 6 belong to nobody seen; between 2 and 3 one request ended and another began.
    seen = [rounds(1, 2), rounds(3, 7, 8), rounds(30, 31)]
    found = RoundFigures.of(seen, begin_s=0, end_s=0.1)
    assert found is not None
    assert found.rounds == 2
    # A request that lasts from the one to the other makes it a round, though its own steps are others.
    joined = RoundFigures.of([*seen, rounds(2, 4)], begin_s=0, end_s=0.1)
    assert joined is not None
    assert joined.rounds == 4
    assert RoundFigures.of(seen, begin_s=1, end_s=2) is None


def figures(setup: Setup, mode: str, tokens: int, **changes: Any) -> CellFigures:
    cell = Cell(**{"setup": setup, "mode": mode, "temperature": 0.0, "sessions": 1} | changes)
    before, after = generation_pb2.ServerInfo(steps_total=5), generation_pb2.ServerInfo(steps_total=15)
    for info, steps in ((before, 100), (after, 700)):
        for role in (registry_pb2.WORKER_ROLE_TARGET, registry_pb2.WORKER_ROLE_DRAFT):
            worker = info.workers.add()
            busy = 0.75 if role == registry_pb2.WORKER_ROLE_TARGET else 0.5
            worker.introduction.role, worker.load.steps, worker.load.busy = role, steps, busy
    after.speculation.verify_steps, after.speculation.spec_accepted_tokens = 20, 30
    driven = [Driven(tokens=tokens, tpot_ms=[5.0, 7.0], requests=[rounds(1, 2, 3)]), Driven(tokens=1)]
    totals = [Totals.of([info] * cell.coordinators, cpu_s=cpu_s) for info, cpu_s in ((before, 2.0), (after, 3.0))]
    return CellFigures.of(cell, driven, *totals, begin_s=0, end_s=2)


def test_a_cell_is_compared_with_plain_decoding_under_the_same_load():
    cells = [
        figures(APART, "off", 99),
        figures(APART, "async", 299),
        figures(SHARED, "sync", 149),
        figures(REPLICAS, "off", 199, temperature=1.0),
    ]
    found = as_dicts(cells)
    assert [cell["speedup"] for cell in found] == [1.0, 3.0, 1.5, None]
    assert [cell["tokens_per_s_per_gpu"] for cell in found] == [50, 75, 75, 50]
    assert (found[1]["acceptance_length"], found[1]["sessions_per_step"], found[1]["tpot_ms"]) == (2.5, 2.0, 6.0)
    assert [found[1][name] for name in ("draft_steps_per_s", "target_busy", "draft_busy")] == [300, (0.75,), (0.5,)]
    assert (found[1]["coordinator_busy"], found[1]["coordinators"]) == (0.5, 1)
    # Two coordinators that say the same: twice the verifications, by the same workers.
    (shared,) = as_dicts([figures(APART, "async", 299, coordinators=2)])
    names = ("coordinators", "acceptance_length", "sessions_per_step", "draft_steps_per_s", "draft_busy")
    assert [shared[name] for name in names] == [2, 2.5, 2.0, 300, (0.5,)]
    assert Totals.of([generation_pb2.ServerInfo(steps_total=5)] * 2, cpu_s=0).steps == 10
    scaled = as_dicts(cells, scale_to=5.0)
    assert [cell.get("scaled_tpot_ms") for cell in scaled] == [None, 3.0, 3.0, None]
    assert json.loads(json.dumps(found))[1]["setup"] == "1+1"


def test_requests_of_a_session_differ_and_repeat_in_another_run():
    load = Load(
        endpoints=["a"], prompts=Prompts(token_ids=[[1]]), first=4, sessions=3, traced=1, mode="async", temperature=1.0,
        synthetic=(0.5,), max_new_tokens=8, begin_s=0, end_s=0,
    )  # fmt: skip
    options = [load.options(session, count) for session in (4, 5) for count in (0, 1)]
    assert len({one.get("seed") for one in options}) == 4
    assert [one.get("trace") for one in options] == [True, True, False, False]
    assert options[0].get("verification") == "synthetic"
    # Every other session is at the second coordinator, whose rounds have numbers of their own.
    several = replace(load, first=0, sessions=8, traced=2, endpoints=["a", "b"])
    traced = [session for session in range(8) if several.options(session, 0).get("trace")]
    assert traced == [0, 2]


def test_a_run_on_a_cpu_measures_every_cell_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--sessions", "1", "--temperatures", "0", "--modes", "off", "sync", "--synthetic", "1.0"]
    # On a busy machine a draft may get no core for a second, and rounds do not wait for one that has left commits
    # unanswered; its whole tree is what is looked at.
    arguments += ["--warm-up", "0.2", "--measure", "3", "--clients", "1", "--max-new-tokens", "48"]
    arguments += ["--coordinator-args=--sync-wait-cap-ms 60000", "--arriving", "40", "--arrivals", "2"]
    assert command.main([*arguments, "--output", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cells"] == json.loads((tmp_path / "end_to_end.json").read_text(encoding="utf-8"))["cells"]
    assert [(cell["mode"], cell["synthetic"]) for cell in report["cells"]] == [
        ("off", []),
        ("sync", []),
        ("sync", [1.0]),
    ]
    assert all(cell["tokens_per_s"] > 0 for cell in report["cells"])
    assert report["cells"][0]["acceptance_length"] == 1
    assert report["cells"][1]["acceptance_length"] > 1.5
    # Where every draft token is accepted, only the tree's depth is a bound.
    assert report["cells"][2]["acceptance_length"] > 5
    assert [(row["mode"], row["running"], row["prompt_tokens"]) for row in report["arrivals"]] == [
        ("off", 1, 40),
        ("sync", 1, 40),
    ]
    for row in report["arrivals"]:
        assert all(0 < median <= largest for median, largest in (row["ttft_ms"], row["longest_ms"]))
    assert (tmp_path / "target-0.log").is_file()


def test_sessions_are_spread_over_coordinators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--coordinators", "1", "2", "--sessions", "4", "--temperatures", "0", "--modes", "async"]
    arguments += ["--clients", "1", "--prepare", "1", "--warm-up", "0.2", "--measure", "2", "--max-new-tokens", "48"]
    assert command.main([*arguments, "--output", str(tmp_path)]) == 0
    alone, spread = json.loads(capsys.readouterr().out)["cells"]
    assert (alone["coordinators"], spread["coordinators"]) == (1, 2)
    assert all(cell["sessions"] == 4 and cell["tokens_per_s"] > 0 and cell["rounds"] > 0 for cell in (alone, spread))
    # Half of the sessions are each one's.
    assert alone["sessions_per_step"] > 2 >= spread["sessions_per_step"] > 0
    for number in range(2):
        assert (tmp_path / f"coordinator-{number} of 1+1.log").is_file()


def test_conversations_are_told_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(write_chat_llama(tmp_path / "model"))
    arguments = ["--target", model, "--draft", model, "--prompts", str(DEFAULT_FILE), "--setups", "resident"]
    arguments += ["--gpus", "1", "--sessions", "9", "--temperatures", "0", "--modes", "async", "--clients", "1"]
    assert command.main([*arguments, "--warm-up", "0.2", "--measure", "4", "--max-new-tokens", "8"]) == 0
    rows = json.loads(capsys.readouterr().out)["categories"]
    # Nine sessions begin with a conversation of each category.
    assert [row["category"] for row in rows] == sorted({prompt.category for prompt in read_prompts(DEFAULT_FILE)})
    assert all(
        (row["setup"], row["mode"], row["temperature"], row["sessions"]) == ("resident", "async", 0, 9) for row in rows
    )
    assert all(row["tokens_per_verification"] >= 1 and row["request_tokens_per_s"] > 0 for row in rows)


def test_workers_are_on_gpus_that_the_benchmark_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert (visible_devices([0]), visible_devices([1]), visible_devices([1, 2])) == ("3", "1", "1")
