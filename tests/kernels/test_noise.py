# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.kernels import noise
from outrider.kernels.backend import jit, tl
from outrider.kernels.sampling import noise_blocks


# Random123's kat_vectors for philox4x32 with 10 rounds: counter and key, and the words.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers_with_key_and_counter_laid_out_as_stated(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    quarter, position, stream, choice = counter
    seed = key[1] << 32 | key[0]
    found = noise.philox_uint32(
        torch.tensor([seed - (seed >> 63 << 64)]), torch.tensor([position]), 4 * quarter + torch.arange(4),
        stream=stream, choice_index=torch.tensor([choice]),
    )  # fmt: skip
    assert found.tolist() == [words]


def test_negative_seeds_are_bit_patterns() -> None:
    words = noise.philox_uint32(torch.tensor([-1]), torch.tensor([0xFFFFFFFF]), torch.tensor([3]), 0xFFFFFFFF)
    again = noise.philox_uint32(torch.tensor([-1]), torch.tensor([-1]), torch.tensor([3]), 0xFFFFFFFF)
    assert torch.equal(words, again)


def test_noise_is_finite_and_falls_with_x_at_both_ends_and_at_the_seam() -> None:
    edge = np.arange(2**16, dtype=np.uint64)
    seam = np.uint64(2**21 - 2**15)
    words = np.concatenate([edge, edge + seam, edge + np.uint64(2**32 - 2**16)]).astype(np.uint32)
    assert words[0] == 0 and words[-1] == 0xFFFFFFFF
    gumbel = noise.gumbel_from_uint32(words)
    assert gumbel.dtype == np.float32 and np.isfinite(gumbel).all()
    # The series and the logarithm meet at 2^21 within the rounding of 1 - w there (2^-25 of 2^-11).
    assert (np.diff(gumbel) <= 7e-5).all()
    assert math.isclose(gumbel[0], 33 * math.log(2), rel_tol=1e-6)
    assert math.isclose(gumbel[-1], -math.log(24 * math.log(2)), rel_tol=1e-6)


def test_tail_probabilities_over_all_words_follow_the_gumbel_law() -> None:
    # G falls with x, so the number of x with G(x) > t is found by bisection: exact over all 2^32 inputs.
    for bound in np.arange(-2.5, 21.0, 0.5):
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            above = noise.gumbel_from_uint32(np.array([middle], dtype=np.uint32))[0] > bound
            low, high = (middle + 1, high) if above else (low, middle)
        law = -math.expm1(-math.exp(-bound))
        # One word of 2^32 at the steep end, float32's rounding of w elsewhere.
        assert abs(low / 2**32 - law) < 2**-32 + 1e-4 * law, bound


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1001])
def test_whole_rows_equal_chosen_ids(vocab_size: int) -> None:
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (4,)), torch.tensor([0, 7, 7, 2**31 - 1])
    choice = torch.tensor([0, 0, 1, 2])
    ids = torch.arange(vocab_size).expand(4, -1)
    rows = noise.gumbel_noise(seeds, positions, vocab_size, choice_index=choice)
    assert rows.dtype == torch.float32 and rows.shape == (4, vocab_size)
    assert torch.equal(rows, noise.gumbel_noise(seeds, positions, ids, choice_index=choice))


def test_rows_do_not_depend_on_batch_or_memory() -> None:
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (6,)), torch.arange(6)
    together = noise.gumbel_noise(seeds, positions, 50)
    kept = together.clone()
    together.zero_()  # The caller's copy, not the remembered row.
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(noise.gumbel_noise(seeds[order], positions[order], 50), kept[order])


def test_forgotten_rows_come_back_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.arange(8), torch.arange(8)
    first = noise.gumbel_noise(seeds, positions, 64)
    remembered = noise._RememberedRows(capacity_bytes=3 * (64 * 4 + noise._ROW_OVERHEAD_BYTES))
    monkeypatch.setattr(noise, "_ROWS", remembered)
    for _ in range(2):
        assert torch.equal(noise.gumbel_noise(seeds, positions, 64), first)
    assert len(remembered._rows) == 3


def test_streams_seeds_positions_and_choices_are_independent() -> None:
    ids = torch.arange(4096)[None]

    def row(seed: int, position: int, stream: int, choice: int) -> torch.Tensor:
        return noise.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids, stream, choice)[0]

    base = row(1, 1, 0, 0)
    assert abs(float(base.mean()) - 0.5772) < 0.08 and abs(float(base.var()) - 1.6449) < 0.2
    for other in (row(2, 1, 0, 0), row(1 + (1 << 32), 1, 0, 0), row(1, 2, 0, 0), row(1, 1, 1, 0), row(1, 1, 0, 1)):
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.08


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_triton_words_and_noise_equal_the_reference(triton_device: torch.device, index_dtype: torch.dtype) -> None:
    seeds = torch.tensor([0, -1, 2**40 + 3, -(2**62)])
    positions = torch.tensor([0, 1, 2**31 - 1, 77], dtype=index_dtype)
    ids = torch.tensor([[0, 1, 2, 3, 4, 131071, 5]]).expand(4, -1).to(index_dtype)
    choice = torch.tensor([0, 1, 2, 3])
    expected = noise.philox_uint32_reference(seeds, positions, ids, 2, choice)
    seeds_there, positions_there, ids_there = (tensor.to(triton_device) for tensor in (seeds, positions, ids))
    words = noise.philox_uint32(seeds_there, positions_there, ids_there, 2, choice.to(triton_device))
    assert torch.equal(words.cpu(), expected)
    gumbel = noise.gumbel_noise(seeds_there, positions_there, ids_there, 2, choice.to(triton_device))
    torch.testing.assert_close(
        gumbel.cpu(), noise.gumbel_noise_reference(seeds, positions, ids, 2, choice), rtol=1e-6, atol=4e-6
    )


def test_triton_whole_rows_equal_the_reference(triton_device: torch.device) -> None:
    seeds, positions = torch.tensor([5, -9]), torch.tensor([3, 4])
    gumbel = noise.gumbel_noise(seeds.to(triton_device), positions.to(triton_device), 1030)
    torch.testing.assert_close(gumbel.cpu(), noise.gumbel_noise_reference(seeds, positions, 1030), rtol=1e-6, atol=4e-6)


def test_cuda_estimates_stay_within_their_bounds_for_every_word(cuda: torch.device) -> None:
    lowest, highest = torch.empty(2, 2**16, device=cuda)
    _estimate_errors_kernel[(2**16,)](lowest, highest, RUNS=2**6, BLOCK=2**10)
    assert float(lowest.min()) > -noise_blocks.RACE_ABOVE and float(highest.max()) < noise_blocks.RACE_BELOW
    # Away from the end where w nears 1, it is a good estimate.
    assert float(highest[: 2**15].max()) < 1e-3


def test_triton_estimates_stay_within_their_bounds(triton_device: torch.device) -> None:
    lowest, highest = torch.empty(2, 64, device=triton_device)
    # Of every 2^26 words the first ones; the first run has the smallest words of all.
    _estimate_errors_kernel[(64,)](lowest, highest, RUNS=1, BLOCK=2**12, STRIDE=2**14)
    assert float(lowest.min()) > -noise_blocks.RACE_ABOVE and float(highest.max()) < noise_blocks.RACE_BELOW


@jit
def _estimate_errors_kernel(
    lowest_ptr,  # [programs] float32
    highest_ptr,  # [programs] float32
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr = 1,
):
    """The least and the largest log2 E2 - estimate over the words of a program."""
    program = tl.program_id(0)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for run in range(0, RUNS):
        first = (program * RUNS + run).to(tl.int64) * BLOCK * STRIDE
        word = (first + tl.arange(0, BLOCK)).to(tl.uint32)
        exact = -noise_blocks.gumbel_of_word(word) * 1.4426950408889634 + 0.5287663729448977
        error = exact - noise_blocks.race_of_word(word)
        lowest = tl.minimum(lowest, error)
        highest = tl.maximum(highest, error)
    tl.store(lowest_ptr + program, tl.min(lowest))
    tl.store(highest_ptr + program, tl.max(highest))
