"""Growth on real weights: random commits, children against a fresh forward over the same tokens, on CPU and GPU."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.draft_worker.session_growth import sessions_of
from tests.draft_worker.table_model import Mirror, next_growth, processed, session_start
from transformers import AutoModelForCausalLM

from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.drafting.config import GrowthConfig
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.sampling import SamplingSpec, VerificationRule

SPECS = (
    SamplingSpec(max_new_tokens=150),
    SamplingSpec(temperature=0.9, seed=2**63 + 5, max_new_tokens=150),
    SamplingSpec(temperature=1.0, seed=7, choice_index=2, top_p=0.9, top_k=40, min_p=0.01, max_new_tokens=150),
)
PROCESSED = SamplingSpec(
    temperature=0.8, seed=11, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6, top_p=0.95,
    logit_bias={3: 1.5, 40: -1.0}, allowed_token_ids=(*range(0, 96, 2), 3), stop_token_ids=(2, 4),
    min_new_tokens=15, max_new_tokens=150,
)  # fmt: skip
HOSTED = SamplingSpec(temperature=1.0, seed=9, verification=VerificationRule.TARGET_ONLY, max_new_tokens=150)


class Reference:
    """Children by transformers' own model."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def check(self, mirror: Mirror, checked: set[tuple[int, ...]]) -> None:
        """Check the children of nodes that have not been checked yet; ties may fall either way."""
        spec = mirror.start.sampling
        words = np.frombuffer(spec.record, dtype=np.dtype("<i8"))
        for context, children in mirror.expanded.items():
            if context in checked:
                continue
            checked.add(context)
            logits = self._model(torch.tensor([context])).logits[0, -1].numpy()
            logits = torch.from_numpy(processed(logits, context, len(mirror.start.prompt), spec)).float()[None]
            ids, _, scores = coupled_topk_scored(
                logits, torch.tensor([int(words[0])]), torch.tensor([len(context)]),
                *(torch.tensor([number]) for number in (spec.temperature, spec.top_k, spec.top_p, spec.min_p)),
                choice_index=torch.tensor([spec.choice_index]), k=5,
            )  # fmt: skip
            wanted = [token for token in ids[0, :4].tolist() if token >= 0]
            found = [node.context[-1] for node in children]
            finite = scores[0][torch.isfinite(scores[0])]
            assert found == wanted or (-finite.diff()).min() < 1e-3, (found, wanted, scores)


def grow_and_check(folder: Path, specs: tuple[SamplingSpec, ...], *, device: str = "cpu") -> int:
    """Grow sessions on random weights over random commits and trees sent again; return how many nodes were checked."""
    config = EngineConfig(
        model_path=folder, num_slots=900, max_num_seqs=4, max_model_len=250, max_tree_nodes=64, torch_threads=1,
        device=device, dtype="float32",
    )  # fmt: skip
    runner = ModelRunner(config)
    growth = GrowthConfig(max_step_nodes=6, max_step_tokens=20, max_model_len=250, min_path_value=0, min_acceptance=0)
    drafter = ModelDrafter(
        runner.packed_forward(sessions=4), growth, max_sessions=4, num_slots=900, vocab_size=runner.vocab_size,
        device=runner.device, captures=device != "cpu",
    )  # fmt: skip
    drafter.warm_up()
    drafters = Drafters(drafter, None)
    reference, rng, checked = Reference(folder), np.random.default_rng(len(specs)), set[tuple[int, ...]]()
    mirrors, ready = {}, deque[Growth]()
    for number, spec in enumerate(specs):
        start = session_start(
            number,
            prompt=rng.integers(0, runner.vocab_size, 30 + 7 * number).tolist(),
            sampling=spec,
            max_live_nodes=60,
        )
        drafters.open(start)
        mirrors[number] = Mirror(start)
    for _ in range(8):
        for _ in range(8):
            for own in sessions_of(next_growth(drafters, ready)):
                mirrors[own.session_id].receive(own)
        for number, mirror in mirrors.items():
            if mirror.start.sampling.rule is VerificationRule.COUPLED:
                reference.check(mirror, checked)
            tokens: list[int] = []
            while (children := mirror.expanded.get((*mirror.tokens, *tokens))) and rng.random() < 0.75:
                tokens.append(children[min(int(rng.exponential(0.7)), len(children) - 1)].context[-1])
            if not tokens or rng.random() < 0.3:
                tokens.append(int(rng.integers(runner.vocab_size)))
            if rng.random() < 0.3:
                # Whatever is under way; the mirror compares it.
                drafters.resend((7, number), 1)
            drafters.commit((7, number), 1, len(mirror.tokens), tokens)
            mirror.commit(tokens)
            if rng.random() < 0.3:
                drafters.resend((7, number), 1)
    for number in mirrors:
        drafters.close((7, number), 1)
    while next_growth(drafters, ready) is not None:
        pass
    assert drafter.slots_used == 0
    return len(checked)


@pytest.mark.parametrize("specs", [SPECS, (*SPECS, PROCESSED), (*SPECS[1:], PROCESSED, HOSTED)])
def test_after_any_commits_children_are_those_of_a_fresh_forward(checkpoint: Path, specs: tuple[SamplingSpec, ...]):
    assert grow_and_check(checkpoint, specs) > 200


@pytest.mark.gpu
@pytest.mark.parametrize("specs", [SPECS, (*SPECS, PROCESSED), (*SPECS[1:], PROCESSED, HOSTED)])
def test_graphs_grow_what_a_fresh_forward_says(checkpoint: Path, specs: tuple[SamplingSpec, ...]):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert grow_and_check(checkpoint, specs, device="cuda") > 100
