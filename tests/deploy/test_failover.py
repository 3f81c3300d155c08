"""When a machine counts as dead, by a clock of the test's own; and what a connection to it says."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from outrider.deploy import placement
from outrider.deploy.failover import Machines
from outrider.deploy.placement import Node, Probe
from outrider.roles.ports import free_port

SILENCE_S = 4.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Three nodes, what each says, and the time."""
    state = SimpleNamespace(says=dict.fromkeys(("a", "b", "c"), Probe.ANSWERS), now_s=100.0)

    async def probe(node: Node) -> Probe:
        return state.says[node.node_id]

    def living() -> list[Node]:
        return [Node(node_id=node_id, address="h", port=1, resources={}) for node_id in state.says]

    monkeypatch.setattr(placement, "probe", probe)
    monkeypatch.setattr(placement, "living_nodes", living)
    state.machines = Machines(silence_s=SILENCE_S, clock=lambda: state.now_s)
    yield state


async def silent_after(cluster: SimpleNamespace, seconds: float) -> set[str]:
    cluster.now_s += seconds
    return set((await cluster.machines.look()).silent)


async def test_a_silent_machine_is_given_time(cluster: SimpleNamespace):
    cluster.says["b"] = Probe.SILENT
    assert await silent_after(cluster, 0.0) == set()
    assert await silent_after(cluster, SILENCE_S) == set()
    assert await silent_after(cluster, 0.5) == {"b"}
    cluster.says["b"] = Probe.ANSWERS
    assert await silent_after(cluster, 0.5) == set()
    cluster.says["b"] = Probe.SILENT
    assert await silent_after(cluster, SILENCE_S + 1) == set(), "its silence begins anew"


async def test_one_that_refuses_twice_is_dead(cluster: SimpleNamespace):
    cluster.says["c"] = Probe.REFUSES
    assert await silent_after(cluster, 0.0) == set()
    assert await silent_after(cluster, 1.0) == {"c"}


async def test_one_that_refused_once_and_is_silent_then_is_given_time(cluster: SimpleNamespace):
    cluster.says["c"] = Probe.REFUSES
    assert await silent_after(cluster, 0.0) == set()
    cluster.says["c"] = Probe.SILENT
    assert await silent_after(cluster, 1.0) == set()
    assert await silent_after(cluster, SILENCE_S) == {"c"}


async def test_one_that_ray_has_forgotten_is_not_known(cluster: SimpleNamespace):
    cluster.says["a"] = Probe.REFUSES
    await silent_after(cluster, 0.0)
    del cluster.says["a"]
    seen = await cluster.machines.look()
    assert (seen.known, seen.silent) == ({"b": "h", "c": "h"}, frozenset())


async def test_a_port_says_whether_somebody_listens():
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await placement.probe(Node(node_id="a", address="127.0.0.1", port=port, resources={})) is Probe.ANSWERS
    nobody = Node(node_id="a", address="127.0.0.1", port=free_port(""), resources={})
    assert await placement.probe(nobody) is Probe.REFUSES
