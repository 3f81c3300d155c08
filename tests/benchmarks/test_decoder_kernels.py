from __future__ import annotations

import pytest
import torch
from benchmarks import decoder_kernels
from benchmarks.decoder_kernels import gated_activation_run, residual_norm_run, rotary_store_run, slot_runs

from outrider.kernels import early_launch

_CPU = torch.device("cpu")


@pytest.mark.parametrize("build", [residual_norm_run, rotary_store_run, gated_activation_run])
def test_builders_fit_their_operators(build: decoder_kernels.Build) -> None:
    run, moved = build(2, 3, _CPU)
    run()
    assert moved > 2 * 4096 * 2


def test_slot_updates_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_kernels, "MAX_KEYS", 40)
    runs = dict(slot_runs(2, 30, _CPU))
    assert len(runs) == 2
    for run in runs.values():
        run()


def test_in_order_means_that_nothing_begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(early_launch, "launches_early", lambda device: True)
    monkeypatch.setattr(decoder_kernels, "chain_us", lambda run: run())
    decoder_kernels.in_order_us(lambda: seen.append(early_launch.early_options(_CPU)))
    assert seen == [{"EARLY": False}]
    assert early_launch.early_options(_CPU)["EARLY"]


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decoder_kernels.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().out
