"""Drafts that are not the same model, and what two of them are worth in the simulator."""

from dataclasses import replace

import pytest
from benchmarks.simulation import several_drafts
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import simulate

RATES = (0.6, 0.2, 0.1)


def ranks(draft: int, kinship: float) -> list[int | None]:
    model = PathModel(seed=3, rank_rates=RATES, spread=0.0, draft=draft, kinship=kinship)
    return [model.rank(1, position) for position in range(3000)]


def test_drafts_are_as_good_as_each_other_and_alike_by_their_kinship():
    first = ranks(0, 0.5)
    assert ranks(0, 1.0) == first
    assert ranks(1, 1.0) == first
    independent = sum(rate * rate for rate in (*RATES, 0.1))
    for kinship in (0.0, 0.5, 0.8):
        other = ranks(1, kinship)
        assert other.count(0) / len(other) == pytest.approx(0.6, abs=0.03)
        alike = sum(a == b for a, b in zip(first, other, strict=True)) / len(first)
        assert alike == pytest.approx(kinship + (1 - kinship) * independent, abs=0.03)


def test_drafts_with_different_luck_are_wrong_with_different_tokens():
    for position in range(200):
        first, second = (
            PathModel(seed=3, rank_rates=RATES, spread=0.0, draft=draft, kinship=0.0).guesses(1, position, None)
            for draft in (0, 1)
        )
        true = PathModel(seed=3, rank_rates=RATES, spread=0.0).token(1, position)
        assert {guess.token for guess in first} & {guess.token for guess in second} <= {true}
        assert all((guess.token == true) == (guess.path_hash is None) for guess in (*first, *second))


def test_a_second_draft_adds_what_the_first_does_not_know():
    base = Settings(sessions=1, workers=2, duration_s=1.5, warmup_s=0.3)
    one = simulate(base)
    alike, unlike = (simulate(replace(base, drafts_per_session=2, draft_kinship=kinship)) for kinship in (1.0, 0.0))
    assert alike.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.05)
    assert unlike.tokens_per_s > 1.05 * one.tokens_per_s
    assert one.wrong_tokens == alike.wrong_tokens == unlike.wrong_tokens == 0


def test_rows_have_their_ratios(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(several_drafts, "_SESSIONS", (1,))
    monkeypatch.setattr(several_drafts, "_DRAFTS", ((4.0, 2),))
    (row,) = several_drafts.measure(Settings(duration_s=0.3, warmup_s=0.1), 1)
    assert set(row["ratios"]) == {"sharing", *(f"both, kinship {kinship:g}" for kinship in (1.0, 0.8, 0.5, 0.0))}
    # One session has nothing to share.
    assert row["ratios"]["sharing"] == 1.0
    assert row["wrong_tokens"] == 0
    assert several_drafts.table([row]).row_count == 1
