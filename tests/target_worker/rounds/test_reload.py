"""Other weights for a target that serves, over loopback gRPC: what it says afterwards, and what it refuses."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from safetensors.torch import load_file, save_file
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import PROMPT
from tests.target_worker.serving import Coordinator, Service
from transformers import LlamaForCausalLM

from outrider.errors import CheckpointError
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT, Code
from outrider.v1 import common_pb2, target_pb2

WEIGHTS = "model.safetensors"
SPEC = SamplingSpec(max_new_tokens=12)


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Path:
    """The same model after some training."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        # Of every layer another token, whatever the numbers are.
        tensors[name] = tensor.flip(0).contiguous() if tensor.dim() == 2 else tensor * 1.5
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture
async def service(checkpoint: Path) -> AsyncIterator[Service]:
    service = Service(checkpoint, RoundProgram)
    await service.start()
    yield service
    await service.stop()


async def reload(service: Service, folder: Path, swap: common_pb2.Weights | None = None) -> target_pb2.ReloadResponse:
    return await service.stub.Reload(target_pb2.ReloadRequest(path=str(folder), swap=swap), timeout=60)


async def say(coordinator: Coordinator, number: int, *, weights: str = "") -> list[int]:
    """Return the output of a new session, nothing of it if it is refused."""
    await coordinator.open(number, SPEC, weights=weights)
    key = (number, 1)
    await coordinator.read_until(lambda: key in coordinator.finishes or key in coordinator.errors)
    return coordinator.tokens.get(key, [])


async def test_sessions_of_the_old_weights_end_and_new_ones_are_of_the_new(service, other, reference_model):
    coordinator, before = Coordinator(service), plain_decode(reference_model, PROMPT, SPEC).tokens
    model = LlamaForCausalLM.from_pretrained(other, attn_implementation="eager").eval()
    after = plain_decode(model, PROMPT, SPEC).tokens
    assert after != before
    old = common_pb2.Weights()
    old.CopyFrom(service.reloader.running)
    await coordinator.open(1, SPEC, allow=len(PROMPT) + 3)
    await coordinator.read_until(lambda: len(coordinator.tokens.get((1, 1), [])) == 3)
    checked = await reload(service, other)
    assert (checked.running, checked.swap_ns) == (old, 0)
    # What is only checked disturbs nobody: the session goes on.
    await coordinator.bound(1, len(PROMPT) + 5)
    await coordinator.read_until(lambda: len(coordinator.tokens[1, 1]) == 5)
    swap = common_pb2.Weights(version=checked.found.version, path=str(other), reloads=3)
    swapped = await reload(service, other, swap)
    assert (swapped.running, service.reloader.running) == (swap, swap)
    assert swapped.swap_ns > 0
    await coordinator.read_until(lambda: (1, 1) in coordinator.errors)
    assert coordinator.errors[1, 1].code == Code.ABORTED
    assert coordinator.tokens[1, 1] == before[:5]

    assert await say(coordinator, 2, weights=old.version) == []
    assert coordinator.errors[2, 1].code == Code.ABORTED
    assert "weights were replaced" in coordinator.errors[2, 1].message
    assert await say(coordinator, 3, weights=swap.version) == after
    # Whoever orders the same once more disturbs nobody, and a number only grows.
    await coordinator.open(4, SPEC, allow=0)
    again = await reload(service, other, common_pb2.Weights(version=swap.version, path=str(other), reloads=2))
    assert (again.running, again.swap_ns) == (swap, 0)
    # Nor does a coordinator that has not heard of it.
    old.reloads = 3
    with pytest.raises(grpc.aio.AioRpcError, match="has not heard of it") as refused:
        await reload(service, Path(old.path), old)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await coordinator.bound(4, WITHOUT_LIMIT)
    await coordinator.finish(4)
    assert coordinator.tokens[4, 1] == after


@pytest.mark.parametrize("spoilt", ["missing", "architecture", "written since"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(service, other, spoilt, reference_model):
    coordinator, plain = Coordinator(service), plain_decode(reference_model, PROMPT, SPEC).tokens
    version = (await reload(service, other)).found.version
    await coordinator.open(1, SPEC, allow=0)
    if spoilt == "missing":
        (other / WEIGHTS).unlink()
    elif spoilt == "architecture":
        config = other / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    else:
        tensors = load_file(other / WEIGHTS)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / WEIGHTS)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reload(service, other, common_pb2.Weights(version=version, path=str(other), reloads=1))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    words = {"missing": "no *.safetensors", "architecture": "norm_eps", "written since": "or was written since"}
    assert words[spoilt] in (refused.value.details() or "")
    await coordinator.bound(1, WITHOUT_LIMIT)
    await coordinator.finish(1)
    assert coordinator.tokens[1, 1] == plain
    assert await say(coordinator, 2) == plain


async def test_a_swap_that_fails_half_way_is_the_end_of_the_worker(checkpoint, other):
    class Broken(Service):
        """A target whose disk goes away while weights are read from it."""

        def make_loop(self):
            loop = super().make_loop()

            def fail(folder: Path) -> None:
                raise CheckpointError(f"{folder}: the disk is gone")

            loop.reload = fail
            return loop

    service = Broken(checkpoint, RoundProgram)
    await service.start()
    version = (await reload(service, other)).found.version
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reload(service, other, common_pb2.Weights(version=version, reloads=1))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(CheckpointError, match="the disk is gone"):
        await asyncio.wait_for(asyncio.wrap_future(service.thread.stopped), 60)
    with pytest.raises(CheckpointError):
        await service.stop()


async def test_nothing_named_is_told(service):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.stub.Reload(target_pb2.ReloadRequest(), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
