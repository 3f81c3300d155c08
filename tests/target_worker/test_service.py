"""The target's service over loopback gRPC, with a real model behind it."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from transformers import PreTrainedModel

from outrider import rpc
from outrider.draft_distribution import DraftDistribution, pack_distributions
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.service import TargetServicer
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_from_bytes, tokens_to_bytes

PROMPT = [5, 9, 33, 2, 17]


class Service:
    """A served verifier, and what a coordinator would see of it."""

    def __init__(self, checkpoint: Path) -> None:
        config = EngineConfig(model_path=checkpoint, num_slots=256, max_num_seqs=4, max_tree_nodes=16, torch_threads=1)
        self.steps = StepThread(lambda: Verifier(ModelRunner(config), max_step_tokens=32))
        self.servicer = TargetServicer(self.steps)
        self.server = rpc.RoleServer(
            services=["outrider.v1.TargetService"],
            add_services=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(self.servicer, server),
            address="127.0.0.1:0",
        )

    async def start(self) -> None:
        self.steps.start()
        await asyncio.wrap_future(self.steps.ready)
        await self.server.start()
        self.channel = rpc.open_channel(self.server.address)

    async def stop(self) -> None:
        await self.channel.close(None)
        await self.server.stop(grace_s=0)
        self.steps.stop()
        await asyncio.wrap_future(self.steps.stopped)

    def verify(self) -> grpc.aio.StreamStreamCall:
        return target_pb2_grpc.TargetServiceStub(self.channel).Verify(timeout=30)

    async def until_empty(self) -> None:
        async with asyncio.timeout(30):
            while self.steps.load.sessions or self.steps.load.slots_used:
                await asyncio.sleep(0.01)


@pytest.fixture
async def service(checkpoint: Path) -> AsyncIterator[Service]:
    service = Service(checkpoint)
    await service.start()
    yield service
    await service.stop()


async def read(call: grpc.aio.StreamStreamCall) -> target_pb2.VerifyResponse:
    response = await call.read()
    assert isinstance(response, target_pb2.VerifyResponse)
    return response


def opening(number: int, *, epoch: int = 1, **sampling: object) -> common_pb2.SessionOpen:
    spec = SamplingSpec(**{"max_new_tokens": 12} | sampling)  # type: ignore[arg-type]
    return common_pb2.SessionOpen(
        session_id=number, epoch=epoch, prompt=tokens_to_bytes(PROMPT), sampling=spec.to_proto()
    )


def batch(length: int, *numbers: int, tokens: list[int] | None = None) -> target_pb2.TreeBatch:
    """The same chain of tokens for every session."""
    tokens = tokens or []
    return target_pb2.TreeBatch(
        session_ids=numbers,
        epochs=[1] * len(numbers),
        lengths=[length] * len(numbers),
        node_counts=[len(tokens)] * len(numbers),
        tokens=tokens * len(numbers),
        parents=list(range(len(tokens))) * len(numbers),
    )


def request(step: int, trees: target_pb2.TreeBatch | None = None, **fields: object) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(incarnation=99, step=step, trees=trees, **fields)  # type: ignore[arg-type]


def plain_tokens(model: PreTrainedModel, count: int) -> list[int]:
    import torch

    tokens = list(PROMPT)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


async def test_verifies_trees_and_reports_the_step(service: Service, reference_model: PreTrainedModel) -> None:
    plain = plain_tokens(reference_model, 5)
    call = service.verify()
    await call.write(request(1, batch(5, 1, 2), opens=[opening(1), opening(2, logprobs=2)]))
    first = await read(call)
    assert (first.step, list(first.session_ids), list(first.epochs)) == (1, [1, 2], [1, 1])
    assert list(first.outcomes) == [target_pb2.OUTCOME_ACCEPTED] * 2
    assert (list(first.accepted_counts), list(first.token_counts)) == ([0, 0], [1, 1])
    assert list(first.tokens) == plain[:1] * 2
    assert [entry.row for entry in first.logprobs] == [1]
    assert floats_from_bytes(first.logprobs[0].top_logprobs)[0] == floats_from_bytes(first.logprobs[0].token_logprobs)
    assert first.logprobs[0].top_token_ids[0] == plain[0]
    assert (first.report.tokens, first.report.sessions) == (10, 2)
    assert first.report.step_ns > first.report.forward_ns > 0
    # Both have the same prompt of 5 tokens: its KV is held once.
    assert (first.load.sessions, first.load.slots_used, first.load.slots_total, first.load.steps) == (2, 5, 256, 1)
    wrong = (plain[3] + 1) % 61
    await call.write(request(2, batch(6, 1, 2, tokens=[plain[1], plain[2], wrong])))
    second = await read(call)
    assert (list(second.accepted_counts), list(second.accepted_nodes)) == ([2, 2], [1, 2, 1, 2])
    assert list(second.tokens) == plain[1:4] * 2
    assert len(floats_from_bytes(second.logprobs[0].token_logprobs)) == 3
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    await service.until_empty()


async def test_a_duplicate_step_is_ignored_and_counted(service: Service) -> None:
    call = service.verify()
    message = request(3, batch(5, 1), opens=[opening(1)])
    for _ in range(2):
        await call.write(message)
    await call.write(request(2, batch(6, 1)))
    await call.write(request(4, batch(6, 1)))
    assert [(await read(call)).step for _ in range(2)] == [3, 4]
    assert service.servicer.duplicates == 2
    call.cancel()
    await service.until_empty()


async def test_messages_without_a_step_open_and_close_and_are_not_answered(service: Service) -> None:
    call = service.verify()
    await call.write(request(0, opens=[opening(1), opening(2)]))
    await call.write(request(1, batch(5, 1)))
    assert list((await read(call)).outcomes) == [target_pb2.OUTCOME_ACCEPTED]
    await call.write(request(0, close_session_ids=[1, 2], close_epochs=[1, 1]))
    await service.until_empty()
    await call.write(request(2, batch(6, 1)))
    late = await read(call)
    assert list(late.outcomes) == [target_pb2.OUTCOME_ERROR]
    assert late.errors[0].code == grpc.StatusCode.NOT_FOUND.value[0]
    call.cancel()


async def test_errors_of_one_session_leave_others_and_the_stream_alone(service: Service) -> None:
    call = service.verify()
    bad_prompt = opening(2)
    bad_prompt.prompt = b"abc"
    bad_token = opening(3)
    bad_token.prompt = struct.pack("<2I", 4, 4_000_000_000)
    await call.write(request(1, batch(5, 1, 2, 3, 4), opens=[opening(1), bad_prompt, bad_token]))
    response = await read(call)
    assert list(response.outcomes) == [target_pb2.OUTCOME_ACCEPTED] + [target_pb2.OUTCOME_ERROR] * 3
    messages = {error.session_id: error.message for error in response.errors}
    assert "token ids from 0 to 60" in messages[3]
    assert "open it again" in messages[4]
    assert "prompt, output" in messages[2]
    await call.write(request(2, batch(6, 1)))
    assert list((await read(call)).outcomes) == [target_pb2.OUTCOME_ACCEPTED]
    call.cancel()


async def test_every_rule_over_the_wire_its_faults_in_band(service: Service) -> None:
    """Seven is all that may be chosen, so it is accepted wherever the tree is one that the rule takes."""
    call = service.verify()
    rules = [VerificationRule.REJECTION] * 2 + [VerificationRule.TARGET_ONLY] * 2
    opens = [
        opening(number, temperature=1.0, allowed_token_ids=(7,), verification=rule)
        for number, rule in enumerate(rules, start=1)
    ]
    trees = target_pb2.TreeBatch(
        session_ids=[1, 2, 3, 4],
        epochs=[1] * 4,
        lengths=[5] * 4,
        node_counts=[2, 1, 2, 2],
        tokens=[7, 7, 7, 7, 7, 3, 7],
        parents=[0, 1, 0, 0, 0, 0, 0],
    )
    q = DraftDistribution.quantised([3, 7], [0.75, 0.25])
    distributions = pack_distributions([q, q, *[None] * 5])
    assert distributions is not None
    trees.distributions.CopyFrom(distributions)
    await call.write(request(1, trees, opens=opens))
    response = await read(call)
    accepted, error = target_pb2.OUTCOME_ACCEPTED, target_pb2.OUTCOME_ERROR
    assert list(response.outcomes) == [accepted, error, error, accepted]
    assert list(response.tokens) == [7] * 5
    assert list(response.accepted_counts) == [2, 0, 0, 1]
    assert list(response.accepted_nodes) == [1, 2, 2]
    messages = {error.session_id: error.message for error in response.errors}
    assert "node 1 has none" in messages[2]
    assert "distinct" in messages[3]
    trees.distributions.counts.pop()
    await call.write(request(2, trees))
    with pytest.raises(grpc.aio.AioRpcError, match=r"distributions\.counts: 6 entries given, 7 needed"):
        await read(call)


async def test_columns_that_do_not_fit_end_the_stream_with_their_names(service: Service) -> None:
    call = service.verify()
    trees = batch(5, 1, tokens=[1, 2])
    trees.parents.pop()
    await call.write(request(1, trees, opens=[opening(1)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "trees.parents: 1 entries given, 2 needed" in (caught.value.details() or "")


async def test_the_end_of_a_stream_closes_its_sessions_only(service: Service) -> None:
    lost, kept = service.verify(), service.verify()
    await lost.write(request(1, batch(5, 1, 2), opens=[opening(1), opening(2)]))
    await read(lost)
    # The coordinator dials anew and reopens session 2 before the old stream's end is noticed.
    await kept.write(request(1, opens=[opening(2, epoch=2)], trees=target_pb2.TreeBatch()))
    await read(kept)
    lost.cancel()
    async with asyncio.timeout(30):
        while service.steps.load.sessions != 1:
            await asyncio.sleep(0.01)
    trees = batch(5, 2)
    trees.epochs[0] = 2
    await kept.write(request(2, trees))
    assert list((await read(kept)).outcomes) == [target_pb2.OUTCOME_ACCEPTED]
    kept.cancel()
    await service.until_empty()


async def test_many_coordinators_at_once(service: Service, reference_model: PreTrainedModel) -> None:
    plain = plain_tokens(reference_model, 6)

    async def coordinator(incarnation: int) -> list[int]:
        call, tokens = service.verify(), []
        for step in range(1, 7):
            message = request(step, batch(5 + len(tokens), 1), opens=[opening(1)] if step == 1 else [])
            message.incarnation = incarnation
            await call.write(message)
            tokens += (await read(call)).tokens
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return tokens

    assert await asyncio.gather(*(coordinator(number) for number in range(4))) == [plain] * 4
    await service.until_empty()
