"""What a cluster of several machines goes through, with the real roles: how long until all serve, what streams see.

    python benchmarks/cluster_drill.py --streams 3

Three Ray nodes on this machine hold two coordinators, two targets and four drafts of the embedded pair, at a thread
each. Streams run all the while, one after the other in so many lanes; each is compared with what the same request gave
before anything was disturbed. For every event the table has

    first       from the order or the kill until the first process that was started for it serves
    serving     from the order or the kill until every role serves through every coordinator again, as `status` says
    pause       the longest that a stream that ran then went without a token
    streams     that ran during the event, and how many of them broke or had a changed, lost or doubled token

Needs about 5 GiB.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.cluster_utils
import ray.exceptions
from rich.console import Console
from rich.table import Table

from outrider.client import AsyncClient, GenerateOptions
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import DeployConfig
from outrider.deploy.connection import NAMESPACE
from outrider.errors import OutriderError
from outrider.models import embedded_draft_path, held_out_prompts

logger = logging.getLogger("cluster_drill")

PROMPTS = 4
NODE_OPTIONS: dict[str, Any] = {"object_store_memory": 100_000_000, "include_dashboard": False, "num_cpus": 1}
CONFIG = DeployConfig(
    name="drill",
    port=0,
    coordinators=2,
    targets=2,
    drafts=4,
    target_resources=("big=1",),
    draft_resources=("cheap=1",),
    target_threads=1,
    max_num_seqs=16,
)
SETTLE_TIMEOUT_S = 240.0

Status = dict[str, Any]


@dataclass(kw_only=True)
class Event:
    """What one event cost.

    Attributes:
        name: in the table.
        first_s: until the first process that was started for it served; None where none was.
        serving_s: until everything served again.
        pause_s: the longest time without a token, of streams that ran.
        streams: that ran, in part.
        broken: of those, that ended with an error.
        changed: of those, whose tokens, as far as they came, were not those of the undisturbed run.
    """

    name: str
    first_s: float | None = None
    serving_s: float = 0.0
    pause_s: float = 0.0
    streams: int = 0
    broken: int = 0
    changed: int = 0

    def note_first(self, before: Status, now: Status, began_s: float) -> None:
        """Looks whether a process serves that was not there before."""
        pids = {worker["pid"] for worker in before["workers"]}
        fresh = [own for own in now["workers"] if own["pid"] not in pids and own["state"] == "serving"]
        if fresh and self.first_s is None:
            self.first_s = time.monotonic() - began_s


@dataclass(eq=False)
class Stream:
    """A request that runs.

    Attributes:
        events: that it has lived through.
        last_s: when its last token came.
    """

    events: list[Event]
    last_s: float = field(default_factory=time.monotonic)

    def note_pause(self, event: Event | None) -> None:
        """It is now without a token for so long."""
        if event is not None:
            event.pause_s = max(event.pause_s, time.monotonic() - self.last_s)


@dataclass
class Streams:
    """Requests that run all the while."""

    endpoints: str
    options: GenerateOptions
    expected: list[list[int]] = field(default_factory=list)
    event: Event | None = None
    running: list[Stream] = field(default_factory=list)

    async def undisturbed(self) -> None:
        """What each request gives while nothing happens."""
        async with AsyncClient(self.endpoints) as client:
            for index in range(PROMPTS):
                result = await client.generate(held_out_prompts()[index], **self._options(index))
                self.expected.append(list(result.token_ids))

    def begin(self, event: Event) -> None:
        """All that runs from now on lives through this event."""
        self.event = event
        for stream in self.running:
            stream.events.append(event)

    def end(self) -> None:
        """The event is over; those that wait for a token since have waited because of it."""
        for stream in self.running:
            stream.note_pause(self.event)
        self.event = None

    async def run(self, lane: int) -> None:
        """One request after the other, until cancelled."""
        async with AsyncClient(self.endpoints) as client:
            index = lane
            while True:
                await self.one(client, index % PROMPTS)
                index += 1

    async def one(self, client: AsyncClient, index: int) -> None:
        """One request, held against what it gave undisturbed; as far as it came, where it breaks or is cancelled."""
        stream = Stream([] if self.event is None else [self.event])
        self.running.append(stream)
        tokens: list[int] = []
        is_right, is_broken, wanted = True, False, self.expected[index]
        try:
            async with client.stream(held_out_prompts()[index], **self._options(index)) as deltas:
                async for delta in deltas:
                    stream.note_pause(self.event)
                    stream.last_s = time.monotonic()
                    is_right = is_right and delta.offset == len(tokens)
                    tokens.extend(delta.token_ids)
            is_right = is_right and len(tokens) == len(wanted)
        except OutriderError as error:
            logger.warning("a stream broke: %s", error)
            is_broken = True
        finally:
            stream.note_pause(self.event)
            self.running.remove(stream)
            for event in stream.events:
                event.streams += 1
                event.broken += is_broken
                event.changed += not is_right or tokens != wanted[: len(tokens)]

    def _options(self, index: int) -> GenerateOptions:
        return {**self.options, "seed": index}


class Drill:
    """The deployment and what is done to it."""

    def __init__(self, deployment: Deployment, cluster: ray.cluster_utils.Cluster, streams: Streams) -> None:
        self._deployment = deployment
        self._cluster = cluster
        self._streams = streams
        self.events: list[Event] = []

    async def during(self, name: str, act: Callable[[Status], Awaitable[Callable[[Status], bool] | None]]) -> None:
        """Does something, and waits until all serve again.

        Args:
            name: of the event.
            act: given the status before; returns what else has to hold of the status afterwards.
        """
        before = await self._deployment.status()
        event, began_s = Event(name=name), time.monotonic()
        self._streams.begin(event)
        holds = await act(before)
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            status = await self.status()
            event.note_first(before, status, began_s)
            while not (serves(status) and (holds is None or holds(status))):
                await asyncio.sleep(0.05)
                status = await self.status()
                event.note_first(before, status, began_s)
        event.serving_s = time.monotonic() - began_s
        # Streams that the event has reached end, and the next ones begin as if nothing had been.
        await asyncio.sleep(2.0)
        self._streams.end()
        await asyncio.sleep(1.0)
        self.events.append(event)
        logger.info("%s", event)

    async def status(self) -> Status:
        """As `outrider status --json`; while the controller is started anew, what nobody takes for serving."""
        try:
            async with asyncio.timeout(5.0):
                return await self._deployment.status()
        except (ray.exceptions.RayError, TimeoutError):
            return {"state": "unknown", "workers": [], "wanted": {}}

    async def order(self, name: str, *arguments: Any) -> None:
        """Asks the controller."""
        await getattr(self._deployment.controller, name).remote(*arguments)

    def kill(self, role: str, number: signal.Signals) -> Callable[[Status], Awaitable[Callable[[Status], bool]]]:
        """Sends a signal to the process of the oldest of a role; it has to come back as another one."""

        async def act(before: Status) -> Callable[[Status], bool]:
            worker = first(before, role)
            pid = by_name(before)[worker]["pid"]
            os.kill(pid, number)
            return lambda status: by_name(status)[worker]["pid"] != pid

        return act

    async def kill_controller(self, before: Status) -> Callable[[Status], bool]:
        """Kills the controller; its successor has to find every process as it was."""
        pids = {name: worker["pid"] for name, worker in by_name(before).items()}
        os.kill(await self._deployment.controller.pid.remote(), signal.SIGKILL)
        await asyncio.sleep(0.5)
        return lambda status: {name: worker["pid"] for name, worker in by_name(status).items()} == pids

    async def kill_node(self, before: Status) -> Callable[[Status], bool]:
        """Kills the machine that the first target is on, all that runs there included."""
        killed = by_name(before)[first(before, "target")]["node_id"]
        (node,) = [node for node in self._cluster.list_all_nodes() if node.node_id == killed]
        self._cluster.remove_node(node, allow_graceful=False)
        return lambda status: all(worker["node_id"] != killed for worker in status["workers"])


def first(status: Status, role: str) -> str:
    """The name of the oldest of a role."""
    return next(worker["name"] for worker in status["workers"] if worker["role"] == role)


def by_name(status: Status) -> dict[str, Status]:
    """Its workers."""
    return {worker["name"]: worker for worker in status["workers"]}


def serves(status: Status) -> bool:
    """Whether every role that is wanted serves."""
    states = [worker["state"] for worker in status["workers"]]
    return status["state"] == "serving" and set(states) == {"serving"} and len(states) == sum(status["wanted"].values())


async def drill(cluster: ray.cluster_utils.Cluster, *, lanes: int, tokens: int) -> list[Event]:
    """All events, one after the other."""
    began_s = time.monotonic()
    async with Deployment(CONFIG) as deployment:
        up = Event(name="up: 2 coordinators, 2 targets, 4 drafts", serving_s=time.monotonic() - began_s)
        options: GenerateOptions = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        streams = Streams(deployment.endpoint, options)
        await streams.undisturbed()
        running = [asyncio.create_task(streams.run(lane)) for lane in range(lanes)]
        own = Drill(deployment, cluster, streams)
        await own.during("drafts 4 to 2", lambda _: own.order("scale", {"draft": 2}))
        await own.during("drafts 2 to 4", lambda _: own.order("scale", {"draft": 4}))
        await own.during("draft drained", lambda status: own.order("drain", first(status, "draft")))
        model = str(embedded_draft_path())
        await own.during("replace drafts and their model", lambda _: own.order("replace", "draft", model))
        await own.during("targets 2 to 1", lambda _: own.order("scale", {"target": 1}))
        await own.during("targets 1 to 2", lambda _: own.order("scale", {"target": 2}))
        await own.during("draft killed", own.kill("draft", signal.SIGKILL))
        await own.during("target killed", own.kill("target", signal.SIGKILL))
        await own.during("target frozen", own.kill("target", signal.SIGSTOP))
        await own.during("coordinator killed", own.kill("coordinator", signal.SIGKILL))
        await own.during("controller killed", own.kill_controller)
        await own.during("machine killed", own.kill_node)
        for task in running:
            task.cancel()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(ended, Exception):
                # A lane that went before its time has compared nothing since.
                raise ended
        began_s = time.monotonic()
    return [up, *own.events, Event(name="down", serving_s=time.monotonic() - began_s)]


def print_table(events: list[Event]) -> None:
    """What each event cost."""
    table = Table(
        "event", "first serves after s", "all serve after s", "longest pause s", "streams", "broken", "changed"
    )
    for event in events:
        first = "" if event.first_s is None else f"{event.first_s:.1f}"
        numbers = [first, f"{event.serving_s:.1f}", f"{event.pause_s:.2f}", event.streams, event.broken, event.changed]
        table.add_row(event.name, *(str(number) for number in numbers))
    Console(highlight=False).print(table)


def main() -> None:
    """Parses, runs, prints; exits 1 where a stream broke or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=3, help="that run at a time")
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--json", action="store_true", help="print the events as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logger.setLevel(logging.INFO)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = ray.cluster_utils.Cluster()
    cluster.add_node(wait=False, **NODE_OPTIONS)
    for _ in range(2):
        cluster.add_node(resources={"big": 2, "cheap": 6}, wait=False, **NODE_OPTIONS)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    try:
        events = asyncio.run(drill(cluster, lanes=arguments.streams, tokens=arguments.tokens))
    finally:
        ray.shutdown()
        cluster.shutdown()
    if arguments.json:
        Console().print_json(json.dumps([vars(event) for event in events]))
    else:
        print_table(events)
    raise SystemExit(any(event.broken or event.changed for event in events))


if __name__ == "__main__":
    main()
