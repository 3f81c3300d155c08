"""Rows at which a token is chosen: the reference against plain Python, the kernel against the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from tests.kernels.sampling.random_step import RandomStep

from outrider.kernels.pool.pack import ROOT
from outrider.kernels.sampling import rows
from outrider.kernels.sampling.rows import SampledRows, sample_rows, sample_rows_reference

_CPU = torch.device("cpu")


def test_rows_are_found_with_their_parameters():
    for lines in (40, 5):
        step, out = RandomStep(1, _CPU), SampledRows.allocate(lines, _CPU)
        sample_rows_reference(step.packed, step.parameters, out)
        expected = [row for row, entry in enumerate(step.packed.entries.tolist()) if entry >= ROOT][:lines]
        found = out.first(int(out.count))
        assert found.rows.tolist() == expected
        for line, row in enumerate(expected):
            pool_row = int(step.packed.pool_rows[step.packed.sessions[row]])
            spec = step.specs[pool_row]
            ints = {name: int(getattr(found, name)[line]) for name in ("pool_rows", "top_k", "choice_index", "fixed")}
            assert ints == {
                "pool_rows": pool_row, "top_k": spec.top_k, "choice_index": spec.choice_index, "fixed": pool_row % 2,
            }  # fmt: skip
            floats = [float(getattr(found, name)[line]) for name in ("temperature", "top_p", "min_p")]
            assert floats == pytest.approx([spec.temperature, spec.top_p, spec.min_p])
            assert int(found.seeds[line]) % 2**64 == spec.seed
            assert int(found.positions[line]) == int(step.packed.positions[row]) + 1


@pytest.mark.parametrize(("lines", "at_a_time"), [(40, 512), (40, 8), (6, 8)])
def test_the_kernel_writes_the_same_bits(
    triton_device: torch.device, lines: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rows, "_MOST_AT_A_TIME", at_a_time)
    for seed in range(3 if triton_device.type == "cpu" else 40):
        steps = [RandomStep(seed, device) for device in (_CPU, triton_device)]
        mine, theirs = (SampledRows.allocate(lines, step.pool.device) for step in steps)
        for field in fields(theirs):
            # What is not written shows.
            getattr(theirs, field.name).fill_(-7)
        sample_rows_reference(steps[0].packed, steps[0].parameters, mine)
        sample_rows(steps[1].pool, steps[1].packed, steps[1].parameters, theirs)
        count = int(mine.count)
        for field in fields(mine):
            ours, other = getattr(mine, field.name), getattr(theirs, field.name).cpu()
            assert torch.equal(ours[:count], other[:count]), field.name
        assert (theirs.pool_rows[count:] == -1).all() and (theirs.rows[count:] == 0).all()
