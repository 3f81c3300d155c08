"""Rounds without graphs on a GPU: the host reads what was packed, computes no padding, and launches none ahead."""

import importlib.util

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    Driver,
    config_of,
    loop_of,
    make_runner,
    oracle_tree,
    random_tree,
)
from tests.tiny_llama import write_llama

from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("device", ["cuda"], indirect=True),
    pytest.mark.usefixtures("device"),
]


def test_eager_rounds_give_plain_decoding(checkpoint, reference_model):
    runner = make_runner(checkpoint, enforce_eager=True)
    # Greedy, sampled, with processors, and one whose choices the host judges.
    specs = list(SPECS.values())
    plain = [plain_decode(reference_model, PROMPT, spec).tokens for spec in specs]
    driver = Driver(loop_of(runner, chunk=3))
    for first in range(0, len(specs), 8):
        part = range(first, min(first + 8, len(specs)))
        outputs = [driver.open(number, specs[number], plain[number], random_tree) for number in part]
        driver.run()
        assert [decoded.tokens for decoded in outputs] == [plain[number] for number in part]
    assert driver.loop.kv.slots.used == 0


def test_no_eager_round_is_launched_ahead(checkpoint):
    runner = make_runner(checkpoint, enforce_eager=True)
    config = config_of(runner)
    program = RoundProgram.of_runner(runner, config)
    loop = RoundLoop(runner, config, program=program)
    assert (program.runs_ahead, len(program.buckets), program.captured_ns) == (False, 1, [])
    driver = Driver(loop)
    driver.open(1, SamplingSpec(max_new_tokens=12), [], random_tree)
    while loop.has_work:
        driver.turn()
        assert not loop.is_busy
    assert len(driver.decoded[1].tokens) == 12


def test_flashinfer_rounds_accept_what_they_decode(tmp_path):
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer")
    write_llama(tmp_path, seed=7, hidden_size=64, intermediate_size=96, head_dim=64)
    driver = Driver(loop_of(make_runner(tmp_path, attention_backend="flashinfer", dtype="bfloat16"), chunk=5))
    spec = SamplingSpec(max_new_tokens=24)
    plain = driver.open(1, spec, [], random_tree)
    driver.run()
    # Logits of 16 bits may tie: then another tree has other tokens, and none behind them is accepted.
    again = driver.open(2, spec, plain.tokens, oracle_tree)
    others = [
        driver.open(number, SamplingSpec(temperature=1.0, max_new_tokens=30), [], random_tree) for number in (3, 4)
    ]
    driver.run()
    assert len(plain.tokens) == len(again.tokens) == 24
    assert sum(result.accepted for result in again.results) >= 3
    assert [len(other.tokens) for other in others] == [30, 30]
    assert driver.loop.kv.slots.used == 0
