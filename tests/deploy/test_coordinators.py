"""Two coordinators at one address, the real roles on Ray: requests are spread, and outlive the one that they ran at."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from outrider.client import AsyncClient, AsyncStream, GenerateOptions
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import DeployConfig
from outrider.errors import Superseded
from outrider.models import held_out_prompts
from outrider.roles.ports import free_port
from outrider.v1 import generation_pb2

# Where Ray had to be started twice, it forgets the processes of its first attempt until the end.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning"),
    pytest.mark.asyncio(loop_scope="module"),
]

PLACES = 4
# The kernel leads each to one of two coordinators by chance: all to the same one once in eight million times.
CONNECTIONS = 24
SHORT: GenerateOptions = {"max_new_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True}
PLAIN: GenerateOptions = {**SHORT, "speculation": "off"}
LONG: GenerateOptions = {**SHORT, "max_new_tokens": 160}
# So long that it still runs when it is aborted, however busy the machine is.
MINE: GenerateOptions = {**SHORT, "max_new_tokens": 1500, "request_id": "mine"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    config = DeployConfig(
        name="coordinators-test", port=0, coordinators=2, shared_port=free_port(), max_num_seqs=PLACES
    )
    async with Deployment(config) as started:
        yield started


async def info_of(address: str) -> generation_pb2.ServerInfo:
    async with AsyncClient(address) as client:
        return await client.server_info()


async def watch_places(address: str, seen: list[int]) -> None:
    """Sessions of all coordinators together that the target has, as it says itself."""
    async with AsyncClient(address) as client:
        async for info in client.watch(interval_ms=100):
            seen += [worker.load.sessions for worker in info.workers if worker.introduction.limits.max_sessions]


async def test_requests_are_spread_and_have_the_tokens_of_one_coordinator(deployment: Deployment):
    assert deployment.endpoint == ",".join(deployment.shared_endpoints)
    assert len(deployment.endpoints) == 2
    seen: list[int] = []
    watching = asyncio.create_task(watch_places(deployment.endpoints[0], seen))
    prompts = held_out_prompts()[:3]
    async with AsyncClient(deployment.endpoints[0]) as one:
        expected = [await one.generate(prompt, **PLAIN) for prompt in prompts]
    async with AsyncClient(deployment.endpoint, connections=CONNECTIONS) as client:
        found = await asyncio.gather(*(client.generate(prompts[number % 3], **SHORT) for number in range(CONNECTIONS)))
    assert [own.token_ids for own in found] == [expected[number % 3].token_ids for number in range(CONNECTIONS)]
    served = [(await info_of(address)).requests_total for address in deployment.endpoints]
    assert sum(served) == 3 + CONNECTIONS
    assert served[1] and served[0] > 3
    assert (await deployment.status())["shared_endpoints"] == deployment.shared_endpoints
    async with asyncio.timeout(60):
        # Of one that was too busy to answer the last time it does not tell.
        while len(told := (await deployment.status())["coordinators"]) < 2:
            await asyncio.sleep(0.1)
    assert sorted(own["requests_total"] for own in told) == sorted(served)
    # What the target has comes with heartbeats, and on a busy machine few of them.
    async with AsyncClient(deployment.endpoint, connections=PLACES) as client, asyncio.timeout(60):
        while max(seen, default=0) < 2:
            await asyncio.gather(*(client.generate(prompts[0], **SHORT) for _ in range(CONNECTIONS)))
    watching.cancel()
    assert max(seen) <= PLACES


async def test_a_request_is_aborted_by_way_of_the_other(deployment: Deployment):
    here, there = deployment.endpoints
    async with AsyncClient(here) as client, AsyncClient(there) as other:
        stream = client.stream("import os", **MINE)
        await anext(aiter(stream))
        assert await other.abort("mine", "nobody's") == ["mine"]
        with pytest.raises(Superseded, match="it was aborted"):
            async for _ in stream:
                pass


async def test_a_coordinator_killed_costs_its_streams_nothing(deployment: Deployment):
    prompt = held_out_prompts()[0]
    async with AsyncClient(deployment.endpoints[0]) as one:
        expected = await one.generate(prompt, **LONG)
    # Asked for now: it takes Ray a moment, in which the streams might end.
    pids = {own["name"]: own["pid"] for own in (await deployment.status())["workers"]}
    async with AsyncClient(deployment.endpoint, connections=CONNECTIONS) as client:
        streams = [client.stream(prompt, **LONG) for _ in range(PLACES)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        async with asyncio.timeout(60):
            while not all(stream.choices and len(stream.choices[0].token_ids) > 8 for stream in streams):
                await asyncio.sleep(0.01)
        infos = [await info_of(address) for address in deployment.endpoints]
        most, survivor = sorted(infos, key=lambda info: info.running_sessions, reverse=True)
        assert most.running_sessions
        os.kill(pids[f"coordinator-{infos.index(most)}"], signal.SIGKILL)
        await asyncio.gather(*reading)
        assert [stream.result.token_ids for stream in streams] == [expected.token_ids] * PLACES
    # And it comes back to where the others listen.
    async with asyncio.timeout(120):
        while len({await answering(deployment.endpoint) for _ in range(CONNECTIONS)}) < 2:
            await asyncio.sleep(0.1)
    served = sum([(await info_of(address)).requests_total for address in deployment.endpoints])
    # Of the streams that ran there some may have ended just before, read to their end or not.
    assert survivor.requests_total < served <= survivor.requests_total + PLACES


async def read(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


async def answering(address: str) -> str:
    """Return the address of the coordinator that a new connection leads to."""
    return (await info_of(address)).address
