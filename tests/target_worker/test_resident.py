"""A target that drafts by itself: the same tokens as plain decoding, and a head whose KV is right whatever happened."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.conftest import VOCAB_SIZE
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.resident_support import (
    PROMPT,
    FreshHead,
    Rig,
    held_entries,
    make_rig,
    random_head,
    tree_of,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.engine.batch import BatchBuilder
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.step_holdups import StepHoldups
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_growth import DraftLimits
from outrider.target_worker.resident_head import HeadLayer
from outrider.target_worker.sessions import Outcome, TreeRequest

SPECS = {
    "greedy": SamplingSpec(max_new_tokens=20),
    "coupled": SamplingSpec(temperature=1.0, seed=2**63 + 11, max_new_tokens=20),
    "filters": SamplingSpec(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5, choice_index=2, max_new_tokens=20
    ),
    "penalties": SamplingSpec(
        temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=3, max_new_tokens=20
    ),
    "stop": SamplingSpec(temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 9)), max_new_tokens=40),
    "min-new": SamplingSpec(
        temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 3)), min_new_tokens=9, max_new_tokens=40
    ),
    "allowed": SamplingSpec(allowed_token_ids=(4, 8, 15), temperature=1.0, seed=1, max_new_tokens=24),
    "short": SamplingSpec(max_new_tokens=3),
    "one": SamplingSpec(max_new_tokens=1, temperature=1.0, seed=2),
}


@pytest.fixture(scope="module")
def head(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("head"), checkpoint, taps=(0, 1, 2))


@pytest.fixture(scope="module")
def rig(checkpoint: Path, head: Path) -> Rig:
    return make_rig(checkpoint, head)


def check_head(rig: Rig, number: int) -> None:
    """What the head has in a session's slots is what it would have computed of the session's tokens alone."""
    tokens, entries = held_entries(rig, number)
    if not len(entries):
        return
    near = 1e-4 if rig.runner.device.type == "cpu" else 1e-3
    torch.testing.assert_close(entries, FreshHead(rig, tokens).entries(), rtol=near, atol=near)


@pytest.mark.parametrize("name", SPECS)
def test_what_the_head_grows_changes_no_token(name: str, rig: Rig, reference_model: PreTrainedModel) -> None:
    spec = SPECS[name]
    rig.results.clear()
    rig.open(1, spec)
    assert rig.decode(1, spec) == plain_decode(reference_model, PROMPT, spec).tokens
    if spec.max_new_tokens > 3:
        # One token before the end no tree can save a step.
        grown = [result.growth for result in rig.results[:-2]]
        assert all(growth is not None and growth.tokens for growth in grown), "nothing was grown"
        check_head(rig, 1)
    rig.verifier.close((7, 1), 1)
    assert rig.runner.slots.used == 0
    assert rig.results[-1].growth is None, "grown behind the last token"


@pytest.mark.parametrize("layout", ["eagle1", "eagle3"])
def test_a_head_that_guesses_right_saves_steps(
    layout: str, checkpoint: Path, tmp_path: Path, reference_model: PreTrainedModel
) -> None:
    """Three allowed tokens, three children of a node: some child is always right, whatever the head."""
    rig = make_rig(
        checkpoint,
        random_head(tmp_path, checkpoint, layout=layout),
        trees={"depth": 3, "top_k": 3, "nodes": 3 + 9 + 9},
        max_tree_nodes=32,
    )
    spec = SPECS["allowed"]
    rig.open(1, spec)
    assert rig.decode(1, spec) == plain_decode(reference_model, PROMPT, spec).tokens
    # All of the first two levels are in every tree but the last ones: at least three tokens a step.
    assert len(rig.results) <= 1 + -(-23 // 3)
    check_head(rig, 1)


def test_sessions_share_a_step_and_a_prefix(rig: Rig, reference_model: PreTrainedModel) -> None:
    """Prompts that part after a while: what the head has of the last common token depends on what comes next."""
    long = [*PROMPT, *range(20, 40)]
    prompts = {1: long, 2: [*long[:15], 50, 51, 52], 3: long, 4: [*long, 3, 1, 4]}
    spec = SamplingSpec(temperature=1.0, seed=6, max_new_tokens=9)
    plain = {n: plain_decode(reference_model, prompt, spec).tokens for n, prompt in prompts.items()}
    for number in (1, 2, 3, 4):
        rig.open(number, spec, prompt=prompts[number])
        rig.step([number])
        check_head(rig, number)
    while live := [n for n in prompts if len(rig.outputs[n]) < 9]:
        rig.step(live)
    assert rig.outputs == {**rig.outputs, **plain}
    for number in prompts:
        check_head(rig, number)
        rig.verifier.close((7, number), 1)
    # What is remembered now is right for whoever goes on in another way.
    rig.open(5, spec, prompt=[*long[:20], 9, 9, 9])
    assert rig.decode(5, spec) == plain_decode(reference_model, [*long[:20], 9, 9, 9], spec).tokens
    assert rig.results[-1].cached_tokens >= 15
    check_head(rig, 5)
    rig.verifier.close((7, 5), 1)
    assert rig.runner.slots.used == 0


def test_preemption_and_want_of_slots_lose_nothing(
    checkpoint: Path, head: Path, reference_model: PreTrainedModel
) -> None:
    rig = make_rig(checkpoint, head, num_slots=60)
    spec = SamplingSpec(temperature=1.0, seed=6, max_new_tokens=30)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    for number in range(4):
        rig.open(number, spec)
    for step in range(400):
        live = [number for number in range(4) if len(rig.outputs[number]) < 30]
        if not live:
            break
        rig.step(live)
        for number in live:
            if step % 6 == 0:
                check_head(rig, number)
            if len(rig.outputs[number]) >= 30:
                rig.verifier.close((7, number), 1)
    assert [rig.outputs[number] for number in range(4)] == [plain] * 4
    assert rig.verifier.preemptions > 0
    assert rig.resident.missed > 0, "there were slots for every tree"
    assert rig.runner.slots.used == 0


def test_a_session_that_is_opened_anew_or_cut_goes_on(rig: Rig, reference_model: PreTrainedModel) -> None:
    spec = SamplingSpec(temperature=1.0, seed=12, max_new_tokens=16)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    rig.open(1, spec)
    while len(rig.outputs[1]) < 8:
        rig.step([1])
    ids = set(rig.growth[1].node_ids) if rig.growth[1] else set()
    rig.open(1, spec, output=plain[:5], epoch=2)
    rig.step([1], epoch=2)
    assert rig.growth[1] is not None
    assert not ids & set(rig.growth[1].node_ids), "an id was used twice"
    check_head(rig, 1)
    # A shorter length than the worker has: it goes back.
    del rig.outputs[1][4:]
    rig.step([1], epoch=2)
    assert rig.outputs[1] == plain[: len(rig.outputs[1])]
    check_head(rig, 1)
    # Other tokens after the sixth.
    other = [*plain[:6], (plain[6] + 1) % VOCAB_SIZE]
    rig.open(1, spec, output=other, epoch=3)
    rig.step([1], epoch=3)
    check_head(rig, 1)
    rig.verifier.close((7, 1), 3)


def test_long_prompts_come_in_parts(checkpoint: Path, head: Path, reference_model: PreTrainedModel) -> None:
    rig = make_rig(checkpoint, head, max_step_tokens=8)
    prompt = [(7 * place) % VOCAB_SIZE for place in range(50)]
    spec = SamplingSpec(max_new_tokens=5)
    rig.open(1, spec, prompt=prompt)
    while rig.verifier.prefill():
        check_head(rig, 1)
    assert rig.decode(1, spec) == plain_decode(reference_model, prompt, spec).tokens
    check_head(rig, 1)


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


@pytest.mark.parametrize("decoder", [False, True])
def test_every_candidate_is_what_the_head_says_after_its_path(decoder: bool, checkpoint: Path, head: Path) -> None:
    """Each group of a grown tree, computed anew as if its path were the sequence."""
    rig = make_rig(checkpoint, head, decoder=decoder, trees={"depth": 4, "top_k": 3, "nodes": 9})
    # What a row sees has to count, more than in a head of small random weights.
    weights = rig.resident.head.weights
    assert isinstance(weights.attention_output, torch.Tensor) and isinstance(weights.qkv, torch.Tensor)
    weights.attention_output.mul_(40)
    weights.qkv.mul_(6)
    spec = SPECS["coupled"]
    # Another session mixes up which slots are free.
    for number in (1, 2):
        rig.open(number, spec, prompt=PROMPT[: 4 + number], draft=DraftLimits(is_fixed=True))
    for _ in range(3):
        rig.step([1, 2])
    session = rig.verifier._sessions[7, 1]  # pyright: ignore[reportPrivateUsage]
    tree = session.drafted
    assert tree is not None
    fresh = FreshHead(rig, session.tokens)
    ranker = CandidateRanker(AcceptanceCalibration(branching=3), top_k=3, vocab_size=61, device=torch.device("cpu"))
    columns = RankedSessions.of([session], torch.device("cpu"))
    for group in range(len(tree.tokens)):
        path, above = [], int(tree.above[group])
        while above >= 0:
            path.append(int(tree.tokens.flat[above]))
            above = int(tree.above[above // 3])
        hidden = fresh.last
        for token in reversed(path):
            hidden = fresh.draft(hidden, token)
        found = ranker.rank(columns, fresh.logits(hidden), depth=len(path))
        assert tree.tokens[group].tolist() == found.tokens[0].tolist(), path
        np.testing.assert_allclose(tree.acceptance[group], found.acceptance[0], rtol=1e-4)
        fresh.take_back(len(session.tokens) - 1)


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


def test_what_a_session_asks_for_bounds_its_trees(rig: Rig) -> None:
    spec = SamplingSpec(temperature=1.0, seed=2, max_new_tokens=20)
    chain = replace(spec, verification=VerificationRule.REJECTION)
    limits = {1: DraftLimits(max_nodes=2), 2: DraftLimits(max_depth=1), 3: None, 4: DraftLimits()}
    for number, draft in limits.items():
        rig.open(number, chain if number == 4 else spec, draft=draft)
    rig.step([1, 2, 3, 4])
    first, second = rig.growth[1], rig.growth[2]
    assert first is not None and len(first.tokens) == 2
    assert second is not None and set(second.parents) == {0}
    assert rig.growth[3] is None
    assert rig.growth[4] is None
    for number in limits:
        rig.verifier.close((7, number), 1)


def test_in_a_large_step_nothing_is_grown_and_the_head_goes_on(
    checkpoint: Path, head: Path, reference_model: PreTrainedModel
) -> None:
    rig = make_rig(checkpoint, head, trees={"max_sessions": 1})
    spec = SamplingSpec(max_new_tokens=6)
    for number in (1, 2):
        rig.open(number, spec)
    rig.step([1, 2])
    assert rig.growth == {1: None, 2: None}
    rig.step([1])
    assert rig.growth[1] is not None
    for number in (1, 2):
        check_head(rig, number)
        assert rig.decode(number, spec) == plain_decode(reference_model, PROMPT, spec).tokens


def test_trees_that_nobody_asks_for_are_not_grown(checkpoint: Path, head: Path) -> None:
    rig = make_rig(checkpoint, head)
    rig.open(1, SamplingSpec(temperature=1.0, seed=3, max_new_tokens=80))
    grown = []
    for step in range(1, 40):
        length = len(PROMPT) + len(rig.outputs[1])
        wanted = tree_of(rig.growth[1]) if rig.growth[1] and step > 32 else ([], [])
        tree = TreeRequest(key=(7, 1), epoch=1, length=length, tokens=wanted[0], parents=wanted[1])
        result = rig.verifier.step([tree]).results[0]
        rig.outputs[1] += result.token_ids
        rig.growth[1] = result.growth
        if result.growth is not None:
            grown.append(step)
    # Eight trees in vain; then one step in eight asks again.
    assert grown[:11] == [*range(1, 9), 16, 24, 32]
    # Somebody has asked for that one: trees are grown as before.
    assert grown[11:] == list(range(33, 40))
    check_head(rig, 1)


def test_sessions_that_take_turns_are_all_asked_again(checkpoint: Path, head: Path) -> None:
    """Steps of two coordinators: each session counts its own."""
    rig = make_rig(checkpoint, head)
    grown: dict[int, list[int]] = {1: [], 2: []}
    for number in grown:
        rig.open(number, SamplingSpec(temperature=1.0, seed=3, max_new_tokens=80))
    for step in range(1, 25):
        for number, its in grown.items():
            length = len(PROMPT) + len(rig.outputs[number])
            tree = TreeRequest(key=(7, number), epoch=1, length=length, tokens=(), parents=())
            result = rig.verifier.step([tree]).results[0]
            rig.outputs[number] += result.token_ids
            if result.growth is not None:
                its.append(step)
    assert grown == {1: [*range(1, 9), 16, 24], 2: [*range(1, 9), 16, 24]}


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


def test_the_decoder_taps_what_transformers_code_does(checkpoint: Path) -> None:
    """A layer that is named twice as well: the default of published heads has that where the target is small."""
    found = []
    for decoder in (False, True):
        runner = ModelRunner(EngineConfig(model_path=checkpoint, num_slots=64, torch_threads=1), decoder=decoder)
        runner.tap((1, 0, 1, 2, -1))
        row = runner.slots.acquire_row()
        runner.slots.extend(row, len(PROMPT))
        builder = BatchBuilder()
        builder.add_chain(row, PROMPT, 0, want_last_logits=True)
        runner.forward(builder.build())
        found.append(runner.features[: len(PROMPT)].clone())
    assert found[0].abs().sum(0).all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_head_that_borrows_the_output_layer_borrows_its_bound(decoder: bool, tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=96, final_logit_softcapping=0.25,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "target")
    rig = make_rig(tmp_path / "target", random_head(tmp_path / "head", tmp_path / "target", layout="eagle1"),
                   decoder=decoder)  # fmt: skip
    logits = rig.resident.head.logits(torch.randn((3, 32), generator=torch.Generator().manual_seed(1)) * 1000)
    assert float(logits.abs().max()) == pytest.approx(0.25)


def test_growth_of_a_session_that_ends_is_not_told(rig: Rig) -> None:
    """A step's tree that reaches the limit, and a session that is closed while its step is in flight."""
    spec = SamplingSpec(max_new_tokens=8)
    rig.open(1, spec)
    pending = rig.verifier.begin([TreeRequest(key=(7, 1), epoch=1, length=len(PROMPT), tokens=(), parents=())])
    rig.verifier.close((7, 1), 1)
    result = rig.verifier.finish(pending).results[0]
    assert (result.outcome, result.growth) == (Outcome.ACCEPTED, None)
    assert rig.runner.slots.used == 0


def test_kv_of_a_head_that_does_not_fit_says_how_much_and_what_to_change(rig: Rig) -> None:
    with pytest.raises(CheckpointError, match=r"KV of the resident draft's head: \d+ slots take \d+\.\d\d GB\. Lower"):
        HeadLayer.of(rig.resident.head, 1 << 50)


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
