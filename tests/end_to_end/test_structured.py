"""Structured output through real processes: valid, the same with speculation on and off, whatever else is asked for."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from outrider.client import AsyncClient, Client, GenerationOutput
from outrider.errors import InvalidRequest
from outrider.local import LocalService
from outrider.models import held_out_prompts

from .conftest import PATIENT
from .schemas import SCHEMAS

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

HAS_VLLM_DOOR = importlib.util.find_spec("smg_grpc_proto") is not None
PROMPT = "def main():"
SCHEMA: dict[str, Any] = {"json_schema": SCHEMAS["nested"], "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    door = ["--vllm-grpc"] if HAS_VLLM_DOOR else []
    with LocalService(drafts=1, target_args=["--deterministic"], coordinator_args=[*door, *PATIENT]) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: LocalService) -> Iterator[Client]:
    with Client(service.endpoint) as opened:
        yield opened


async def answers(service: LocalService, mode: Any) -> list[GenerationOutput]:
    """One answer to each schema in turn, greedy and seeded in turn."""
    prompts = held_out_prompts()
    async with AsyncClient(service.endpoint) as client:
        return await asyncio.gather(
            *(
                client.generate(
                    prompts[seed], json_schema=schema, disable_any_whitespace=True, temperature=float(seed % 2),
                    seed=seed, max_new_tokens=384, speculation=mode,
                )
                for seed, schema in enumerate(SCHEMAS.values())
            )
        )  # fmt: skip


@pytest.mark.timeout(300)
async def test_every_mode_gives_the_same_valid_outputs(service: LocalService) -> None:
    plain, *drafted = [await answers(service, mode) for mode in ("off", "async", "sync")]
    for output, schema in zip(plain, SCHEMAS.values(), strict=True):
        assert output.finish_reason == "stop", output.text
        jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
    for outputs in drafted:
        assert [list(output.token_ids) for output in outputs] == [list(output.token_ids) for output in plain]
    # What drafts are worth here: in sync trees alone is that no question of the machine's pace.
    assert not any(output.speculation.accepted_tokens for output in plain)
    accepted, steps = (
        sum(getattr(output.speculation, name) for output in drafted[1]) for name in ("accepted_tokens", "verify_steps")
    )
    assert accepted > 0.2 * steps


def test_the_other_constraints(client: Client) -> None:
    choices = ["red", "green", "a dark blue"]
    outputs = [client.generate(PROMPT, choice=choices, temperature=1.5, seed=seed).text for seed in range(6)]
    assert set(outputs) <= set(choices)
    assert len(set(outputs)) > 1
    ended = client.generate(PROMPT, regex="[0-9]{3}-[a-f]{2}", temperature=1.0, seed=3)
    assert ended.finish_reason == "stop"
    assert len(ended.text) == 6
    assert ended.text[3] == "-"
    assert client.generate(PROMPT, grammar='start: "(" start ")" | "x"', max_new_tokens=60).text.count("x") in (0, 1)
    text = client.generate(PROMPT, json_object=True, temperature=1.0, seed=1, max_new_tokens=200).text
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("speculation", ["off", "async"])
def test_with_everything_else(client: Client, speculation: Any) -> None:
    """Several choices with log probabilities; an end by length; one by a stop string."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 7, "speculation": speculation, **SCHEMA}
    whole = client.generate(PROMPT, n=2, logprobs=2, **settings)
    for choice in whole.choices:
        assert json.loads(choice.text)["user"]
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    cut = client.generate(PROMPT, max_new_tokens=5, **settings)
    assert (cut.finish_reason, list(cut.token_ids)) == ("length", list(whole.choices[0].token_ids[:5]))
    stopped = client.generate(PROMPT, stop=['"place"'], **settings)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.choices[0].text.partition('"place"')[0]


@pytest.mark.parametrize("verification", ["target_only", "rejection"])
def test_rules_with_coins(client: Client, verification: Any) -> None:
    for seed in range(2):
        output = client.generate(PROMPT, temperature=1.0, seed=seed, verification=verification, **SCHEMA)
        assert set(json.loads(output.text)) == {"user", "place"}


@pytest.mark.skipif(not HAS_VLLM_DOOR, reason="the extra `vllm-grpc` is not installed")
def test_the_door_of_vllm_gives_the_same_tokens(service: LocalService, client: Client) -> None:
    from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

    schema = json.dumps(SCHEMAS["enum"])
    wanted = client.generate(PROMPT, json_schema=schema, temperature=1.0, seed=3, max_new_tokens=200)
    params = vllm_engine_pb2.SamplingParams(json_schema=schema, temperature=1.0, seed=3, max_tokens=200)
    request = vllm_engine_pb2.GenerateRequest(text=PROMPT, sampling_params=params, stream=True)
    with grpc.insecure_channel(service.endpoint) as channel:
        messages = list(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=60))
    *chunks, last = messages
    assert list(last.complete.output_ids) == list(wanted.token_ids)
    assert [token for message in chunks for token in message.chunk.token_ids] == list(wanted.token_ids)
    assert last.complete.finish_reason == wanted.finish_reason


def test_what_is_wrong_is_told(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: cannot be compiled: Invalid type"):
        client.generate(PROMPT, json_schema={"type": "foo"})
    with pytest.raises(InvalidRequest, match="one of json_schema"):
        client.generate(PROMPT, regex="a", choice=["a"])


async def test_many_at_once_with_and_without(service: LocalService) -> None:
    async with AsyncClient(service.endpoint) as client:
        plain = client.generate(PROMPT, max_new_tokens=24)
        alone = await client.generate(PROMPT, max_new_tokens=24)
        mixed = await asyncio.gather(plain, *(client.generate(PROMPT, seed=seed, **SCHEMA) for seed in range(4)))
    assert list(mixed[0].token_ids) == list(alone.token_ids)
    assert all(set(json.loads(output.text)) == {"user", "place"} for output in mixed[1:])
