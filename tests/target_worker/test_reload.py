"""Other weights for a target that serves, over loopback gRPC: what it says afterwards, and what it refuses."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from safetensors.torch import load_file, save_file

from outrider import rpc
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError
from outrider.sampling import SamplingSpec
from outrider.target_worker.reload import Reloader
from outrider.target_worker.service import TargetServicer
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import tokens_to_bytes

PROMPT = [5, 9, 33, 2, 17, 40, 41, 8, 12, 3]
WEIGHTS = "model.safetensors"


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Path:
    """The same model after some training."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        # Of every layer another token, whatever the numbers are.
        tensors[name] = tensor.flip(0).contiguous() if tensor.dim() == 2 else tensor * 1.5
    save_file(tensors, folder / WEIGHTS)
    return folder


class Target:
    """A served model, and one stream to it."""

    def __init__(self, checkpoint: Path) -> None:
        config = EngineConfig(model_path=checkpoint, num_slots=256, max_num_seqs=4, max_tree_nodes=16, torch_threads=1)
        self.steps = StepThread(lambda: Verifier(self.reloader.load(checkpoint, self._make), max_step_tokens=32))
        self.reloader = Reloader(self.steps)
        self._config = config
        servicer = TargetServicer(self.steps, self.reloader)
        self.server = rpc.RoleServer(
            services=["outrider.v1.TargetService"],
            add_services=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server),
            address="127.0.0.1:0",
        )
        self._step = 0

    def _make(self) -> ModelRunner:
        self.runner = ModelRunner(self._config)
        return self.runner

    async def start(self) -> None:
        self.steps.start()
        await asyncio.wrap_future(self.steps.ready)
        await self.server.start()
        self.channel = rpc.open_channel(self.server.address)
        self.stub = target_pb2_grpc.TargetServiceStub(self.channel)
        self.stream = self.stub.Verify(timeout=300)

    async def stop(self) -> None:
        self.stream.cancel()
        await self.channel.close(None)
        await self.server.stop(grace_s=0)
        self.steps.stop()
        await asyncio.gather(asyncio.wrap_future(self.steps.stopped), return_exceptions=True)

    async def ask(self, session: int, length: int, opens: tuple[common_pb2.SessionOpen, ...] = ()):
        """One plain step of a session with so many tokens, asked for again while it is being prefilled."""
        while True:
            self._step += 1
            batch = target_pb2.TreeBatch(session_ids=[session], epochs=[1], lengths=[length], node_counts=[0])
            request = target_pb2.VerifyRequest(incarnation=1, step=self._step, opens=opens, trees=batch)
            await self.stream.write(request)
            answer = await self.stream.read()
            assert isinstance(answer, target_pb2.VerifyResponse)
            if answer.outcomes[0] != target_pb2.OUTCOME_DEFERRED:
                return answer
            opens = ()

    async def say(self, session: int, count: int, *, weights: str = "") -> list[int]:
        """The first tokens of a new session."""
        tokens: list[int] = []
        opens = (opening(session, weights=weights),)
        while len(tokens) < count:
            answer = await self.ask(session, len(PROMPT) + len(tokens), opens)
            tokens, opens = [*tokens, *answer.tokens], ()
        return tokens

    async def reload(self, folder: Path, swap: common_pb2.Weights | None = None) -> target_pb2.ReloadResponse:
        return await self.stub.Reload(target_pb2.ReloadRequest(path=str(folder), swap=swap), timeout=300)


def opening(session: int, *, weights: str = "") -> common_pb2.SessionOpen:
    sampling = SamplingSpec(temperature=0.0, seed=1, max_new_tokens=40)
    return common_pb2.SessionOpen(
        session_id=session, epoch=1, prompt=tokens_to_bytes(PROMPT), sampling=sampling.to_proto(), weights=weights
    )


@pytest.fixture
async def target(checkpoint: Path) -> AsyncIterator[Target]:
    target = Target(checkpoint)
    await target.start()
    try:
        yield target
    finally:
        await target.stop()


async def test_sessions_of_the_old_weights_end_and_new_ones_are_of_the_new(target: Target, other: Path):
    before = await target.say(1, 6)
    old = common_pb2.Weights()
    old.CopyFrom(target.reloader.running)
    checked = await target.reload(other)
    assert (checked.running, checked.swap_ns) == (old, 0)
    # What is only checked disturbs nobody: the session goes on.
    assert len((await target.ask(1, len(PROMPT) + 6)).tokens) == 1
    swap = common_pb2.Weights(version=checked.found.version, path=str(other), reloads=3)
    swapped = await target.reload(other, swap)
    assert (swapped.running, target.reloader.running) == (swap, swap)
    assert swapped.swap_ns > 0
    assert (target.steps.load.slots_used, target.steps.load.slots_cached, target.steps.load.sessions) == (0, 0, 0)

    answer = await target.ask(1, len(PROMPT) + 7)
    assert (answer.outcomes[0], answer.errors[0].code) == (target_pb2.OUTCOME_ERROR, grpc.StatusCode.NOT_FOUND.value[0])
    answer = await target.ask(2, len(PROMPT), (opening(2, weights=old.version),))
    assert answer.errors[0].code == grpc.StatusCode.ABORTED.value[0]
    assert "weights were replaced" in answer.errors[0].message
    fresh = Target(other)
    await fresh.start()
    try:
        expected = await fresh.say(1, 6)
        assert fresh.reloader.running.version == swap.version
    finally:
        await fresh.stop()
    assert await target.say(3, 6, weights=swap.version) == expected != before

    # Whoever orders the same once more disturbs nobody either, and a number only grows.
    again = await target.reload(other, common_pb2.Weights(version=swap.version, path=str(other), reloads=2))
    assert (again.running, again.swap_ns) == (swap, 0)
    assert len((await target.ask(3, len(PROMPT) + 6)).tokens) == 1
    # Nor does a coordinator that has not heard of it.
    old.reloads = 3
    with pytest.raises(grpc.aio.AioRpcError, match="has not heard of it") as refused:
        await target.reload(Path(old.path), old)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert len((await target.ask(3, len(PROMPT) + 7)).tokens) == 1


@pytest.mark.parametrize("spoilt", ["missing", "architecture", "written since"])
async def test_what_cannot_be_run_with_is_refused_and_the_old_weights_serve_on(
    target: Target, other: Path, spoilt: str
):
    version = (await target.reload(other)).found.version
    first = await target.say(1, 3)
    if spoilt == "missing":
        (other / WEIGHTS).unlink()
    elif spoilt == "architecture":
        config = other / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    else:
        tensors = load_file(other / WEIGHTS)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / WEIGHTS)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await target.reload(other, common_pb2.Weights(version=version, path=str(other), reloads=1))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    words = {"missing": "no *.safetensors", "architecture": "rms_norm_eps", "written since": "or was written since"}
    assert words[spoilt] in (refused.value.details() or "")
    assert len((await target.ask(1, len(PROMPT) + 3)).tokens) == 1
    assert await target.say(2, 3) == first


async def test_a_swap_that_fails_half_way_is_the_end_of_the_worker(target: Target, other: Path, monkeypatch):
    def fail(folder: Path) -> None:
        raise CheckpointError(f"{folder}: the disk is gone")

    version = (await target.reload(other)).found.version
    monkeypatch.setattr(target.runner, "refill", fail)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await target.reload(other, common_pb2.Weights(version=version, reloads=1))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(CheckpointError, match="the disk is gone"):
        await asyncio.wait_for(asyncio.wrap_future(target.steps.stopped), 60)


async def test_nothing_named_is_told(target: Target):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await target.stub.Reload(target_pb2.ReloadRequest(), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
