"""`outrider top`: rates out of two looks, a frame that fits, and coordinators that come and go."""

import asyncio
import contextlib
import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from tests.coordinator.running import coordinator_running
from tests.polling import until

from outrider import cli
from outrider.coordinator.commands.top import watch
from outrider.coordinator.commands.top_frame import duration, frame_of, short
from outrider.coordinator.commands.top_sample import Figures, Look, all_workers, as_dict, figures
from outrider.v1 import common_pb2, generation_pb2, registry_pb2

DEADLINE_S = 60.0


def info(incarnation: int = 1, *, scale: int = 1, **changes: Any) -> generation_pb2.ServerInfo:
    """A server that has done `scale` times as much as the first time it was looked at."""
    worker = generation_pb2.WorkerStatus(
        introduction=registry_pb2.WorkerIntroduction(
            worker_id="target-0123456789abcdef", role=registry_pb2.WORKER_ROLE_TARGET
        ),
        load=common_pb2.WorkerLoad(sessions=3, slots_used=50, slots_total=200, steps=100 * scale, busy=0.5),
        state="serving",
        lease_age_ms=12,
    )
    draft = generation_pb2.WorkerStatus(
        introduction=registry_pb2.WorkerIntroduction(worker_id="draft-1", role=registry_pb2.WORKER_ROLE_DRAFT),
        load=common_pb2.WorkerLoad(steps=7, preparing=True),
        state="serving",
    )
    fields: dict[str, Any] = {
        "incarnation": incarnation, "version": "0.1.0", "uptime_s": 200.0, "running_sessions": 3,
        "waiting_requests": 2, "requests_total": 10 * scale, "emitted_tokens_total": 400 * scale,
        "refused_total": scale, "workers": [draft, worker],
        "speculation": generation_pb2.SpeculationStats(
            verify_steps=100 * scale, spec_draft_tokens=600 * scale, spec_accepted_tokens=300 * scale
        ),
    }  # fmt: skip
    return generation_pb2.ServerInfo(**fields | changes)


def look(at_s: float, **options: Any) -> Look:
    return Look(endpoint="127.0.0.1:50051", at_s=at_s, info=info(**options))


def test_rates_are_those_between_two_looks():
    found = figures(look(10.0), look(12.0, scale=3))
    assert (found.tokens_per_s, found.requests_per_s, found.refused_per_s) == (400.0, 10.0, 1.0)
    assert (found.acceptance_length, found.accepted_share) == (4.0, 0.5)
    target, draft = found.workers
    assert (target.role, target.steps_per_s, target.step_ms) == ("target", 100.0, pytest.approx(5.0))
    assert (draft.state, draft.step_ms) == ("preparing", None)


def test_one_look_has_totals_and_no_rates():
    found = figures(None, look(10.0))
    assert (found.tokens_per_s, found.running, found.waiting, found.tokens) == (None, 3, 2, 400)
    assert found.acceptance_length == 4.0
    assert figures(None, look(1.0, speculation=generation_pb2.SpeculationStats())).acceptance_length is None


def test_a_restarted_coordinator_has_no_rates_of_the_one_before():
    found = figures(look(10.0, scale=9), look(11.0, incarnation=2))
    assert found.is_restarted
    assert (found.tokens_per_s, found.workers[0].step_ms) == (None, None)


def test_one_that_does_not_answer_says_why():
    found = figures(look(10.0), Look(endpoint="a:1", at_s=11.0, problem="refused"))
    assert (found.answers, found.problem) == (False, "refused")


def rendered(frame: Sequence[Figures], width: int) -> list[str]:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(frame_of(frame))
    return capture.get().splitlines()


def test_a_frame_fits_80_columns_whatever_the_figures():
    big = look(2.0, scale=10**9, running_sessions=100_000, waiting_requests=50_000, uptime_s=9e6)
    down = Look(endpoint="a-machine-with-a-long-name.example.org:50051", at_s=2.0, problem="refused")
    frame = [figures(look(1.0), big), figures(None, down)]
    lines = rendered(frame, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for expected in (
        "50051", "104d04h", "100k", "50k", "400G", "down", "target-0123456789abcd", "serving", "25%", "████", "50%",
    ):  # fmt: skip
        assert expected in text
    assert "no worker is registered" in "\n".join(rendered([figures(None, look(1.0, workers=[]))], 80))


def test_brackets_in_names_are_no_markup():
    introduction = registry_pb2.WorkerIntroduction(worker_id="[/b]", role=registry_pb2.WORKER_ROLE_DRAFT)
    status = generation_pb2.WorkerStatus(introduction=introduction, state="serving")
    answering = Look(endpoint="[fd00::1]:50051", at_s=0.0, info=info(workers=[status]))
    silent = Look(endpoint="[fd00::2]:50051", at_s=0.0)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(frame_of([figures(None, answering), figures(None, silent)]))
    for name in ("[fd00::1]:50051", "[fd00::2]:50051", "[/b]"):
        assert name in capture.get()


def test_a_worker_of_two_coordinators_is_one_worker():
    frame = [figures(None, look(1.0)), figures(None, look(1.0))]
    assert [worker.worker_id for worker in all_workers(frame)] == ["target-0123456789abcdef", "draft-1"]
    json.dumps(as_dict(frame))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (192, "3m12s"), (18120, "5h02m"), (385200, "4d11h")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (0.25, 2, "0.25"),
        (812.3, 2, "812.30"),
        (9999, 2, "9,999"),
        (12345, 0, "12.3k"),
        (999_700, 0, "1M"),
        (4.568e6, 1, "4.57M"),
    ],
)
def test_numbers_are_short(value, places, text):
    assert short(value, places) == text


async def test_it_survives_a_coordinators_restart():
    frames = list[Sequence[Figures]]()
    async with coordinator_running() as server:
        address = server.address
        task = asyncio.create_task(watch([address], contextlib.nullcontext(frames.append), interval_s=0.05))
        await until(lambda: frames and frames[-1][0].answers)
    try:
        await until(lambda: frames[-1][0].problem)
        async with coordinator_running(port=int(address.rpartition(":")[2])):
            await until(lambda: any(frame[0].is_restarted for frame in frames))
            await until(lambda: frames[-1][0].tokens_per_s == 0.0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_frames_are_printed_once_or_as_json():
    async with coordinator_running() as server:
        arguments = ["top", "--endpoint", server.address, "--once", "--interval", "0.05"]
        for more in ([], ["--json"]):
            command = [sys.executable, "-m", "outrider.cli", *arguments, *more]
            for _ in range(5):
                run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=DEADLINE_S)
                done = await asyncio.to_thread(run, command)
                # On a busy machine the answer may come later than it is waited for.
                if "nobody answers" not in done.stderr:
                    break
            assert done.returncode == 0, done.stderr
            if more:
                (coordinator,) = json.loads(done.stdout)["coordinators"]
                assert (coordinator["endpoint"], coordinator["tokens_per_s"]) == (server.address, 0.0)
            else:
                assert server.address in done.stdout
                assert "no worker is registered" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [(["nowhere"], 2, "HOST:PORT needed"), (["127.0.0.1:1", "--once", "--interval", "0.05"], 1, "nobody answers")],
)
def test_what_cannot_be_is_said_in_a_line(capsys, *, arguments, code, reason):
    assert cli.run(["top", "--endpoint", *arguments]) == code
    assert reason in capsys.readouterr().err


def test_q_ends_it_and_leaves_the_terminal_as_it_was():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", "top", "--endpoint", "127.0.0.1:1", "--interval", "0.1"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    output, deadline = b"", time.monotonic() + DEADLINE_S
    try:
        while b"q ends it" not in output and b"cannot connect" not in output:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], output
            output += os.read(ours, 65536)
        os.write(ours, b"q")
        while process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    output += os.read(ours, 65536)
                except OSError:
                    # The other end is closed.
                    break
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(ours)
