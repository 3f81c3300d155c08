"""The calibration benchmark: its measures, its prompts, its rounds of real workers, and the fit of the prior."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.calibration_bench import command, prior_fit
from benchmarks.calibration_bench.acceptance import repeated_share
from benchmarks.calibration_bench.estimates import (
    area_under_curve,
    buckets_of,
    calibration_error,
    compare,
    log_loss,
    online_estimates,
)
from benchmarks.calibration_bench.positions import CHILDREN, Asker, Positions, Rule
from benchmarks.calibration_bench.texts import load_texts
from benchmarks.calibration_bench.workers import Pair, Run, runs_of

from outrider.drafting import acceptance_prior
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.sampling import SamplingSpec


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    count = torch.get_num_threads()
    yield Pair()
    torch.set_num_threads(count)


def test_measures_of_known_cases():
    accepted = np.array([False, True, False, True])
    assert area_under_curve(np.array([0.1, 0.9, 0.2, 0.8]), accepted) == 1.0
    assert area_under_curve(np.array([0.5, 0.5, 0.5, 0.5]), accepted) == 0.5
    assert area_under_curve(np.array([0.3, 0.2, 0.1, 0.4]), accepted) == 0.75
    assert np.isnan(area_under_curve(np.array([0.3, 0.2]), np.array([True, True])))
    # Two bins of two children: |0.25 - 0| twice, |0.75 - 1| twice.
    assert calibration_error(np.array([0.25, 0.75, 0.25, 0.75]), accepted) == pytest.approx(0.25)
    assert log_loss(np.array([0.5, 0.5, 0.5, 0.5]), accepted) == pytest.approx(np.log(2))


def test_online_says_what_it_thinks_before_it_is_told():
    calibration = AcceptanceCalibration(branching=CHILDREN)
    log_q = np.log(np.full((2, CHILDREN), 0.1, dtype=np.float32))
    asked = Positions(
        rule=Rule.GREEDY, temperature=0.0, log_q=log_q, scores=log_q, hit=np.array([0, 0]), is_own=np.array([False] * 2)
    )
    buckets = buckets_of(calibration, asked)
    prior = calibration.estimate(buckets, learned=False)
    said = online_estimates(calibration, asked, buckets)
    assert said[0].tolist() == prior[0].tolist()
    assert said[1, 0] > said[0, 0]


def test_the_prior_is_fitted_on_other_prompts_than_figures_are_reported_on():
    fit, report = load_texts(fit=True), load_texts(fit=False)
    assert (len(fit), len(report)) == (48, 48)
    assert not {text.ids for text in fit} & {text.ids for text in report}
    assert [text.number for text in load_texts(fit=False, limit=16)] == list(range(16))
    assert [len(beginning) for beginning in report[0].beginnings[:2]] == [16, 32]


def test_repetition_is_seen():
    greedy = SamplingSpec()
    assert repeated_share(Run(prompt=[1], sampling=greedy, output=list(range(40)))) == 0
    assert repeated_share(Run(prompt=[1], sampling=greedy, output=[1, 2, 3, 4] * 10)) == pytest.approx(28 / 32)
    assert repeated_share(Run(prompt=[1], sampling=greedy, output=[1, 2, 3])) is None


def test_speculation_in_this_process_gives_the_plain_tokens(pair: Pair):
    texts = load_texts(fit=False, limit=2)
    for temperature in (0.0, 1.0):
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=8)
        plain, drafted = (runs_of([text.ids for text in texts], [0, 1], sampling) for _ in range(2))
        pair.continue_plainly(plain)
        pair.speculate(drafted)
        assert [run.output for run in drafted] == [run.output for run in plain]
        assert [sum(run.rounds) for run in drafted] == [8, 8]
        assert sum(len(run.rounds) for run in drafted) < 12
        assert all(run.rounds == [1] * 8 for run in plain)


def test_a_first_round_has_its_whole_tree_though_prompts_are_prefilled(pair: Pair):
    texts = load_texts(fit=False, limit=22)
    assert sum(len(text.ids) for text in texts) > 2048  # rows of a step, beyond which trees would be cut
    runs = runs_of([text.ids for text in texts], list(range(22)), SamplingSpec(max_new_tokens=64))
    pair.speculate(runs, most_rounds=1)
    assert all(len(run.rounds) == 1 for run in runs)
    assert sum(run.rounds[0] for run in runs) / len(runs) > 3


def test_the_fit_finds_the_curves_that_made_the_counts(monkeypatch: pytest.MonkeyPatch):
    true = {
        "GREEDY_BEST": (0.5, 0.5),
        "GREEDY_SECOND": (0.3, 0.8),
        "GREEDY_OTHERS": (0.1, 0.6),
        "COUPLED_BEST": (0.6, 0.9),
        "COUPLED_OTHERS": (0.25, 1.1, 0.5),
    }
    for name, value in true.items():
        monkeypatch.setattr(acceptance_prior, name, value)
    rng = np.random.default_rng(0)
    asked = []
    for rule, temperature in ((Rule.GREEDY, 0.0), (Rule.COUPLED, 1.0)):
        gaps = np.cumsum(rng.exponential(0.8, size=(40_000, CHILDREN)), axis=1).astype(np.float32)
        calibration = prior_fit.AcceptanceCalibration(branching=CHILDREN)
        log_q = -gaps if rule is Rule.GREEDY else np.full_like(gaps, -1.0)
        found = Positions(
            rule=rule,
            temperature=temperature,
            log_q=log_q,
            scores=-gaps,
            hit=np.zeros(len(gaps), dtype=np.int64),
            is_own=np.zeros(len(gaps), dtype=bool),
        )
        share = calibration.prior[prior_fit.buckets_of(calibration, found)]
        # At most one child is right: each in its turn, of what the others before have left.
        share = share / np.maximum(share.sum(1, keepdims=True), 1)
        luck, bounds = rng.random((len(gaps), 1)), np.cumsum(share, axis=1)
        found.hit[:] = np.where(luck[:, 0] < bounds[:, -1], (luck >= bounds).sum(1), -1)
        asked.append(found)
    fitted = prior_fit.fit(asked)
    for name, numbers in true.items():
        assert fitted[name] == pytest.approx(numbers, rel=0.15, abs=0.05), name


def test_fitted_numbers_go_between_the_marks():
    path = Path(acceptance_prior.__file__)
    source = path.read_text(encoding="utf-8")
    names = ("GREEDY_BEST", "GREEDY_SECOND", "GREEDY_OTHERS", "COUPLED_BEST", "COUPLED_OTHERS")
    now = {name: getattr(acceptance_prior, name) for name in names}
    assert command.with_numbers(source, prior_fit.as_code(now)) == source
    changed = command.with_numbers(source, prior_fit.as_code(now | {"GREEDY_BEST": (0.5, 0.25)}))
    namespace: dict[str, object] = {}
    exec(changed, namespace)
    assert (namespace["GREEDY_BEST"], namespace["COUPLED_BEST"]) == ((0.5, 0.25), now["COUPLED_BEST"])
    with pytest.raises(ValueError, match="marks"):
        command.with_numbers("no marks", "")


def test_estimates_beat_the_raw_probability_under_coupled_noise(pair: Pair):
    asker = Asker(pair)
    fit, report = load_texts(fit=True, limit=2), load_texts(fit=False, limit=2)
    others, asked = (asker.ask(texts, temperature=1.0, tokens=6) for texts in (fit, report))
    assert list(asked) == [Rule.COUPLED, Rule.TARGET_ONLY]
    coupled = asked[Rule.COUPLED]
    assert coupled.only(own=True).log_q.shape == (12, CHILDREN)
    worth = {found.estimate: found for found in compare(others[Rule.COUPLED], coupled.only(own=False))}
    assert worth["taught"].auc > worth["probability"].auc + 0.05
    assert worth["taught"].calibration_error < worth["probability"].calibration_error
