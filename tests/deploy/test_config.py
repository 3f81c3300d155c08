"""Deployment settings: what is refused, and how GPUs are shared out."""

import pytest

from outrider.deploy.config import DeployConfig, shared_gpus


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", ""),
        ("name", "a/b"),
        ("targets", 0),
        ("drafts", -1),
        ("port", 65536),
        ("target_threads", 0),
        ("draft_gpus", -0.5),
        ("target_gpus", float("nan")),
        ("hang_timeout_s", 0.0),
        ("start_timeout_s", float("inf")),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(setting: str, value: object):
    with pytest.raises(ValueError, match=f"{setting}: {value!r}"):
        DeployConfig(**{setting: value})  # pyright: ignore[reportArgumentType] (wrong on purpose)


@pytest.mark.parametrize(
    ("available", "workers", "each"),
    [(0, 2, 0.0), (0.5, 1, 0.0), (1, 1, 1.0), (1, 2, 0.5), (2, 3, 0.5), (4, 3, 1.0), (8, 0, 0.0), (1, 3, 1 / 3)],
)
def test_gpus_are_shared_evenly_and_at_most_one_each(available: float, workers: int, each: float):
    assert shared_gpus(available, workers) == pytest.approx(each)
