"""Rounds of a resident draft: the trees of single operators, whichever sessions share a round, as graphs on a GPU."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.conftest import VOCAB_SIZE
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.resident_support import PROMPT, SPECS, Rig, check_head, make_rig, random_head
from transformers import PreTrainedModel

from outrider.sampling import SamplingSpec, VerificationRule
from outrider.step_holdups import StepHoldups
from outrider.target_worker.resident_growth import DraftLimits


@pytest.fixture(scope="module")
def head(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("head"), checkpoint, taps=(0, 1, 2))


@pytest.fixture(scope="module")
def rig(checkpoint: Path, head: Path) -> Rig:
    return make_rig(checkpoint, head)


def test_the_decoder_gives_the_same_trees(checkpoint: Path, head: Path, rig: Rig) -> None:
    """The program that CUDA graphs are captured of, on the CPU, in deterministic mode as well."""
    spec = SPECS["coupled"]
    rig.open(1, spec, draft=DraftLimits(is_fixed=True))
    rig.step([1])
    rig.step([1])
    expected = rig.growth[1]
    rig.verifier.close((7, 1), 1)
    assert expected is not None
    for deterministic in (False, True):
        other = make_rig(checkpoint, head, decoder=True, deterministic=deterministic)
        other.open(1, spec, draft=DraftLimits(is_fixed=True))
        other.step([1])
        other.step([1])
        found = other.growth[1]
        assert found is not None
        assert (found.tokens, found.as_of) == (expected.tokens, expected.as_of)
        np.testing.assert_allclose(found.acceptance, expected.acceptance, rtol=1e-3)
        check_head(other, 1)


@pytest.mark.parametrize(("prompt_len", "depth"), [(7, 3), (90, 3), (7, 1)])
def test_sessions_of_all_kinds_grow_the_same_trees_in_rounds(
    prompt_len: int, depth: int, checkpoint: Path, head: Path
) -> None:
    """Those that a graph does not take are in between; and a step of more rows than a graph's leaves its hidden states
    elsewhere.
    """
    rigs = [
        make_rig(
            checkpoint,
            head,
            decoder=decoder,
            trees={"depth": depth},
            num_slots=1024,
            max_step_tokens=1024,
        )
        for decoder in (False, True)
    ]
    kinds = ("penalties", "coupled", "greedy", "min-new", "filters", "coupled")
    target_only = replace(SPECS["coupled"], verification=VerificationRule.TARGET_ONLY)
    specs = [*(replace(SPECS[name], max_new_tokens=6) for name in kinds), replace(target_only, max_new_tokens=6)]
    for each in rigs:
        for number, spec in enumerate(specs):
            prompt = [(7 * place + number) % VOCAB_SIZE for place in range(prompt_len)]
            each.open(number, spec, prompt=prompt, draft=DraftLimits(is_fixed=True))
        each.step(range(len(specs)))
    features = [each.runner.features for each in rigs]
    assert (len(features[1]) > 512) == (prompt_len == 90)
    for number in range(len(specs)):
        expected, found = (each.growth[number] for each in rigs)
        assert expected is not None and found is not None
        assert (found.tokens, found.parents) == (expected.tokens, expected.parents), number
        for each in rigs:
            check_head(each, number)


def test_a_tree_outlives_the_rounds_of_others(checkpoint: Path, head: Path) -> None:
    """What comes back of a round lies in a buffer that later ones use again; commits tell of trees much later."""
    rig = make_rig(checkpoint, head, decoder=True)
    for number, prompt in ((1, PROMPT), (2, PROMPT[::-1])):
        rig.open(number, SamplingSpec(temperature=1.0, seed=number, max_new_tokens=40), prompt=prompt)
        rig.step([number])
    session = rig.verifier._sessions[7, 1]  # pyright: ignore[reportPrivateUsage]
    assert session.drafted is not None
    names = ("tokens", "buckets", "acceptance", "values", "above")
    before = {name: getattr(session.drafted, name).copy() for name in names}
    for _ in range(8):
        rig.step([2])
    for name in names:
        np.testing.assert_array_equal(getattr(session.drafted, name), before[name], err_msg=name)


def cuda_rig(checkpoint: Path, head: Path, **overrides: Any) -> Rig:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_rig(checkpoint, head, **{"device": "cuda", "dtype": "float32", "max_num_seqs": 16} | overrides)


def check_all(rig: Rig, model: PreTrainedModel) -> None:
    """All kinds of sessions in the same steps."""
    specs = dict(enumerate(SPECS.values()))
    prompts = {number: [*PROMPT, *range(number, number + 20)] for number in specs}
    for number, spec in specs.items():
        rig.open(number, spec, prompt=prompts[number])

    def is_live(number: int) -> bool:
        out, spec = rig.outputs[number], specs[number]
        return len(out) < spec.max_new_tokens and not (out and out[-1] in spec.stop_token_ids)

    steps = 0
    while live := [number for number in specs if is_live(number)]:
        rig.step(live)
        steps += 1
        for number in live if steps % 4 == 1 else ():
            check_head(rig, number)
    for number, spec in specs.items():
        assert rig.outputs[number] == plain_decode(model, prompts[number], spec).tokens, spec
        check_head(rig, number)
        rig.verifier.close((7, number), 1)
    assert rig.runner.slots.used == 0


def test_all_kinds_of_sessions_share_steps_of_the_decoder(
    checkpoint: Path, head: Path, reference_model: PreTrainedModel
) -> None:
    check_all(make_rig(checkpoint, head, decoder=True, max_num_seqs=16), reference_model)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_on_a_gpu_tokens_and_the_heads_kv_are_the_same(
    options: dict[str, Any], checkpoint: Path, head: Path, reference_model: PreTrainedModel
) -> None:
    rig = cuda_rig(checkpoint, head, **options)
    rig.resident.warm_up()
    check_all(rig, reference_model)


@pytest.mark.gpu
# torch says once a process that this mode is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
# torch says once a process that a profile has the events of its own cycle alone, which is what is counted.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_a_round_is_one_graph_and_gives_the_trees_of_the_cpu(checkpoint: Path, head: Path, rig: Rig) -> None:
    """Nothing in it asks the device for a value, and what comes back is what single operators give."""
    other = cuda_rig(checkpoint, head)
    other.resident.warm_up()
    spec = SPECS["coupled"]
    for each in (rig, other):
        for number in (1, 2, 3):
            each.open(number, replace(spec, seed=number), draft=DraftLimits(is_fixed=True))
        each.step([1, 2, 3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            other.step([1, 2, 3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.step([1, 2, 3])
    launched = [event.name for event in trace.events() or () if event.name.startswith("cudaGraphLaunch")]
    # The target's own step is three pieces (`outrider.engine.step_graphs`).
    assert len(launched) <= 4
    for number in (1, 2, 3):
        mine, theirs = other.growth[number], rig.growth[number]
        assert mine is not None and theirs is not None
        assert (mine.tokens, mine.parents) == (theirs.tokens, theirs.parents)
        rig.verifier.close((7, number), 1)


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_compiled_while_it_serves(
    checkpoint: Path, head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of any length, sessions that grow and that do not, and a step of more rows than a graph's."""
    rig = cuda_rig(checkpoint, head, dtype="bfloat16", num_slots=2048, max_step_tokens=1024)
    rig.runner.warm_up()
    rig.resident.warm_up()
    holdups = StepHoldups(logging.getLogger("outrider.test"), "verification")
    holdups.begin()
    specs = [SamplingSpec(temperature=float(number % 2), seed=number, max_new_tokens=10) for number in range(16)]
    for opened, prompt_len in ((1, 1), (3, 23), (16, 70), (9, 41)):
        for number in range(opened):
            prompt = [(5 * place + number) % VOCAB_SIZE for place in range(prompt_len)]
            rig.open(number, specs[number], prompt=prompt, draft=DraftLimits() if number % 3 else None)
        while live := [number for number in range(opened) if len(rig.outputs[number]) < 10]:
            rig.step(live)
        for number in range(opened):
            rig.verifier.close((7, number), 1)
    holdups.note(0, rows=0, sessions=0)
    assert "kernel" not in caplog.text
