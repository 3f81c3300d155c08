"""Other weights in the place of those that rounds run with."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import PROMPT, Driver, make_loop, no_tree, oracle_tree
from transformers import LlamaForCausalLM

from outrider.sampling import SamplingSpec

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def other(checkpoint, tmp_path):
    """The tiny model with other weights."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    generator = torch.Generator().manual_seed(9)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + 0.2 * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_rounds_go_on_with_other_weights_and_nothing_of_the_old_ones(checkpoint, other, reference_model):
    loop = make_loop(checkpoint)
    spec = SamplingSpec(max_new_tokens=20)
    before = plain_decode(reference_model, PROMPT, spec).tokens
    driver = Driver(loop)
    first = driver.open(1, spec, before, no_tree)
    driver.open(2, spec, before, no_tree)
    while len(first.tokens) < 5:
        driver.turn()
    loop.reload(other)
    assert (loop.session_count, loop.kv.used, loop.kv.remembered) == (0, 0, 0)
    model = LlamaForCausalLM.from_pretrained(other, attn_implementation="eager").eval()
    after = plain_decode(model, PROMPT, spec).tokens
    assert after != before
    again = driver.open(3, spec, after, oracle_tree)
    driver.run()
    assert again.tokens == after
    assert first.tokens == before[: len(first.tokens)]
