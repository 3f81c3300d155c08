"""Placement: living and silent nodes, shared GPUs, placement groups."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup

from outrider.deploy.config import DeployConfig, amounts
from outrider.deploy.resources import worker_gpus as shared_worker_gpus
from outrider.errors import WorkerUnavailable

PROBE_TIMEOUT_S = 1.0
# What a place without needs of its own holds of a CPU: Ray keeps no empty ones.
_EMPTY_PLACE_CPUS = 0.001


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster (Ray's node)."""

    node_id: str
    address: str
    port: int  # of Ray's own process there
    resources: Mapping[str, float]

    def has(self, needed: Mapping[str, float]) -> bool:
        """Return True if the node has these resources in all, used or not."""
        return all(self.resources.get(name, 0.0) >= amount for name, amount in needed.items())


def living_nodes() -> list[Node]:
    """The nodes that Ray takes for alive; it notices the end of one only after some 15 seconds."""
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            resources=node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


class Probe(Enum):
    """Answer of a node's Ray process to a connection attempt.

    REFUSES: the machine says that nobody listens there. SILENT: nothing is heard of the machine.
    """

    ANSWERS = "answers"
    REFUSES = "refuses"
    SILENT = "silent"


async def probe(node: Node) -> Probe:
    """Ask a node for a connection."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(node.address, node.port)
    except ConnectionRefusedError:
        return Probe.REFUSES
    except (OSError, TimeoutError):
        return Probe.SILENT
    writer.close()
    return Probe.ANSWERS


def selector(*, among: Collection[str] | None, avoided: Collection[str]) -> dict[str, str]:
    """Ray's label selector for nodes by their ids.

    Args:
        among: ids of the only nodes that will do; None for all.
        avoided: ids of nodes that will not.
    """
    if among is not None:
        return {"ray.io/node-id": f"in({','.join(sorted(set(among) - set(avoided)))})"}
    return {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}


def worker_gpus(config: DeployConfig) -> tuple[float, float]:
    """GPUs per target and per draft worker on this cluster."""
    return shared_worker_gpus(config, ray.cluster_resources().get("GPU", 0.0))


@dataclass(kw_only=True)
class KeptPlaces:
    """Places of one machine that are kept together over restarts: a target's, then those of drafts beside it."""

    group: PlacementGroup
    takers: list[str | None] = field(default_factory=list)  # [places] names of the workers that have them


def keep_places(
    needs: Sequence[Mapping[str, float]], *, name: str, nodes: list[Node], rather_on: str | None = None
) -> KeptPlaces:
    """Places on one machine, one a need.

    Args:
        needs: what each place holds; GPUs as "GPU".
        name: of the group, by which it is found again.
        nodes: the machines that will do.
        rather_on: id of the machine that is taken if it has room; by default Ray fills one before the next.

    Raises:
        WorkerUnavailable: no node has so many GPUs.
    """
    gpus = sum(need.get("GPU", 0.0) for need in needs)
    most = max((node.resources.get("GPU", 0.0) for node in nodes), default=0.0)
    if most < gpus:
        raise WorkerUnavailable(f"{gpus:g} GPUs of one node asked for, no node has so many: at most {most:g}")
    bundles = [{**need} if any(need.values()) else {"CPU": _EMPTY_PLACE_CPUS} for need in needs]
    where = selector(among=[node.node_id for node in nodes], avoided=())
    group = ray.util.placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[where] * len(bundles),
        _soft_target_node_id=rather_on,
    )
    return KeptPlaces(group=group, takers=[None] * len(needs))


def bundle(gpus: float, resources: tuple[str, ...]) -> dict[str, float]:
    """Return a worker's placement-group bundle."""
    return {name: amount for name, amount in {"GPU": gpus, **amounts(resources)}.items() if amount}


def actor_needs(gpus: float, resources: tuple[str, ...]) -> dict[str, Any]:
    """The same as options of an actor. num_cpus=0: roles set their own threads, and a small machine must hold all."""
    return {"num_cpus": 0, "num_gpus": gpus, "resources": amounts(resources)}
