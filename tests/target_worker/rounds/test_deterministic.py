"""Deterministic rounds: the bits of a session's log probabilities do not depend on what else its rounds compute."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.target_worker.rounds.driving import (
    Decoded,
    Driver,
    TreeMaker,
    adversarial_tree,
    make_loop,
    no_tree,
    oracle_tree,
    random_tree,
)

from outrider.models import embedded_target_path
from outrider.sampling import SamplingSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("device", ["cuda"], indirect=True),
    pytest.mark.usefixtures("device"),
]
# Prompt tokens and sizes by model; one of them has paths across a split of attention's keys.
_SHORT: dict[str, Any] = {"prompt_len": 40, "dtype": "bfloat16"}
_LONG = _SHORT | {"prompt_len": 1005, "num_slots": 9000, "max_prefill_tokens": 512}
_MODELS = {"llama": _SHORT, "window": _SHORT, "float32": _SHORT | {"dtype": "float32"}, "long": _LONG}


def run_session(
    folder: Path,
    prompt: Sequence[int],
    spec: SamplingSpec,
    *,
    make_tree: TreeMaker = no_tree,
    expected: Sequence[int] = (),
    others: int = 0,
    **sizes: Any,
) -> Decoded:
    """Decode a session beside others that have prompts of any length, and trees of any shape."""
    driver, chance = Driver(make_loop(folder, deterministic=True, **sizes)), random.Random(others)
    for number in range(1, others + 1):
        started = [chance.randrange(61) for _ in range(chance.randint(1, len(prompt)))]
        own = SamplingSpec(temperature=1.0, seed=number, max_new_tokens=40)
        driver.open(number, own, [], random_tree, prompt=started)
        driver.turn()
    decoded = driver.open(0, spec, expected, make_tree, prompt=prompt)
    driver.run()
    return decoded


def bits_of(decoded: Decoded) -> list[np.ndarray]:
    """The log probabilities of a session's tokens and of their alternatives, as integers."""
    parts = [result.logprobs for result in decoded.results if result.logprobs is not None]
    return [
        np.concatenate([part.token_logprobs for part in parts]).view(np.int32),
        np.concatenate([part.top_logprobs for part in parts]).view(np.int32),
        np.concatenate([part.top_token_ids for part in parts]),
    ]


@pytest.mark.parametrize("model", _MODELS)
def test_bits_depend_on_the_session_alone(model: str, checkpoint: Path, windowed: Path):
    folder = {"window": windowed, "long": embedded_target_path()}.get(model, checkpoint)
    sizes = dict(_MODELS[model])
    chance = random.Random(3)
    prompt = [chance.randrange(61) for _ in range(sizes.pop("prompt_len"))]
    spec = SamplingSpec(temperature=0.8, seed=5, logprobs=3, max_new_tokens=40)
    alone = run_session(folder, prompt, spec, chunk=512, **sizes)
    assert len(alone.tokens) == 40
    expected, scenarios = bits_of(alone), [(oracle_tree, 0, 16), (random_tree, 7, 9), (adversarial_tree, 3, 33)]
    for make_tree, others, chunk in scenarios:
        again = run_session(
            folder, prompt, spec, make_tree=make_tree, expected=alone.tokens, others=others, chunk=chunk, **sizes
        )
        assert again.tokens == alone.tokens, make_tree.__name__
        assert make_tree is random_tree or sum(result.accepted for result in again.results) > 0
        for one, other in zip(expected, bits_of(again), strict=True):
            np.testing.assert_array_equal(other, one, err_msg=make_tree.__name__)


def test_plain_rounds_give_the_tokens_of_rounds_with_log_probabilities(checkpoint: Path):
    prompt = [random.Random(4).randrange(61) for _ in range(30)]
    tokens = [
        run_session(
            checkpoint,
            prompt,
            SamplingSpec(temperature=1.0, seed=8, logprobs=logprobs, max_new_tokens=50),
            make_tree=make_tree,
            others=others,
            dtype="bfloat16",
        ).tokens
        for logprobs, make_tree, others in ((2, no_tree, 0), (None, no_tree, 0), (None, random_tree, 6))
    ]
    assert tokens[1:] == tokens[:1] * 2
