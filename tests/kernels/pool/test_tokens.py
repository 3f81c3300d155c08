"""Whatever drafters send, and whenever: the tokens that come out are those of plain decoding."""

from __future__ import annotations

import pytest
import torch
from benchmarks.pool_bench.toy_service import ToyService

from outrider.kernels.pool.records import Verdict


def _check_tokens(device: str, rounds: int) -> None:
    outcome = ToyService(seed=1, device=device).run(rounds)
    assert outcome.mismatches == 0
    assert outcome.rounds == rounds and outcome.sessions > rounds // 20
    # It is speculation that is tested, and all that may happen to growth.
    assert outcome.tokens > 1.3 * outcome.row_rounds
    assert all(outcome.verdicts[verdict.name] for verdict in Verdict if verdict != Verdict.INVALID)


def test_tokens_are_those_of_plain_decoding() -> None:
    _check_tokens("cpu", 3000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_are_those_of_plain_decoding_with_the_pool_on_a_gpu() -> None:
    _check_tokens("cuda", 2000)
