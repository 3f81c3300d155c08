"""A Ray of this machine's own: what it is started without."""

import inspect
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.node import Node
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.resource_isolation_config import ResourceIsolationConfig

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


def test_a_local_raylet_has_something_idle_in_place_of_its_dashboards_agent(monkeypatch: pytest.MonkeyPatch):
    commands = list[list[str]]()
    monkeypatch.setattr(
        services, "start_ray_process", lambda command, *_arguments, **_options: commands.append(command)
    )
    monkeypatch.setattr(connection, "_init", start_raylet)
    start_raylet()
    connection.connect(DeployConfig())
    start_raylet()
    plain, changed, after = map(options_of, commands)
    assert "agent.py" in plain["--dashboard_agent_command"]
    assert {name: value for name, value in changed.items() if plain.get(name) != value} == {
        "--dashboard_agent_command": "/bin/sh -c \"trap '' INT; exec cat\"",
        "--dashboard_agent_listen_port": "-1",
        "--metrics-agent-port": "-1",
        "--metrics_export_port": "-1",
        "--num_prestart_python_workers": "0",
    }
    assert plain.keys() <= changed.keys()
    assert after == plain


def options_of(command: list[str]) -> dict[str, str]:
    parts = [argument.partition("=") for argument in command]
    return {name: value for name, _, value in parts}


def test_a_raylets_command_of_another_ray_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    commands = list[list[str]]()
    monkeypatch.setattr(
        services, "start_ray_process", lambda command, *_arguments, **_options: commands.append(command)
    )
    start_raylet()
    (command,) = commands
    assert connection.bare_raylet(command) != command
    assert not caplog.messages
    renamed = [argument.replace("--metrics_export_port", "--export_port") for argument in command]
    assert connection.bare_raylet(renamed) == renamed
    monkeypatch.setattr(ray, "__version__", "3.0.0")
    assert connection.bare_raylet(command) == command
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "Ray 2.60.0: its dashboard's agent is started as well",
        "Ray 3.0.0: its dashboard's agent is started as well",
    ]


def start_raylet(**_options: object) -> None:
    """Have Ray's own function build a raylet's command."""
    # What is left out is asked of this machine, whose free memory changes.
    resources = ResourceAndLabelSpec(num_cpus=2, num_gpus=0, memory=1 << 30, object_store_memory=1 << 27)
    parameters = inspect.signature(services.start_raylet).parameters.values()
    needed: dict[str, Any] = {own.name: "" for own in parameters if own.default is own.empty}
    needed |= {
        "node_manager_port": 0,
        "metrics_agent_port": 0,
        "metrics_export_port": 0,
        "resource_and_label_spec": resources.resolve(is_head=True),
        "resource_isolation_config": ResourceIsolationConfig(),
    }
    services.start_raylet(**needed)


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
