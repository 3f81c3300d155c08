"""Processors of random trees: the reference against `apply_processors`, the kernels against the reference."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.sampling.random_step import SESSIONS, RandomStep

from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.processors import ProcessorBatch, apply_processors_reference
from outrider.kernels.sampling.processors import (
    NodeProcessors,
    count_tokens,
    count_tokens_reference,
    process_logits,
    process_logits_reference,
)
from outrider.kernels.sampling.rows import SampledRows, sample_rows_reference

_CPU = torch.device("cpu")
_VOCAB, _LINES = 41, 40
_PENALTIES = {"repetition": 1.3, "presence": 0.4, "frequency": -0.7}
# Of the pool's rows, one after the other.
_SESSIONS: list[dict[str, Any]] = [
    _PENALTIES,
    {"bias": {3: 1.5, 8: -2.25, _VOCAB + 1: 1.0}},
    {},
    {"allowed": [4, 9, 11, 12, _VOCAB + 3], "bias": {4: -0.5, 5: 3.0}},
    {"bans_stops": True},
    {"repetition": 0.7, "allowed": list(range(1, 20)), "bias": {2: 0.125}, "bans_stops": True},
    {"frequency": 0.3},
    _PENALTIES | {"bans_stops": True},
    _PENALTIES | {"allowed": [_VOCAB]},
]


class Step:
    """Random trees, with a step of theirs and every kind of processor."""

    def __init__(self, seed: int, device: torch.device = _CPU, *, dtype: torch.dtype = torch.float32) -> None:
        chance = np.random.default_rng(seed)
        step = RandomStep(seed, device)
        self.pool, self.packed = step.pool, step.packed
        capacity = self.pool.capacity
        self.pool.parent.copy_(torch.from_numpy(chance.integers(-1, np.arange(capacity), (SESSIONS, capacity))))
        # Few of them, so that paths repeat what stands before them.
        self.pool.token.copy_(torch.from_numpy(chance.integers(0, 14, (SESSIONS, capacity))))
        self.pool.min_end.copy_(torch.from_numpy(chance.integers(0, 100, SESSIONS)))
        self.stops = [[0, 3, 12, _VOCAB + 7], list(range(64)), []] * 3
        for row, stops in enumerate(self.stops):
            self.pool.stops[row, : len(stops)] = torch.tensor(stops)
        self.prompts = [chance.integers(0, _VOCAB + 4, 9).tolist() for _ in range(SESSIONS)]
        self.outputs = [chance.integers(0, 20, 12).tolist() for _ in range(SESSIONS)]
        self.processors = NodeProcessors.allocate(sessions=SESSIONS, vocab_size=_VOCAB, device=device)
        for row, settings in enumerate(_SESSIONS):
            # What was there before goes.
            self.processors.describe(row, **_SESSIONS[(row + seed) % SESSIONS], prompt=[1], output=[2, 3])
            self.processors.describe(row, **settings, prompt=self.prompts[row], output=self.outputs[row])
        rows = SampledRows.allocate(_LINES, _CPU)
        rows.pool_rows.fill_(-1)
        sample_rows_reference(*(RandomStep(seed, _CPU).packed, step.parameters.cpu()), rows)
        self.count = int(rows.count)
        self.rows = SampledRows(**{field.name: getattr(rows, field.name).to(device) for field in fields(rows)})
        logits = chance.normal(0, 3, (_LINES, _VOCAB)).astype(np.float32)
        for value in (np.inf, -np.inf, np.nan, 0):
            logits[chance.random(logits.shape) < 0.01] = value
        self.logits = torch.from_numpy(logits).to(device, dtype)

    @property
    def state(self) -> tuple[SampledRows, Packed, Pool, NodeProcessors]:
        """Arguments of the operators between the logits and the output."""
        return self.rows, self.packed, self.pool, self.processors

    def expected(self) -> torch.Tensor:
        """Return the lines in use by the operator that takes lists."""
        paths, banned = [], []
        entries, rows = self.packed.entries.tolist(), self.rows.pool_rows[: self.count].tolist()
        for line, row in enumerate(rows):
            path, entry = [], entries[int(self.rows.rows[line])]
            while entry >= 0:
                path.append(int(self.pool.token[row, entry]))
                entry = int(self.pool.parent[row, entry])
            paths.append(path)
            is_early = self.rows.positions[line] < self.pool.min_end[row] and "bans_stops" in _SESSIONS[row]
            banned.append(self.stops[row] if is_early else [])
        known = [sorted({*prompt, *output}) for prompt, output in zip(self.prompts, self.outputs, strict=True)]
        biases = [sorted(settings.get("bias", {}).items()) for settings in _SESSIONS]
        counts = [output.count(token) for tokens, output in zip(known, self.outputs, strict=True) for token in tokens]

        def column(name: str, default: float) -> torch.Tensor:
            return torch.tensor([settings.get(name, default) for settings in _SESSIONS])

        batch = ProcessorBatch(
            row_session=torch.tensor(rows),
            repetition_penalty=column("repetition", 1.0),
            presence_penalty=column("presence", 0.0),
            frequency_penalty=column("frequency", 0.0),
            count_output=torch.tensor(counts),
            bias_values=torch.tensor([value for bias in biases for _, value in bias]),
            **lists("count", known),
            **lists("path", paths),
            **lists("bias", [[token for token, _ in bias] for bias in biases]),
            **lists("allowed", [settings.get("allowed", []) for settings in _SESSIONS]),
            **lists("banned", banned),
        )
        logits = self.logits[: self.count].float().clone()
        apply_processors_reference(logits, batch)
        return logits


def lists(name: str, parts: list[list[int]]) -> dict[str, torch.Tensor]:
    starts = np.cumsum([0, *(len(part) for part in parts)])
    return {
        f"{name}_start": torch.from_numpy(starts),
        f"{name}_tokens": torch.tensor([entry for part in parts for entry in part], dtype=torch.int64),
    }


def bits(values: torch.Tensor) -> torch.Tensor:
    """Bits of the values, one of NaN."""
    return values.cpu().nan_to_num(nan=1e38, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


def test_processors_do_what_lists_do():
    kinds: set[int] = set()
    for seed in range(12):
        step = Step(seed, dtype=torch.bfloat16 if seed % 2 else torch.float32)
        out = torch.full((_LINES, _VOCAB), 7.0)
        process_logits_reference(step.logits, *step.state, out)
        np.testing.assert_array_equal(out[: step.count].numpy(), step.expected().numpy())
        assert (out[step.count :] == 7).all()
        kinds |= set(step.processors.kinds[step.rows.pool_rows[: step.count].long()].tolist())
    assert kinds == {0, 1, 2, 3, 4, 5, 7}


def test_committed_tokens_join_the_counts():
    step, chance = Step(3), np.random.default_rng(3)
    tokens = torch.from_numpy(chance.integers(0, _VOCAB + 3, (SESSIONS, 6)).astype(np.int32))
    num_tokens = torch.tensor([3, 6, 0, 2, 1, 5, 9, 0, 4], dtype=torch.int32)
    count_tokens_reference(step.processors, tokens, num_tokens)
    afresh = NodeProcessors.allocate(sessions=SESSIONS, vocab_size=_VOCAB)
    for row, settings in enumerate(_SESSIONS):
        output = [*step.outputs[row], *tokens[row, : num_tokens[row]].tolist()]
        afresh.describe(row, **settings, prompt=step.prompts[row], output=output)
    assert torch.equal(step.processors.counts, afresh.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_writes_the_same_bits(triton_device: torch.device, dtype: torch.dtype):
    for seed in range(2 if triton_device.type == "cpu" else 40):
        mine, theirs = Step(seed, dtype=dtype), Step(seed, triton_device, dtype=dtype)
        expected, found = torch.zeros(_LINES, _VOCAB), torch.zeros(_LINES, 2 * _VOCAB, device=triton_device)
        process_logits_reference(mine.logits, *mine.state, expected)
        process_logits(theirs.logits, *theirs.state, found[:, :_VOCAB])
        assert torch.equal(bits(expected), bits(found[:, :_VOCAB]))
        assert not found[:, _VOCAB:].any()
        if dtype is torch.float32:
            # In place; lines of padding stay as they are.
            process_logits(theirs.logits, *theirs.state, theirs.logits)
            expected[mine.count :] = mine.logits[mine.count :]
            assert torch.equal(bits(expected), bits(theirs.logits))


def test_processors_of_more_tokens_serve_a_model_of_the_first_ones(device: torch.device):
    step = Step(1, device)
    rows, packed, pool, processors = step.state
    wide = NodeProcessors.allocate(sessions=SESSIONS, vocab_size=_VOCAB + 7, device=device)
    first = replace(
        processors,
        counts=wide.counts[:, :_VOCAB].copy_(processors.counts),
        additive=wide.additive[:, :_VOCAB].copy_(processors.additive),
    )
    expected, found = (torch.zeros(_LINES, _VOCAB, device=device) for _ in range(2))
    process_logits(step.logits, *step.state, expected)
    process_logits(step.logits, rows, packed, pool, first, found)
    assert torch.equal(bits(expected), bits(found))


def test_the_kernel_counts_the_same_tokens(triton_device: torch.device):
    chance = np.random.default_rng(5)
    mine, theirs = Step(5), Step(5, triton_device)
    tokens = torch.from_numpy(chance.integers(-1, _VOCAB + 3, (SESSIONS, 37)).astype(np.int32))
    num_tokens = torch.from_numpy(chance.integers(0, 50, SESSIONS).astype(np.int32))
    count_tokens_reference(mine.processors, tokens, num_tokens)
    # Of processors of more tokens, the first columns.
    wide = torch.zeros(SESSIONS, _VOCAB + 7, dtype=torch.int32, device=triton_device)
    wide[:, :_VOCAB] = theirs.processors.counts
    first = replace(theirs.processors, counts=wide[:, :_VOCAB])
    count_tokens(first, tokens.to(triton_device), num_tokens.to(triton_device))
    assert torch.equal(mine.processors.counts, first.counts.cpu())
    assert not wide[:, _VOCAB:].any()


def test_bad_arguments_are_named():
    step = Step(1)
    with pytest.raises(ValueError, match=r"logits: shape \[3, 41\] given, \[40, 41\] needed"):
        process_logits(step.logits[:3], *step.state, step.logits)
    with pytest.raises(ValueError, match=r"out: dtype torch.float64 given"):
        process_logits(step.logits, *step.state, step.logits.double())
    with pytest.raises(ValueError, match=r"logits: stride 2 between tokens given"):
        process_logits(step.logits.repeat(1, 2)[:, ::2], *step.state, step.logits)
    with pytest.raises(ValueError, match=r"num_tokens: shape \[2\] given, \[9\] needed"):
        count_tokens(step.processors, torch.zeros(9, 3).int(), torch.zeros(2).int())
