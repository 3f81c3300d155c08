"""A Ray of this machine's own: its stand-by imports while Ray starts."""

import os
import subprocess
import threading

import pytest

from outrider import standby_start
from outrider.deploy import connection, descendants
from outrider.deploy.config import DeployConfig

_LONG_S = 60


def test_a_child_is_found_by_its_programs_name():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert descendants.find_child("sleep") == child.pid
        child.kill()
    assert descendants.find_child("sleep") is None


@pytest.mark.skipif(not standby_start.CAN_FORK, reason="there are no stand-bys on this system")
def test_the_stand_by_starts_once_the_nodes_process_is_there(monkeypatch: pytest.MonkeyPatch):
    looks, owners, has_started = list[str](), list[int](), threading.Event()

    def find_child(name: str) -> int | None:
        looks.append(name)
        return None if len(looks) < 3 else os.getpid()

    class Connection:
        """To a stand-by."""

        def __init__(self, owner: int, *, is_own: bool) -> None:
            assert is_own
            owners.append(owner)

        def close(self) -> None:
            has_started.set()

    def init(**options: object) -> None:
        assert options["address"] == "local"
        assert has_started.wait(_LONG_S), "Ray's start goes on beside it"

    monkeypatch.setattr(connection, "find_child", find_child)
    monkeypatch.setattr(connection.standby_start, "connect", Connection)
    monkeypatch.setattr(connection, "_init", init)
    connection.connect(DeployConfig())
    assert (looks, owners) == (["raylet"] * 3, [os.getpid()])
