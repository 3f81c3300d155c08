"""The recipe of the acceptance prior: it asks the embedded pair, finds the curves behind counts, and writes them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import acceptance_prior as recipe
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from outrider.drafting import acceptance_prior
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.models import embedded_draft_path, embedded_target_path, held_out_prompts

TRUE = {
    "GREEDY_BEST": (0.5, 0.5),
    "GREEDY_SECOND": (0.3, 0.8),
    "GREEDY_OTHERS": (0.1, 0.6),
    "COUPLED_BEST": (0.6, 0.9),
    "COUPLED_OTHERS": (0.25, 1.1, 0.5),
}


def test_the_fit_finds_the_curves_that_made_the_counts(monkeypatch: pytest.MonkeyPatch):
    for name, value in TRUE.items():
        monkeypatch.setattr(acceptance_prior, name, value)
    rng = np.random.default_rng(0)
    calibration = AcceptanceCalibration(branching=recipe.CHILDREN)
    asked = []
    for temperature in (0.0, 1.0):
        gaps = np.cumsum(rng.exponential(0.8, size=(40_000, recipe.CHILDREN)), axis=1).astype(np.float32)
        log_q = np.full_like(gaps, -1.0) if temperature else -gaps
        buckets = calibration.buckets(log_q, -gaps, np.full(len(gaps), temperature, dtype=np.float32))
        share = calibration.prior[buckets]
        # At most one child is right: each in its turn, of what the others before have left.
        bounds = np.cumsum(share / np.maximum(share.sum(1, keepdims=True), 1), axis=1)
        luck = rng.random((len(gaps), 1))
        hit = np.where(luck[:, 0] < bounds[:, -1], (luck >= bounds).sum(1), -1)
        asked.append(recipe.Positions(temperature=temperature, log_q=log_q, scores=-gaps, hit=hit))
    fitted = recipe.fit(asked)
    for name, numbers in TRUE.items():
        assert fitted[name] == pytest.approx(numbers, rel=0.15, abs=0.05), name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_pair_is_asked_at_every_position(temperature: float):
    target, draft = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (embedded_target_path(), embedded_draft_path())
    )
    prompt = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json")).encode(held_out_prompts()[0]).ids
    found = recipe.ask(target, draft, prompt, seed=7, temperature=temperature, tokens=6)
    assert found.log_q.shape == (len(prompt) + 6 - 16, recipe.CHILDREN)
    assert (np.diff(found.scores) <= 0).all()
    # The best child is right far more often than the others.
    assert (found.hit == 0).mean() > 2 * (found.hit > 0).mean()


def test_fitted_numbers_go_between_the_marks():
    source = Path(acceptance_prior.__file__).read_text(encoding="utf-8")
    now = {name: getattr(acceptance_prior, name) for name in TRUE}
    assert recipe.with_numbers(source, recipe.as_code(now)) == source
    changed = recipe.with_numbers(source, recipe.as_code(now | {"GREEDY_BEST": (0.5, 0.25)}))
    namespace: dict[str, object] = {}
    exec(changed, namespace)
    assert (namespace["GREEDY_BEST"], namespace["COUPLED_BEST"]) == ((0.5, 0.25), now["COUPLED_BEST"])
    with pytest.raises(ValueError, match="marks"):
        recipe.with_numbers("no marks", "")
