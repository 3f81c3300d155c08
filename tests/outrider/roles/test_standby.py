"""A stand-by forks workers that are as if Python had been started; here it has imported next to nothing."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.polling import is_running, wait_until

from outrider.roles import standby_start
from outrider.roles.standby_start import LENGTH, can_be_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone")

DEADLINE_S = 60.0
STAND_BY = """
import socket, sys
from outrider.roles.standby import StandBy, execute
door = socket.socket(fileno=int(sys.argv[1]))
order = StandBy(door, owner_pid=int(sys.argv[2]), idle_s=float(sys.argv[3])).serve()
if order is not None:
    execute(order)
"""
START = """
import sys
from outrider.roles.standby_start import run_forked
sys.exit(run_forked(sys.argv[2:], owner_pid=int(sys.argv[1])))
"""
CANNOT_FORK_AGAIN = """
import os
fork, forked = os.fork, []
def fork_once():
    if forked:
        raise BlockingIOError("no more processes")
    forked.append(1)
    return fork()
os.fork = fork_once
"""
WORKER = """
import os, sys, time
assert not [name for name in sys.modules if name.startswith("outrider")], "it may have been replaced meanwhile"
print(os.getpid(), os.getppid(), sys.argv[1:], os.environ["GIVEN"], os.getcwd(), sys.path[0], __name__)
print("on stderr", file=sys.stderr)
if sys.argv[1] == "sleep":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


class Node:
    """A process in the place of Ray's, with a stand-by."""

    def __init__(self, folder: Path, *, idle_s: float = 600.0, before: str = "") -> None:
        self.folder, self.started = folder, []
        own = folder / f"outrider-{os.getuid()}"
        own.mkdir(mode=0o700)
        self.script = folder / "worker.py"
        self.script.write_text(WORKER, encoding="utf-8")
        self.process = self.run("-c", "import time; time.sleep(600)")
        self.path = own / f"standby-{self.process.pid}.sock"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self.path))
            door.listen()
            arguments = (before + STAND_BY, str(door.fileno()), str(self.process.pid), str(idle_s))
            self.stand_by = self.run("-c", *arguments, pass_fds=(door.fileno(),))

    def run(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(self.folder), "GIVEN": "value"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, cwd=self.folder, stdout=pipe, stderr=pipe, text=True,
            pass_fds=pass_fds,
        )  # fmt: skip
        self.started.append(process)
        return process

    def worker(self, *arguments: str) -> subprocess.Popen[str]:
        return self.run("-c", START, str(self.process.pid), "-u", str(self.script), *arguments)

    def close(self) -> None:
        # With the node everything goes.
        self.process.kill()
        self.process.wait()
        self.stand_by.wait(DEADLINE_S)
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def pid_of(worker: subprocess.Popen[str]) -> int:
    assert worker.stdout is not None
    return int(worker.stdout.readline().split()[0])


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_worker_is_forked_with_its_arguments_variables_folder_and_streams(node: Node):
    worker = node.worker("7", "b")
    said, errors = worker.communicate(timeout=DEADLINE_S)
    pid, parent, rest = said.split(" ", 2)
    assert int(parent) == node.stand_by.pid
    assert int(pid) not in (worker.pid, node.stand_by.pid)
    assert rest == f"['7', 'b'] value {node.folder} {node.folder} __main__\n"
    assert errors == "on stderr\n"
    assert worker.returncode == 7
    assert node.worker("0").wait(DEADLINE_S) == 0, "one after the other"


def test_signals_reach_the_worker_and_its_end_ends_whoever_started_it(node: Node):
    told, killed = node.worker("sleep"), node.worker("sleep")
    pid_of(told)
    worker_pid = pid_of(killed)
    # The worker may speak before whoever started it has heard of it, and passes on what it is told.
    wait_until(lambda: catches(told.pid, signal.SIGTERM))
    told.send_signal(signal.SIGTERM)
    assert told.wait(DEADLINE_S) == 128 + signal.SIGTERM
    os.kill(worker_pid, signal.SIGKILL)
    assert killed.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_a_worker_has_a_group_of_its_own(node: Node):
    first, second = node.worker("sleep"), node.worker("sleep")
    pids = pid_of(first), pid_of(second)
    os.killpg(pids[0], signal.SIGKILL)
    assert first.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert is_running(pids[1])
    assert is_running(node.stand_by.pid)


def test_a_worker_goes_with_whoever_started_it(node: Node):
    worker = node.worker("sleep")
    pid = pid_of(worker)
    worker.kill()
    wait_until(lambda: not is_running(pid))
    assert is_running(node.stand_by.pid)


def test_all_go_with_the_node(node: Node):
    worker = node.worker("sleep")
    pid = pid_of(worker)
    node.process.kill()
    node.process.wait()
    assert node.stand_by.wait(DEADLINE_S) == 0
    wait_until(lambda: not is_running(pid))
    assert worker.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert not node.path.exists()


def test_a_worker_goes_with_a_stand_by_that_is_killed(node: Node):
    worker = node.worker("sleep")
    pid = pid_of(worker)
    node.stand_by.kill()
    assert worker.wait(DEADLINE_S) == 1
    wait_until(lambda: not is_running(pid))


def test_without_workers_it_ends(tmp_path: Path):
    node = Node(tmp_path, idle_s=0.0)
    try:
        assert node.stand_by.wait(DEADLINE_S) == 0
        assert not node.path.exists()
    finally:
        node.close()


def test_those_that_there_are_go_on_when_another_one_cannot_be_forked(tmp_path: Path):
    node = Node(tmp_path, before=CANNOT_FORK_AGAIN)
    try:
        worker = node.worker("sleep")
        pid = pid_of(worker)
        _, errors = node.worker("0").communicate(timeout=DEADLINE_S)
        assert "it has forked nobody" in errors
        assert is_running(pid)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(DEADLINE_S) == 128 + signal.SIGTERM
    finally:
        node.close()


@pytest.mark.parametrize("order", [b'{"words": []}', b"[]", b"no JSON"])
def test_an_order_of_another_version_is_nobodys_end(node: Node, order: bytes):
    worker = node.worker("sleep")
    pid = pid_of(worker)
    with socket.socket(socket.AF_UNIX) as connection, Path(os.devnull).open() as null:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(node.path))
        socket.send_fds(connection, [LENGTH.pack(len(order))], 3 * [null.fileno()])
        connection.sendall(order)
        assert connection.recv(100) == b""
    assert is_running(pid)
    assert is_running(node.stand_by.pid)


def test_where_no_stand_by_can_be_python_is_started(node: Node):
    # A socket's name has to be short.
    far = node.folder / ("x" * 100)
    far.mkdir()
    command = [sys.executable, "-I", "-S", standby_start.__file__, "-u", str(node.script), "5"]
    environment = os.environ | {"TMPDIR": str(far), "GIVEN": "value"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 5
    assert "['5'] value" in ended.stdout
    assert "no stand-by (" in ended.stderr


def test_a_folder_that_others_may_write_to_is_not_used(node: Node):
    (node.folder / f"outrider-{os.getuid()}").chmod(0o777)
    _, errors = node.worker("0").communicate(timeout=DEADLINE_S)
    assert "is not a folder that only this user may write to" in errors


def test_threads_that_a_fork_would_lack_are_refused(tmp_path: Path):
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", encoding="utf-8"
    )
    script = "from outrider.roles.standby import prepare\nprepare(['threaded'])"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "importing threaded has left 2 threads" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "can"),
    [
        (["-u", "worker.py", "-x"], True),
        (["worker.py"], True),
        (["-m", "module"], False),
        (["-c", "1"], False),
        ([], False),
    ],
)
def test_what_changes_the_interpreter_is_not_forked(arguments: list[str], can: bool):
    assert can_be_forked(arguments) is can


def test_whoever_starts_the_node_may_own_its_stand_by(monkeypatch: pytest.MonkeyPatch):
    owners = list[int]()

    def run_forked(_arguments: Sequence[str], *, owner_pid: int) -> int:
        owners.append(owner_pid)
        return 0

    monkeypatch.setattr(standby_start, "run_forked", run_forked)
    monkeypatch.delenv(standby_start.OWNER_VARIABLE, raising=False)
    assert standby_start.main(["worker.py"]) == 0
    monkeypatch.setenv(standby_start.OWNER_VARIABLE, "4711")
    assert standby_start.main(["worker.py"]) == 0
    assert owners == [os.getppid(), 4711]
