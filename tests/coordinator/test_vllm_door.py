"""The engine service that vLLM's routers know, asked through its own published stubs."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.byte_tokenizer import byte_tokenizer
from tests.coordinator.scripted_scheduler import ScriptedScheduler

from outrider.coordinator.api.access import Access
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.sessions import config as coordinator_config
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationResult,
    SpeculationCounts,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import InvalidRequest, OutriderError, WorkerUnavailable
from outrider.v1 import common_pb2, generation_pb2, registry_pb2

pytest.importorskip("smg_grpc_proto", reason="the extra `vllm-grpc` is not installed")

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from outrider.coordinator.api.vllm.requests import as_it_came, generate_request
from outrider.coordinator.api.vllm.service import VllmEngineServicer

EOS = 255
MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=64, eos_token_ids=[EOS], dtype="float32")


class Script(ScriptedScheduler):
    """Plays the same events for every request."""

    def __init__(self) -> None:
        super().__init__(lambda _: self.events)
        self.events: Sequence[GenerationEvent | OutriderError | None] = ()


TOKENIZER = TextTokenizer(byte_tokenizer())


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def info() -> generation_pb2.ServerInfo:
    model = registry_pb2.WorkerIntroduction(role=registry_pb2.WORKER_ROLE_TARGET, model=MODEL)
    status = generation_pb2.WorkerStatus(introduction=model, state="serving")
    return generation_pb2.ServerInfo(uptime_s=12.5, running_sessions=3, waiting_requests=2, workers=[status])


@pytest.fixture
async def stub(script: Script, info: generation_pb2.ServerInfo, tmp_path: Path) -> AsyncIterator[Any]:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 7})
    )
    generations = Generations(script, model=MODEL, tokenizer=TOKENIZER, limits=RequestLimits())
    servicer = VllmEngineServicer(generations, Access(), server_info=lambda: info, model_folder=tmp_path, max_running=5)
    server = grpc.aio.server()
    servicer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        await server.stop(None)


def delta(index: int, tokens: Sequence[int], offset: int, *, logprobs: bool = False) -> TokenDelta:
    found = None
    if logprobs:
        found = TokenLogprobs(
            token_logprobs=[-0.5] * len(tokens),
            top_token_ids=[[token, 9] for token in tokens],
            top_logprobs=[[-0.5, -2.0] for _ in tokens],
        )
    return TokenDelta(index=index, token_ids=tokens, text="x", offset=offset, text_offset=0, logprobs=found)


def result(*choices: ChoiceResult) -> GenerationResult:
    counts = SpeculationCounts(verify_steps=4, drafted_tokens=20, accepted_tokens=6)
    return GenerationResult(choices=choices, speculation=counts, queue_s=0.0, ttft_s=0.1, total_s=0.2, cached_tokens=2)


def stopped(index: int, count: int, **reason: Any) -> ChoiceResult:
    return ChoiceResult(index=index, finish_reason=FinishReason.STOP, completion_tokens=count, **reason)


async def all_of(call: Any) -> list[Any]:
    return [message async for message in call]


def tokenized(**params: Any) -> Any:
    return pb.GenerateRequest(
        request_id="r1",
        tokenized=pb.TokenizedInput(original_text="abc", input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(**params),
    )


async def test_a_stream_of_two_choices(stub: Any, script: Script) -> None:
    script.events = [
        delta(0, [5, 6], 0, logprobs=True),
        delta(1, [8], 0, logprobs=True),
        delta(0, [7, EOS], 2, logprobs=True),
        result(stopped(0, 4, stop_token_id=EOS), stopped(1, 1, stop_string="zz")),
    ]
    request = tokenized(n=2, logprobs=2, max_tokens=9)
    request.stream = True
    messages = await all_of(stub.Generate(request))
    chunks = [message.chunk for message in messages[:3]]
    assert [(each.index, list(each.token_ids), each.completion_tokens) for each in chunks] == [
        (0, [5, 6], 2),
        (1, [8], 1),
        (0, [7, EOS], 4),
    ]
    assert {each.prompt_tokens for each in chunks} == {3}
    assert [list(each.token_ids) for each in chunks[0].output_logprobs.top_logprobs] == [[5, 9], [6, 9]]
    first, second = (message.complete for message in messages[3:])
    assert (list(first.output_ids), first.finish_reason, first.completion_tokens) == ([5, 6, 7, EOS], "stop", 4)
    # An end that is the model's own is no matched stop.
    assert first.WhichOneof("matched_stop") is None
    assert (second.matched_stop_str, list(second.output_ids), second.index) == ("zz", [8], 1)
    assert list(first.output_logprobs.token_ids) == [5, 6, 7, EOS]
    assert (first.cached_tokens, first.spec_draft_tokens, first.spec_accepted_tokens) == (2, 20, 6)
    assert (second.spec_draft_tokens, second.cached_tokens) == (0, 2)
    assert script.generations[0].is_cancelled.is_set()


async def test_without_a_stream_there_is_one_message(stub: Any, script: Script) -> None:
    script.events = [delta(0, [5], 0), delta(0, [66], 1), result(stopped(0, 2, stop_token_id=66))]
    (message,) = await all_of(stub.Generate(tokenized(stop_token_ids=[66])))
    assert list(message.complete.output_ids) == [5, 66]
    assert message.complete.matched_token_id == 66
    assert not message.complete.HasField("output_logprobs")


async def test_defaults_are_those_of_vllm(stub: Any, script: Script) -> None:
    script.events = [result(stopped(0, 0))]
    await all_of(stub.Generate(pb.GenerateRequest(text="hello")))
    (asked,) = script.requests
    assert list(asked.prompt_token_ids) == TOKENIZER.encode("hello")
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert asked.sampling.max_new_tokens == 64 - 5
    assert asked.n == 1


def test_every_parameter_arrives() -> None:
    params = pb.SamplingParams(
        temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[4], ignore_eos=True, n=3,
        logprobs=2, seed=-1, logit_bias={5: 1.5}, skip_special_tokens=True,
    )  # fmt: skip
    request = pb.GenerateRequest(
        request_id="r", tokenized=pb.TokenizedInput(input_ids=[1]), sampling_params=params, data_parallel_rank=0
    )
    assert generate_request(request, prompt=None, max_model_len=64) == generation_pb2.GenerateRequest(
        request_id="r",
        token_ids=generation_pb2.TokenIds(ids=[1]),
        sampling_params=generation_pb2.SamplingParams(
            temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=1.5, max_new_tokens=9, min_new_tokens=2, stop=["x"], stop_token_ids=[4],
            ignore_eos=True, n=3, logprobs=2, seed=2**64 - 1, logit_bias={5: 1.5},
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"json_object": True}, {"json_object": True}),
        ({"json_object": False}, None),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, {"choice": common_pb2.ChoiceList(values=["a", "b"])}),
    ],
)
def test_structure(given: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    ours = generate_request(tokenized(**given), prompt=None, max_model_len=64).sampling_params
    assert ours.HasField("structured_outputs") == (wanted is not None)
    assert ours.structured_outputs == common_pb2.StructuredOutputs(**(wanted or {}))


@pytest.mark.parametrize(
    ("request_fields", "params", "field"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, {}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, {}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, {}, "media_refs"),
        ({"kv_transfer_params": pb.KvTransferParams()}, {}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, {}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, {}, "data_parallel_rank"),
        ({}, {"prompt_logprobs": 0}, "sampling_params.prompt_logprobs"),
        ({}, {"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens"),
        ({}, {"structural_tag": "{}"}, "sampling_params.structural_tag"),
        ({}, {"include_stop_str_in_output": True}, "sampling_params.include_stop_str_in_output"),
        ({}, {"logprobs": -1}, "sampling_params.logprobs"),
        ({}, {"logit_bias": {-3: 1.0}}, "sampling_params.logit_bias[-3]"),
    ],
)
def test_what_is_not_served_is_refused(request_fields: dict[str, Any], params: dict[str, Any], field: str) -> None:
    request = tokenized(**params)
    request.MergeFrom(pb.GenerateRequest(**request_fields))
    with pytest.raises(InvalidRequest) as caught:
        generate_request(request, prompt=None, max_model_len=64)
    assert [violation.field for violation in caught.value.violations] == [field]


async def test_errors_name_the_fields_of_the_request(stub: Any) -> None:
    request = tokenized(max_tokens=100, temperature=-1.0)
    request.tokenized.input_ids.append(999)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    said = caught.value.details() or ""
    assert "sampling_params.max_tokens: " in said
    assert "tokenized.input_ids[3]: token id 999 is outside the vocabulary" in said
    assert "sampling_params.temperature: " in said


def test_names_of_structure() -> None:
    from outrider.errors import FieldViolation

    names = ["json", "json_object", "choice.values[2]", "regex"]
    given = [FieldViolation(f"sampling_params.structured_outputs.{name}", "x") for name in names]
    assert [each.field for each in as_it_came(InvalidRequest(given)).violations] == [
        "sampling_params.json_schema",
        "sampling_params.json_object",
        "sampling_params.choice.choices[2]",
        "sampling_params.regex",
    ]


async def test_abort_ends_the_stream(stub: Any, script: Script) -> None:
    script.events = [delta(0, [5], 0), None]
    request = tokenized()
    request.stream = True
    call = stub.Generate(request)
    first = await call.read()
    assert list(first.chunk.token_ids) == [5]
    await stub.Abort(pb.AbortRequest(request_ids=["unknown", "r1"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_lost_target_is_told(stub: Any, script: Script) -> None:
    script.events = [WorkerUnavailable("no target")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(stub.Generate(tokenized()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_a_router_asks(stub: Any, info: generation_pb2.ServerInfo, tmp_path: Path) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    info.workers[0].state = "lost"
    sick = await stub.HealthCheck(pb.HealthCheckRequest())
    assert (sick.healthy, sick.message) == (False, "0 of 1 target workers serve")
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("tiny", 256, 64)
    assert (list(model.eos_token_ids), model.bos_token_id, model.pad_token_id) == ([EOS], 7, 0)
    assert (model.model_type, list(model.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert model.tokenizer_path == str(tmp_path)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.active_requests, server.uptime_seconds, server.max_num_seqs) == (5, 12.5, 5)
    assert (server.server_type, server.model_dtype) == ("vllm-grpc", "torch.float32")


async def test_the_rest_is_unimplemented(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Embed(pb.EmbedRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(stub.SubscribeKvEvents(_kv_events_request()))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "SubscribeKvEvents is not served here" in (caught.value.details() or "")


def _kv_events_request() -> Any:
    from smg_grpc_proto.generated import common_pb2 as smg_common_pb2

    return smg_common_pb2.SubscribeKvEventsRequest()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_config.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[vllm-grpc\]'"):
        CoordinatorConfig(vllm_grpc=True)


async def test_what_this_door_alone_refuses_is_counted(script: Script, tmp_path: Path) -> None:
    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def abort(self, *reason: Any) -> None:
            raise grpc.aio.AbortError(*reason)

        abort_with_status = abort

    told = list[OutriderError]()
    generations = Generations(script, model=MODEL, tokenizer=TOKENIZER, limits=RequestLimits())
    generations.on_refusal = told.append
    servicer = VllmEngineServicer(
        generations, Access(), server_info=generation_pb2.ServerInfo, model_folder=tmp_path, max_running=5
    )
    for request in (pb.GenerateRequest(text="a" * 1_000), pb.GenerateRequest(text="a", data_parallel_rank=1)):
        with pytest.raises(grpc.aio.AbortError):
            await anext(servicer.Generate(request, Context()))
    assert [type(error) for error in told] == [InvalidRequest, InvalidRequest]
