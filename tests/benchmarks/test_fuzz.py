"""Messages that nobody should send, some hundreds at every service; `benchmarks/fuzz.py` sends ten thousand."""

from pathlib import Path

import pytest
from benchmarks.fuzz_bench.evil_workers import EVIL_KINDS, EvilKind
from benchmarks.fuzz_bench.messages import MessageFuzzer
from benchmarks.fuzz_bench.run import fuzz, fuzz_answers
from benchmarks.fuzz_bench.services import SERVICES
from benchmarks.fuzz_bench.tiny_service import exceeded, tiny_service, write_checkpoint
from google.protobuf.message import DecodeError

from outrider.v1 import generation_pb2, target_pb2

pytestmark = pytest.mark.usefixtures("silence")
MESSAGES, ANSWERS = 300, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint(made)
    return made


async def test_every_message_is_answered_as_it_should_be_and_leaves_nothing_behind(folder: Path):
    async with tiny_service(folder) as served:
        for service in SERVICES:
            outcome = await fuzz(served, service, messages=MESSAGES, seed=7)
            assert not outcome.findings, [(finding.fault, finding.payloads) for finding in outcome.findings[:3]]
            assert not outcome.left, service
            assert outcome.probes
            # A part of them is taken, a part refused: else the one or the other was not tried.
            refused = MESSAGES - outcome.codes["OK"]
            assert refused > MESSAGES // 10, service
            assert service == "RegistryService" or refused < MESSAGES - MESSAGES // 10, service


@pytest.mark.parametrize("kind", EVIL_KINDS, ids=lambda kind: kind.name)
async def test_a_worker_that_answers_so_is_lost_and_nobody_gets_a_wrong_token(folder: Path, kind: EvilKind):
    outcome = await fuzz_answers(folder, kind, messages=ANSWERS, seed=7)
    assert not outcome.findings, [(finding.fault, finding.payloads) for finding in outcome.findings[:3]]
    assert not outcome.left


def test_messages_are_the_same_for_the_same_seed_and_reach_every_field():
    example = target_pb2.RoundCommands(
        incarnation=1, growth=target_pb2.RelayedGrowth(session_ids=[1], tokens=bytes(8), parents=bytes(8))
    )
    first, second = (MessageFuzzer(target_pb2.RoundCommands, seed=3) for _ in range(2))
    made = [first.message([example]) for _ in range(400)]
    assert made == [second.message([example]) for _ in range(400)]
    readable = []
    for data in made:
        try:
            readable.append(target_pb2.RoundCommands.FromString(data))
        except DecodeError:
            continue
    assert 200 < len(readable) < 390
    seen = {field.name for message in readable for field, _ in message.ListFields()}
    assert seen == set(target_pb2.RoundCommands.DESCRIPTOR.fields_by_name)
    growth = {field.name for message in readable for field, _ in message.growth.ListFields()}
    assert growth == set(target_pb2.RelayedGrowth.DESCRIPTOR.fields_by_name)
    assert any(len(message.growth.epochs) != len(message.growth.session_ids) for message in readable)


def test_broken_text_and_numbers_that_are_none_are_among_them():
    fuzzer = MessageFuzzer(generation_pb2.GenerateRequest, seed=5)
    example = generation_pb2.GenerateRequest(text="abc", sampling_params=generation_pb2.SamplingParams(top_p=0.5))
    made = [fuzzer.message([example]) for _ in range(1500)]
    assert any(b"\xed\xa0\x80" in data for data in made)
    assert any(b"\x00\x00\xc0\x7f" in data for data in made)
    assert max(map(len, made)) > 5000


async def test_a_gauge_that_does_not_come_back_is_seen(folder: Path):
    async with tiny_service(folder, roles=()) as service:
        before = service.gauges()
        with (folder / "config.json").open():
            assert exceeded(service.gauges(), before) == [f"files: {before.files + 1} now, {before.files} before"]
        assert not exceeded(service.gauges(), before)
