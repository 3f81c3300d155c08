"""A Ray of this machine's own: what it is started without."""

import pytest
from ray._private.node import Node

from outrider.deploy import connection
from outrider.deploy.config import DeployConfig

UNNEEDED = ("start_api_server", "start_monitor", "start_log_monitor")


@pytest.mark.parametrize("role_logs", [False, True])
def test_a_local_ray_has_no_dashboard_and_a_log_monitor_only_for_who_reads_it(
    monkeypatch: pytest.MonkeyPatch, role_logs: bool
):
    ray_has = {name: getattr(Node, name) for name in UNNEEDED}
    left_out = set[str]()

    def init(**options: object) -> None:
        assert options["address"] == "local"
        left_out.update(name for name in UNNEEDED if getattr(Node, name) is not ray_has[name])

    monkeypatch.setattr(connection, "_init", init)
    connection.connect(DeployConfig(role_logs=role_logs))
    assert left_out == {"start_api_server", "start_monitor"} | (set() if role_logs else {"start_log_monitor"})
    assert {name: getattr(Node, name) for name in UNNEEDED} == ray_has


def test_that_nothing_runs_here_is_said_in_the_words_of_our_commands(monkeypatch: pytest.MonkeyPatch):
    def init(**_options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify RAY_ADDRESS")

    monkeypatch.setattr(connection, "_init", init)
    with pytest.raises(ConnectionError, match="no `outrider serve` of the name mine runs on this machine, nor any Ray"):
        connection.attach("auto", "mine")


def test_a_cluster_is_joined_as_it_is(monkeypatch: pytest.MonkeyPatch):
    ray_has = {name: getattr(Node, name) for name in UNNEEDED}

    def init(**_options: object) -> None:
        assert {name: getattr(Node, name) for name in UNNEEDED} == ray_has

    monkeypatch.setattr(connection, "_init", init)
    connection.connect(DeployConfig(address="auto", insecure=True))
