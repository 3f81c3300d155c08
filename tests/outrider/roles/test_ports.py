"""The limit of open files, in processes of their own: it stays with a process."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.local import LocalService

_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 512, 512), (512, 512, 512)])
def test_the_limit_rises_as_far_as_the_machine_lets_it(soft: int, hard: int, expected: int) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from outrider.roles.ports import allow_many_files; allow_many_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert told.stdout.strip() == str((expected, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process stand in /proc")
@pytest.mark.skipif(HARD < 2048, reason="the machine allows no more")
def test_a_coordinator_may_have_more_connections_than_the_shell_that_started_it_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with LocalService(drafts=0, targets=0) as service:
            limits = Path(f"/proc/{service.processes['coordinator'].pid}/limits").read_text(encoding="ascii")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) > 1024
