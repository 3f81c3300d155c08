"""Processes die, clients leave, requests are malformed: the output stays what it is and nothing is left behind."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import grpc
import pytest

from outrider.client import Client
from outrider.errors import OutriderError
from outrider.local import LocalService
from outrider.rpc import CHANNEL_OPTIONS
from outrider.v1 import generation_pb2

from .conftest import PATIENT_WITH_WORKERS

Rule = Literal["coupled", "target_only", "rejection"]


def wait_until(condition, *, timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_quiet(client: Client) -> bool:
    """No session anywhere, no slot held at any worker."""
    info = client.server_info()
    if info.running_sessions or info.waiting_requests:
        return False
    return all(not worker.load.sessions and not worker.load.slots_used for worker in info.workers)


def test_a_draft_killed_in_the_middle_changes_nothing(prompts):
    """Under the rules with coins other tokens may come, but none is lost or comes twice."""
    rules: tuple[Rule, ...] = ("coupled", "target_only", "rejection")
    service = LocalService(drafts=1, coordinator_args=PATIENT_WITH_WORKERS)
    with service, Client(service.endpoint) as client:
        settings = {"max_new_tokens": 160, "temperature": 1.0, "seed": 9, "ignore_eos": True}
        wanted = client.generate(prompts[0], speculation="off", **settings)
        # Not async: on a busy machine a rule may find that trees do not pay.
        settings |= {"speculation": "sync"}
        draft = service.processes["draft-0"]

        reached = dict.fromkeys(rules, 0)

        def generate(rule: Rule) -> tuple[list[int], int]:
            tokens: list[int] = []
            with client.stream(prompts[0], verification=rule, **settings) as stream:
                for delta in stream:
                    assert delta.offset == len(tokens)
                    tokens.extend(delta.token_ids)
                    reached[rule] = len(tokens)
                    # Not before each has had its share of the draft.
                    if min(reached.values()) > 40:
                        draft.kill()
            return tokens, stream.result.speculation.accepted_tokens

        with ThreadPoolExecutor(len(rules)) as pool:
            outputs = list(pool.map(generate, rules))
        assert draft.wait(timeout=60) == -signal.SIGKILL
        assert outputs[0][0] == list(wanted.token_ids)
        assert [len(tokens) for tokens, _ in outputs] == [160] * len(rules)
        assert any(accepted for _, accepted in outputs)
        # And with no draft at all.
        wait_until(lambda: len(client.server_info().workers) == 1)
        output = client.generate(prompts[0], **settings)
        assert list(output.token_ids) == list(wanted.token_ids)
        assert output.speculation.drafted_tokens == 0


def test_targets_that_stop_hand_over_and_the_last_one_killed_ends_the_stream(prompts):
    """Told to stop, a worker drains and exits 0; the tokens delivered stay valid when nobody is left."""
    service = LocalService(drafts=1, targets=2, coordinator_args=PATIENT_WITH_WORKERS)
    with service, Client(service.endpoint, max_resumes=0) as client:
        wanted = client.generate(prompts[2], max_new_tokens=200, speculation="off", ignore_eos=True)
        tokens: list[int] = []
        going = ("target-0", "draft-0")
        with client.stream(prompts[2], max_new_tokens=200, ignore_eos=True) as stream:
            for delta in stream:
                assert delta.offset == len(tokens)
                tokens.extend(delta.token_ids)
                for name in going if len(tokens) > 20 else ():
                    service.processes[name].terminate()
                    going = ()
        assert tokens == list(wanted.token_ids)
        assert [service.processes[name].wait(timeout=60) for name in ("target-0", "draft-0")] == [0, 0]
        assert [worker.state for worker in client.server_info().workers] == ["serving"]
        tokens.clear()
        # So many that this process may stand still for a while before it kills.
        with (
            pytest.raises(OutriderError, match="target"),
            client.stream(prompts[2], max_new_tokens=1800, ignore_eos=True) as stream,
        ):
            for delta in stream:
                tokens.extend(delta.token_ids)
                if len(tokens) > 20:
                    service.processes["target-1"].send_signal(signal.SIGKILL)
        assert 20 < len(tokens) < 1800
        assert tokens[:200] == list(wanted.token_ids)[: len(tokens)]
        coordinator = service.processes["coordinator"]
        coordinator.terminate()
        assert coordinator.wait(timeout=60) == 0


def test_leaving_early_frees_everything(one_draft, prompts):
    with Client(one_draft.endpoint) as client:
        for _ in range(3):
            with client.stream(prompts[3], max_new_tokens=800, ignore_eos=True) as stream:
                next(iter(stream))
        wait_until(lambda: is_quiet(client))


def test_abort_ends_a_request_of_another_client(one_draft, prompts):
    with Client(one_draft.endpoint) as client, Client(one_draft.endpoint) as other:
        with (
            pytest.raises(OutriderError, match="abort"),
            client.stream(prompts[3], max_new_tokens=1800, ignore_eos=True, request_id="long") as stream,
        ):
            for _ in stream:
                other.abort("long")
        wait_until(lambda: is_quiet(client))


def malformed_requests(vocab_size: int, max_model_len: int) -> list[bytes]:
    """Two hundred requests with something wrong, as bytes on the wire."""
    sampling_faults = [
        {"temperature": float("nan")},
        {"temperature": -0.5},
        {"temperature": float("inf")},
        {"top_p": 1.5},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -7},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 9.0},
        {"frequency_penalty": float("inf")},
        {"logit_bias": {vocab_size: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"allowed_token_ids": [vocab_size + 3]},
        {"max_new_tokens": 0},
        {"max_new_tokens": max_model_len},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"stop": [""]},
        {"stop": ["x" * 300]},
        {"stop": ["a"] * 40},
        {"stop_token_ids": [vocab_size]},
        {"n": 0},
        {"n": 99},
        {"logprobs": 21},
    ]
    requests = []
    for repeat in range(7):
        for fault in sampling_faults:
            sampling = generation_pb2.SamplingParams(**fault)
            request = generation_pb2.GenerateRequest(text=f"x = {repeat}", sampling_params=sampling)
            requests.append(request.SerializeToString())
    good = generation_pb2.GenerateRequest(text="x")
    stops_with_broken_utf8 = b"\x22\x05\x6a\x03\xff\xfe\xfd"
    over_long = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5] * (max_model_len + 1)))
    others = [
        b"",
        generation_pb2.GenerateRequest(text="").SerializeToString(),
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds()).SerializeToString(),
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[vocab_size])).SerializeToString(),
        over_long.SerializeToString(),
        good.SerializeToString() + stops_with_broken_utf8,
        good.SerializeToString() + b"\xfa\x07\x01x",
        good.SerializeToString() + b"\x22\x04\xfa\x07\x01x",
        b"\xff\xff\xff\xff",
        good.SerializeToString()[:-1],
        generation_pb2.GenerateRequest(text="x", request_id="y" * 5000).SerializeToString(),
        generation_pb2.GenerateRequest(
            text="x", speculation=generation_pb2.SpeculationParams(max_nodes=100_000)
        ).SerializeToString(),
        generation_pb2.GenerateRequest(
            text="x", received=[generation_pb2.Received(index=7, token_ids=[1])]
        ).SerializeToString(),
    ]
    return (requests + others * 2)[:200]


def test_two_hundred_malformed_requests(one_draft, prompts):
    with Client(one_draft.endpoint) as client:
        model = client.model_info().model
        requests = malformed_requests(model.vocab_size, model.max_model_len)
        assert len(requests) == 200
        with grpc.insecure_channel(one_draft.endpoint, options=CHANNEL_OPTIONS) as channel:
            generate = channel.unary_stream(
                "/outrider.v1.GenerationService/Generate",
                request_serializer=bytes,
                response_deserializer=generation_pb2.GenerateResponse.FromString,
            )
            for data in requests:
                with pytest.raises(grpc.RpcError) as caught:
                    list(generate(data, timeout=30))
                error = caught.value
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (data[:80], error.details())
                assert len(error.details() or "") > 15, data[:80]
        output = client.generate(prompts[0], max_new_tokens=8)
        assert len(output.token_ids) == 8
        wait_until(lambda: is_quiet(client))
