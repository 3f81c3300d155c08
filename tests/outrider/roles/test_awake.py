import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.roles.awake import cores_awake

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")

_ROLE = """
import sys
from pathlib import Path
from outrider.roles.awake import cores_awake
with cores_awake(1, Path(sys.argv[1])) as settle:
    settle()
    print("settled", flush=True)
    sys.stdin.read()
"""


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.fixture
def role(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _ROLE, str(tmp_path / "cores")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"settled\n"
        yield process
        process.kill()


def test_a_role_and_a_spinner_of_idle_priority_share_one_core(role):
    (spinner,) = _children(role.pid)
    (core,) = os.sched_getaffinity(role.pid)
    deadline = time.monotonic() + 30
    # It sets its own priority first thing.
    while os.sched_getscheduler(spinner) != os.SCHED_IDLE or os.sched_getaffinity(spinner) != {core}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_core_is_taken_once_and_given_back(role, tmp_path):
    cores = len(os.sched_getaffinity(0))
    with (
        pytest.raises(OutriderError, match=rf"{cores} cores asked for, {cores - 1} of this process's cores"),
        cores_awake(cores, tmp_path / "cores"),
    ):
        pass
    role.communicate()
    with cores_awake(cores, tmp_path / "cores"):
        pass


def test_no_spinner_outlives_a_role_that_is_killed(role):
    (spinner,) = _children(role.pid)
    role.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{spinner}").exists() and "State:\tZ" not in Path(f"/proc/{spinner}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_touched_unless_asked_for(tmp_path):
    before = os.sched_getaffinity(0)
    with cores_awake(0, tmp_path / "cores") as settle:
        settle()
        assert os.sched_getaffinity(0) == before
    assert not list(tmp_path.iterdir())


def test_a_bad_count_is_named(tmp_path):
    with pytest.raises(OutriderError, match="--keep-cores-awake: -1 given"), cores_awake(-1, tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match=r"cannot make .*cores"), cores_awake(1, tmp_path / "file" / "cores"):
        pass
