"""Plain rounds of a model on several GPUs: one row a session, behind a context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.parallel_bench.models import BenchModel
from benchmarks.rounds.driving import BenchSession, Driver, Recorder
from benchmarks.rounds.figures import figures
from benchmarks.rounds.loading import Target, load_target

from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig

# Tokens of each session that run beside prefill, and before all sessions run.
_SPARE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Medians over the rounds of so many sessions, in milliseconds.

    Attributes:
        sessions: S, and rows of a round.
        round_ms: from the end of a round to the end of the next one.
        forward_ms: of it, the forward pass.
    """

    sessions: int
    round_ms: float
    forward_ms: float


def load(model: BenchModel, ranks: int, *, sessions: int, context: int, rounds: int) -> Target:
    """Load a shape on so many GPUs, for `measure_rounds` of up to so many sessions."""
    config = TargetWorkerConfig(
        model_path=model.folder,
        device="cuda",
        max_num_seqs=sessions,
        max_model_len=context + rounds + _SPARE_TOKENS,
        num_slots=sessions * (context + rounds + 2 * _SPARE_TOKENS),
        tensor_parallel_size=ranks,
        enable_prefix_caching=False,
    )
    return load_target(config, source=model.source())


def measure_rounds(target: Target, sessions: int, *, context: int, rounds: int) -> RoundTimes:
    """Return the times of at least so many rounds of sessions side by side, each behind so many tokens."""
    recorder = Recorder()
    driver = Driver(target.loop, None, recorder, may_measure=lambda: True)
    driver.generate(
        [
            BenchSession(
                number=number,
                prompt=_prompt(number, context, target.runner.vocab_size),
                sampling=SamplingSpec(max_new_tokens=rounds + _SPARE_TOKENS),
            )
            for number in range(1, sessions + 1)
        ],
        is_enough=lambda: recorder.counted >= rounds,
    )
    found = figures(recorder.rounds)
    return RoundTimes(sessions=sessions, round_ms=found["round_ms"][0], forward_ms=found["forward_ms"][0])


def _prompt(number: int, length: int, vocab_size: int) -> Sequence[int]:
    return random.Random(number).choices(range(vocab_size), k=length)
