"""A role's process: what it is given, and how its end is told."""

import os
import time
from pathlib import Path

import pytest

import outrider
from outrider.errors import WorkerUnavailable
from outrider.roles.role_process import RoleProcess, child_environment, stop_all


def test_a_role_has_its_own_environment_and_its_end_is_told_with_its_last_words():
    role = RoleProcess("first", "coordinator", [], environment={"PYTHONHASHSEED": "no number"})
    with pytest.raises(WorkerUnavailable, match=r"first ended with exit code 1: .*PYTHONHASHSEED"):
        role.await_ready(time.monotonic() + 60)
    assert not role.is_running
    stop_all([role])


def test_children_find_the_package_where_it_was_found():
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[0] == str(Path(outrider.__file__).parents[1])
