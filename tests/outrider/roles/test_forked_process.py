"""A worker forked by this process's own stand-by, handled as a child process is."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.roles.forked_process import ForkedProcess, wake_stand_by
from outrider.roles.role_process import RoleProcess, stop_all

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone")

DEADLINE_S = 120.0
WORKER = """
import sys
assert "torch" in sys.modules, "it was started, not forked"
print(sys.argv[1:], __name__, flush=True)
print(sys.stdin.readline().strip(), file=sys.stderr)
sys.exit(int(sys.stdin.readline()))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "probe_worker.py").write_text(WORKER, encoding="utf-8")
    # The stand-by of these tests may run already: it finds the module in the folder that the worker runs in.
    environment = os.environ | {"FOLDER": str(folder)}
    wake_stand_by(environment)
    return environment


@pytest.fixture
def forked(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedProcess]:
    monkeypatch.chdir(environment["FOLDER"])
    with (tmp_path / "log").open("w") as log:
        process = ForkedProcess(["-m", "probe_worker", "a", "b"], environment=environment, stderr=log.fileno())
    yield process
    process.kill()
    process.wait(DEADLINE_S)
    process.stdin.close()
    process.stdout.close()


def test_it_speaks_and_ends_as_a_child_does(forked: ForkedProcess, tmp_path: Path) -> None:
    assert forked.stdout.readline() == b"['a', 'b'] __main__\n"
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    forked.stdin.write(b"to the log\n7\n")
    assert forked.wait(DEADLINE_S) == forked.poll() == forked.returncode == 7
    assert (tmp_path / "log").read_text() == "to the log\n"
    forked.kill()
    assert forked.returncode == 7, "what has ended is left alone"


def test_several_threads_may_end_it_and_wait_for_it(forked: ForkedProcess) -> None:
    assert forked.stdout.readline()

    def end(_: int) -> int:
        for _ in range(50):
            forked.kill()
        return forked.wait(DEADLINE_S)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(end, range(4))) == [-signal.SIGKILL] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_are_its_own_and_its_end_names_them(forked: ForkedProcess, number: signal.Signals) -> None:
    forked.stdout.readline()
    forked.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{forked.pid}/status")
    deadline = time.monotonic() + DEADLINE_S
    while "T (stopped)" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    forked.send_signal(number)
    forked.send_signal(signal.SIGCONT)
    assert forked.wait(DEADLINE_S) == -number


def test_its_input_ends_with_this_process(forked: ForkedProcess) -> None:
    forked.stdout.readline()
    forked.stdin.close()
    assert forked.wait(DEADLINE_S) == 1, "nothing came that is a number"


def test_where_no_stand_by_can_be_a_role_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A socket's name has to be short.
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(far))
    role = RoleProcess("first", "health", ["--help"], forked=True)
    assert isinstance(role.process, subprocess.Popen)
    assert "Python is started" in caplog.text
    role.process.wait(DEADLINE_S)
    stop_all([role])
