"""The real roles on Ray, behind certificates and tokens: a completion, one with its draft killed, and the command."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.client import AsyncClient, GenerateOptions
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import Bind, DeployConfig
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
async def test_roles_have_the_priority_of_who_started_them(deployment: Deployment):
    pids = [worker["pid"] for worker in (await deployment.status())["workers"]]
    priorities = {pid: os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}
    assert priorities == dict.fromkeys(pids, os.getpriority(os.PRIO_PROCESS, 0))


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


@on_one_loop
async def test_a_killed_stand_by_takes_workers_alone_and_streams_go_on(deployment: Deployment, secrets: Path):
    before = {worker["name"]: worker["pid"] for worker in (await deployment.status())["workers"]}
    async with client_of(deployment, secrets) as client:
        whole = await client.generate(held_out_prompts()[0], **OPTIONS)
        stand_by = parent_of(before["target-0"])
        assert stand_by == parent_of(before["draft-0"]) != parent_of(before["coordinator-0"])
        async with client.stream(held_out_prompts()[0], **OPTIONS) as stream:
            async for delta in stream:
                if delta.offset > 10 and stand_by:
                    os.kill(stand_by, signal.SIGKILL)
                    stand_by = 0
        assert not stand_by, "the completion ended before the stand-by could be killed"
        assert stream.result.token_ids == whole.token_ids
        await until_drafts_serve(client)
    after = {worker["name"]: worker["pid"] for worker in (await deployment.status())["workers"]}
    assert {name for name, pid in after.items() if pid == before[name]} == {"coordinator-0"}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


async def until_drafts_serve(client: AsyncClient) -> None:
    """Waits for the killed worker to be struck off, and for its successor."""
    async with asyncio.timeout(200):
        while not any(is_serving_draft(worker) for worker in (await client.server_info()).workers):
            await asyncio.sleep(0.1)


def is_serving_draft(worker: generation_pb2.WorkerStatus) -> bool:
    return worker.introduction.role == registry_pb2.WORKER_ROLE_DRAFT and worker.state == "serving"


# Two Rays that start at once on a machine with other work.
@pytest.mark.timeout(550)
def test_serve_takes_requests_until_told_to_stop_and_leaves_nothing(secrets: Path):
    """Two side by side, as two terminals would have them: one ends by Ctrl-C, the other by SIGTERM."""
    tokens = ["--token-file", str(secrets / "tokens.json")]
    with (
        running("serve-ctrl-c", "--served-model-name", "coder", "--served-model-name", "other") as interrupted,
        running("serve-sigterm", *tokens) as told,
    ):
        _, said = ready(interrupted)
        endpoint, _ = ready(told)
        url = next(line.split()[-1] for line in said if line.startswith("OpenAI's API at "))
        with urllib.request.urlopen(f"{url}/models") as answer:
            assert [own["id"] for own in json.load(answer)["data"]] == ["coder", "other"]
        # Ctrl-C at a terminal reaches Ray's processes too.
        os.killpg(interrupted.pid, signal.SIGINT)
        check_end(interrupted, 130)
        assert not processes_mentioning("serve-ctrl-c")
        # Another terminal finds it by its name.
        status = outrider("status", "--name", "serve-sigterm", "--json")
        assert json.loads(status.stdout)["endpoints"] == [endpoint]
        # Tokens without certificates, as loopback may have them.
        refused = outrider("generate", "def f(", "--endpoint", endpoint)
        assert (refused.returncode, "needs a token" in refused.stderr) == (1, True)
        taken = ["--token", str(secrets / "token"), "--max-new-tokens", "4"]
        assert outrider("generate", "def f(", "--endpoint", endpoint, *taken).returncode == 0
        os.kill(told.pid, signal.SIGTERM)
        check_end(told, 0)
        assert not processes_mentioning("serve-sigterm")


@pytest.mark.timeout(250)
def test_ctrl_c_ends_a_start():
    """When Ray is still being started, which cannot be interrupted itself."""
    with running("serve-early") as early:
        assert early.stderr is not None
        while not early.stderr.readline().startswith("starting Ray"):
            assert early.poll() is None
        os.killpg(early.pid, signal.SIGINT)
        check_end(early, 130)
        assert not processes_mentioning("serve-early")
        assert not [line for line in processes_mentioning("") if f"--fate-share {early.pid}" in line]


@contextlib.contextmanager
def running(name: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [OUTRIDER, "serve", "--port", "0", "--drafts", "0", "--name", name, *options]
    pipe = subprocess.PIPE
    # A group of its own, as a terminal gives it.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as serve:
        try:
            yield serve
        finally:
            serve.terminate()


def outrider(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OUTRIDER, *words], capture_output=True, text=True, timeout=200, check=False)


def ready(serve: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """The endpoint, and what was said before it."""
    assert serve.stdout is not None
    assert serve.stderr is not None
    said = []
    while not (said and said[-1].startswith("ready in ")):
        said.append(serve.stderr.readline().rstrip())
        assert serve.poll() is None, said
    last = re.fullmatch(r"ready (127\.0\.0\.1:\d+)\n", serve.stdout.readline())
    assert last, said
    assert any(line.startswith("target-0: KV: ") for line in said)
    return last[1], said


def check_end(serve: subprocess.Popen[str], code: int) -> None:
    rest, errors = serve.communicate(timeout=200)
    assert (serve.returncode, rest) == (code, ""), errors
    assert "Traceback" not in errors


def processes_mentioning(text: str) -> list[str]:
    """Command lines of live processes other than this one."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return [line for line in lines if text in line]
