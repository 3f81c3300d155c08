"""The synthetic rule: what coins accept, that nothing else has a say, and that sessions beside it are left alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.kernels.noise import STREAM_COINS, philox_uint32_reference
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import Code, OpenRequest, SessionFault, TreeRequest
from outrider.target_worker.synthetic import SyntheticCoins
from outrider.target_worker.verifier import Verifier

CHAIN = list(range(8))
PROMPTS = [[5, 9, 33], [2, 17, 40, 8, 1], [7, 7, 12, 3]]
Output = list[int]


def spec_of(*rates: float, **changes: object) -> SamplingSpec:
    rule = VerificationRule.SYNTHETIC
    return replace(SamplingSpec(verification=rule, synthetic_rates=rates, seed=9, max_new_tokens=40), **changes)


def accepted(spec: SamplingSpec, root: int = 0, parents: Sequence[int] = CHAIN) -> Sequence[int]:
    return SyntheticCoins(spec).decide([3] * len(parents), parents, root=root).nodes


def test_a_coin_is_a_word_of_the_coins_stream_of_its_position():
    coins = SyntheticCoins(spec_of(0.5, seed=2**64 - 5, choice_index=3))
    for position in (0, 7, 511, 512, 5000):
        word = philox_uint32_reference(
            torch.tensor([-5]), torch.tensor([position]), torch.tensor([[0]]), STREAM_COINS, torch.tensor([3])
        )
        assert coins.coin(position) == pytest.approx(int(word) / 2**32, abs=2**-24)


def test_coins_are_there_before_a_step_needs_them(checkpoint, monkeypatch):
    made: list[int] = []
    make = SyntheticCoins._made
    monkeypatch.setattr(SyntheticCoins, "_made", lambda coins, number: made.append(number) or make(coins, number))
    sessions = Sessions(checkpoint, [spec_of(0.6)], decoder=True)
    verifier = sessions.verifier
    while verifier.prefill():
        pass
    assert made == [0], "as the session is opened"
    root = TreeRequest(key=(1, 0), epoch=1, length=len(PROMPTS[0]), tokens=[3], parents=[0])
    pending = verifier.begin([root])
    assert made == [0], "the device is about to wait"
    verifier.learn()
    assert made == [0, 1]
    verifier.finish(pending)
    verifier.learn()
    assert made == [0, 1]


def test_depths_are_accepted_at_their_rates_and_the_last_holds_for_the_rest():
    lengths = torch.tensor([len(accepted(spec_of(0.8, 0.5), root=root * 9)) for root in range(4000)])
    for depth, rate in enumerate([0.8, 0.5, 0.5, 0.5]):
        reached = lengths[lengths >= depth]
        # Five standard deviations.
        assert (reached > depth).float().mean().item() == pytest.approx(rate, abs=2.5 / len(reached) ** 0.5)


def test_the_path_goes_by_first_children_whatever_their_tokens_are():
    # Siblings that stand later are never taken; 3 hangs from the first child, 5 from 3.
    parents = [0, 0, 1, 2, 3, 3]
    assert accepted(spec_of(1.0), parents=parents) == [1, 3, 5]
    assert accepted(spec_of(0.0), parents=parents) == []
    chance, spec = random.Random(1), spec_of(0.7)
    for root in range(50):
        one, other = ([chance.randrange(60) for _ in parents] for _ in range(2))
        decided = SyntheticCoins(spec).decide(one, parents, root=root)
        assert decided.nodes == SyntheticCoins(spec).decide(other, parents, root=root).nodes
        assert decided.tokens == [one[node - 1] for node in decided.nodes]


def test_a_rejected_token_is_not_emitted_after_all():
    rejected = SyntheticCoins(spec_of(1.0, 0.0, stop_token_ids=(6,))).decide([4, 7, 9], [0, 1, 2], root=3)
    assert (rejected.nodes, rejected.rejected, rejected.end) == ([1], 7, 1)
    assert [rejected.final(choice) for choice in (7, 6, 8)] == [5, 6, 8]
    assert SyntheticCoins(spec_of(0.0)).decide([0], [0], root=3).final(0) == 1
    whole = SyntheticCoins(spec_of(1.0)).decide([4, 7], [0, 1], root=3)
    assert (whole.rejected, whole.final(7)) == (None, 7)


class Sessions:
    """Sessions of one verifier that are stepped together, each with trees of its own."""

    def __init__(self, folder: Path, specs: Sequence[SamplingSpec], *, decoder: bool, **config: Any) -> None:
        engine = EngineConfig(
            model_path=folder,
            dtype="float32",
            num_slots=300,
            max_num_seqs=4,
            max_tree_nodes=8,
            max_model_len=96,
            **config,
        )
        self.verifier = Verifier(ModelRunner(engine, decoder=decoder), max_step_tokens=48)
        self.outputs: list[Output] = [[] for _ in specs]
        for number, spec in enumerate(specs):
            prompt = PROMPTS[number]
            self.verifier.open(OpenRequest(key=(1, number), epoch=1, prompt=prompt, output=(), sampling=spec))

    def step(self, trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Sequence[int]]:
        """The accepted nodes of each session."""
        requests = [
            TreeRequest(
                key=(1, number), epoch=1, length=len(PROMPTS[number]) + len(output), tokens=tokens, parents=parents
            )
            for number, (output, (tokens, parents)) in enumerate(zip(self.outputs, trees, strict=True))
        ]
        results = self.verifier.step(requests).results
        for output, result in zip(self.outputs, results, strict=True):
            output.extend(result.token_ids)
        return [result.accepted_nodes for result in results]


def trees_of(chance: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    shapes = ([0, 1, 2, 3], [0, 0, 1, 1, 2], [0, 1, 1, 2, 4], [])
    found = []
    for _ in range(count):
        parents = list(chance.choice(shapes))
        tokens = [10 * place + chance.randrange(10) for place in range(len(parents))]  # siblings differ
        found.append((tokens, parents))
    return found


# Staged trees, staged batches whose rows are unrolled, and transformers' forward with rules.verify.
WAYS = [{"decoder": True}, {"decoder": True, "deterministic": True}, {"decoder": False}]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_accepts_by_coins_and_ends_with_the_targets_choice_and_others_keep_their_tokens(checkpoint, way):
    coupled, plain = SamplingSpec(temperature=1.0, seed=4, max_new_tokens=40), SamplingSpec(max_new_tokens=40)
    synthetic = spec_of(0.7, temperature=0.8)
    mixed = Sessions(checkpoint, [coupled, synthetic, plain], **way)
    beside = Sessions(checkpoint, [coupled, replace(synthetic, verification=VerificationRule.COUPLED), plain], **way)
    chance, accepted_nodes, rejections = random.Random(3), 0, 0
    for _ in range(9):
        trees = trees_of(chance, 3)
        root = len(PROMPTS[1]) + len(mixed.outputs[1])
        before = list(mixed.outputs[1])
        decided = SyntheticCoins(synthetic).decide(*trees[1], root=root - 1)
        got = mixed.step(trees)
        assert got[1] == decided.nodes
        emitted = mixed.outputs[1][len(before) :]
        assert emitted[:-1] == decided.tokens
        assert emitted[-1] == decided.final(choice_after(checkpoint, synthetic, [*before, *decided.tokens], **way))
        accepted_nodes += len(decided.nodes)
        rejections += decided.rejected is not None
        beside.step(trees)
        assert mixed.outputs[0] == beside.outputs[0]
        assert mixed.outputs[2] == beside.outputs[2]
    assert accepted_nodes > 3
    assert rejections > 1


def choice_after(folder: Path, spec: SamplingSpec, output: Output, **way: bool) -> int:
    """What the coupled rule chooses after this output."""
    session = Sessions(folder, [], **way)
    sampling = replace(spec, verification=VerificationRule.COUPLED)
    session.verifier.open(OpenRequest(key=(1, 1), epoch=1, prompt=PROMPTS[1], output=output, sampling=sampling))
    request = TreeRequest(key=(1, 1), epoch=1, length=len(PROMPTS[1]) + len(output), tokens=(), parents=())
    return session.verifier.step([request]).results[0].token_ids[0]


def test_a_run_repeats(checkpoint):
    outputs = []
    for _ in range(2):
        sessions, chance = Sessions(checkpoint, [spec_of(0.6)], decoder=True), random.Random(5)
        for _ in range(6):
            sessions.step(trees_of(chance, 1))
        outputs.append(sessions.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_accept_what_a_cpu_accepts(checkpoint):
    specs, outputs = [SamplingSpec(temperature=1.0, seed=4, max_new_tokens=60), spec_of(0.7, max_new_tokens=60)], []
    for device in ("cpu", "cuda"):
        sessions, chance = Sessions(checkpoint, specs, decoder=True, device=device), random.Random(3)
        for _ in range(12):
            sessions.step(trees_of(chance, 2))
            if device == "cuda":
                sessions.verifier.capture()
        outputs.append(sessions.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rates", [(), (0.5, 1.5)])
def test_rates_that_mean_nothing_are_refused(checkpoint, rates):
    with pytest.raises(SessionFault, match="synthetic_rates") as caught:
        Sessions(checkpoint, [spec_of(*rates)], decoder=False)
    assert caught.value.code is Code.INVALID_ARGUMENT
