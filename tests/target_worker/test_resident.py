"""A target that drafts by itself: the same tokens as plain decoding, and a head whose KV is right whatever happened."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.target_worker.conftest import VOCAB_SIZE
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.resident_support import (
    PROMPT,
    SPECS,
    FreshHead,
    Rig,
    check_head,
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
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_growth import DraftLimits
from outrider.target_worker.resident_head import HeadLayer
from outrider.target_worker.sessions import Outcome, TreeRequest


@pytest.fixture(scope="module")
def head(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("head"), checkpoint, taps=(0, 1, 2))


@pytest.fixture(scope="module")
def rig(checkpoint: Path, head: Path) -> Rig:
    return make_rig(checkpoint, head)


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
