"""The real roles on Ray, behind certificates and tokens: a completion, one with its draft killed, and the command."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.client import AsyncClient, GenerateOptions
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.demo import PROMPT
from outrider.errors import Unauthenticated
from outrider.models import held_out_prompts
from outrider.security.certificates import write_development_set
from outrider.security.tls import TlsConfig
from outrider.security.tokens import TokenEntry, add_token, hash_of, new_token
from outrider.v1 import generation_pb2, registry_pb2

# Where Ray had to be started twice, it forgets the processes of its first attempt until the end.
pytestmark = pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning")

OPTIONS: GenerateOptions = {"max_new_tokens": 96, "temperature": 1.0, "seed": 11, "ignore_eos": True}
PLAIN: GenerateOptions = {**OPTIONS, "speculation": "off"}
# A round waits for its draft: what is accepted is no question of the machine's pace.
IN_STEP: GenerateOptions = {**OPTIONS, "speculation": "sync"}
OUTRIDER = str(Path(sys.executable).parent / "outrider")


# One deployment for the tests that use it, so one event loop too.
on_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of every role, and a client's token in clear beside its hash."""
    folder = tmp_path_factory.mktemp("secrets")
    write_development_set(folder, days=1)
    token = new_token()
    add_token(folder / "tokens.json", TokenEntry(name="test", sha256=hash_of(token)))
    (folder / "token").write_text(token)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(secrets: Path) -> AsyncIterator[Deployment]:
    config = DeployConfig(port=0, name="service-test", certs=secrets, token_file=secrets / "tokens.json")
    async with Deployment(config) as started:
        yield started


def client_of(deployment: Deployment, secrets: Path) -> AsyncClient:
    token = (secrets / "token").read_text()
    return AsyncClient(deployment.endpoint, tls=TlsConfig(ca=secrets / "ca.pem"), token=token)


@on_one_loop
async def test_a_completion_streams_through_ray_placed_processes(deployment: Deployment, secrets: Path):
    async with client_of(deployment, secrets) as client:
        async with client.stream(held_out_prompts()[0], **OPTIONS) as stream:
            deltas = [delta async for delta in stream]
        plain = await client.generate(held_out_prompts()[0], **PLAIN)
        in_step = await client.generate(held_out_prompts()[0], **IN_STEP)
    assert len(deltas) > 1
    assert in_step.speculation.accepted_tokens > 0
    assert stream.result.token_ids == in_step.token_ids == plain.token_ids
    assert len(plain.token_ids) == 96
    async with AsyncClient(deployment.endpoint, tls=TlsConfig(ca=secrets / "ca.pem")) as nobody:
        with pytest.raises(Unauthenticated):
            await nobody.generate(held_out_prompts()[0], **PLAIN)
    with pytest.raises(ValueError, match="give certs and token_file as well"):
        DeployConfig(bind=Bind.NODE)


@on_one_loop
async def test_a_draft_killed_in_the_middle_changes_no_token(deployment: Deployment, secrets: Path):
    (draft,) = (worker for worker in (await deployment.status())["workers"] if worker["name"] == "draft-0")
    alive = draft["pid"]
    async with client_of(deployment, secrets) as client:
        whole = await client.generate(held_out_prompts()[0], **OPTIONS)
        async with client.stream(held_out_prompts()[0], **OPTIONS) as stream:
            async for delta in stream:
                if delta.offset > 10 and alive:
                    os.kill(alive, signal.SIGKILL)
                    alive = 0
        assert not alive, "the completion ended before the draft worker could be killed"
        assert stream.result.token_ids == whole.token_ids
        await until_drafts_serve(client)
        again = await client.generate(held_out_prompts()[0], **IN_STEP)
    assert again.token_ids == whole.token_ids
    assert again.speculation.accepted_tokens > 0


async def until_drafts_serve(client: AsyncClient) -> None:
    """Waits for the killed worker to be struck off, and for its successor."""
    async with asyncio.timeout(200):
        while not any(is_serving_draft(worker) for worker in (await client.server_info()).workers):
            await asyncio.sleep(0.1)


def is_serving_draft(worker: generation_pb2.WorkerStatus) -> bool:
    return worker.introduction.role == registry_pb2.WORKER_ROLE_DRAFT and worker.state == "serving"


# Two Rays that start at once on a machine with other work.
@pytest.mark.timeout(550)
def test_up_serves_until_told_to_stop_and_leaves_nothing():
    """Two side by side, as two terminals would have them: one ends by Ctrl-C, the other by SIGTERM."""
    with running_up("up-ctrl-c") as interrupted, running_up("up-sigterm") as told:
        endpoint_of(interrupted)
        endpoint = endpoint_of(told)
        # Ctrl-C at a terminal reaches Ray's processes too.
        os.killpg(interrupted.pid, signal.SIGINT)
        check_end(interrupted)
        assert not processes_mentioning("up-ctrl-c")
        # Another terminal finds it by its name.
        status = subprocess.run(
            [OUTRIDER, "status", "--name", "up-sigterm", "--json"], capture_output=True, text=True, check=False
        )
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["endpoints"] == [endpoint]
        os.kill(told.pid, signal.SIGTERM)
        check_end(told)
        assert not processes_mentioning("up-sigterm")


@contextlib.contextmanager
def running_up(name: str) -> Iterator[subprocess.Popen[str]]:
    command = [OUTRIDER, "up", "--port", "0", "--drafts", "0", "--name", name]
    pipe = subprocess.PIPE
    # A group of its own, as a terminal gives it.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as up:
        try:
            yield up
        finally:
            up.terminate()


def endpoint_of(up: subprocess.Popen[str]) -> str:
    assert up.stdout is not None
    assert up.stderr is not None
    said = up.stdout.readline()
    ready = re.fullmatch(r"ready (127\.0\.0\.1:\d+)\n", said)
    assert ready, said or up.stderr.read()
    return ready[1]


def check_end(up: subprocess.Popen[str]) -> None:
    rest, errors = up.communicate(timeout=200)
    assert (up.returncode, rest) == (0, ""), errors
    assert "Traceback" not in errors


def test_demo_shows_a_completion_and_what_it_cost():
    done = subprocess.run(
        [OUTRIDER, "demo", "--max-new-tokens", "24"], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert PROMPT in done.stdout
    assert re.search(r"tokens +24 \(prompt \d+\)", done.stdout)
    assert re.search(r"acceptance length +\d\.\d\d", done.stdout)
    assert done.stderr == ""


def processes_mentioning(text: str) -> list[str]:
    """Command lines of live processes other than this one."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return [line for line in lines if text in line]
