"""A head or block drafter as it is trained is what serves: the recipe's drafting and the engine's; the loop."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recipes.importing import import_train
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.eagle import BlockHead, EagleHead, load_eagle_head
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention_reference
from outrider.models import embedded_block_path, embedded_eagle_path, embedded_target_path

HIDDEN, VOCAB, LENGTH, STEPS = 32, 61, 9, 4


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The recipe's `train` module; it finds its neighbours as a script does."""
    yield from import_train(monkeypatch, "embedded_pair", "eagle")


def small_head(recipe: Any, *, kv_heads: int = 2, block_rank: int = 0) -> Any:
    """A head, or with a rank a block drafter."""
    shape = importlib.import_module("llama").LlamaShape(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=kv_heads, vocab_size=VOCAB,
    )  # fmt: skip
    torch.manual_seed(0)
    taps = (0, 1, 2)
    head = recipe.Block(shape, taps, steps=STEPS, rank=block_rank) if block_rank else recipe.Eagle3(shape, taps)
    for parameter in head.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return head


def rows_alone(head: EagleHead, table: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> dict[str, Any]:
    """Rows that are sessions of their own: row r sees the first `positions[r]` + 1 slots of its row of the table."""
    lengths = torch.from_numpy((positions + 1).astype(np.int32))
    return {
        "positions": torch.from_numpy(positions.astype(np.int32)),
        "write_slots": torch.from_numpy(slots.astype(np.int64)),
        "batch": TreeAttentionBatch(
            slot_table=torch.from_numpy(table.astype(np.int32)), prefix_len=lengths, key_len=lengths,
            query_start=torch.arange(len(positions) + 1, dtype=torch.int32), tree_start=lengths,
            tree_mask=torch.zeros((len(positions), 1), dtype=torch.int64), max_query_len=1, max_key_len=table.shape[1],
        ),
    }  # fmt: skip


def served_logits(head: EagleHead, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """By drafting step the logits [LENGTH - step, V] of chains that begin at every row."""
    shape = (LENGTH * STEPS, head.kv_heads, head.head_dim)
    caches: dict[str, Any] = {name: torch.zeros(shape) for name in ("key_cache", "value_cache")}
    table = np.tile(np.arange(LENGTH), (LENGTH, 1))
    roots = np.arange(LENGTH)
    hidden = head.forward(head.fuse(features), tokens, **rows_alone(head, table, roots, roots), **caches)
    logits = [head.logits(hidden)]
    for step in range(1, STEPS):
        roots = roots[:-1]
        # A chain's own rows stand behind the features': that of step s in slot s LENGTH + root.
        table[roots, roots + step] = step * LENGTH + roots
        arguments = rows_alone(head, table[: len(roots)], roots + step, step * LENGTH + roots)
        hidden = head.forward(hidden[: len(roots)], tokens[roots + step], **arguments, **caches)
        logits.append(head.logits(hidden))
    return logits


def test_unrolled_drafting_is_what_the_engine_drafts(recipe: Any, tmp_path: Path) -> None:
    head = small_head(recipe)
    recipe.save_head(head, tmp_path)
    recipe.load_head(head, tmp_path)  # rounded, as the checkpoint is
    table = torch.randn(VOCAB, HIDDEN)
    served = load_eagle_head(
        tmp_path, embedding=table, output=table, target_layers=2, max_positions=64, attend=tree_attention_reference
    )
    assert served.taps == (0, 1, 2)
    features, tokens = torch.randn(LENGTH, 3 * HIDDEN), torch.randint(VOCAB, (LENGTH,))
    expected = served_logits(served, features, tokens)
    # Chains in any order, of which fewer are followed with each step.
    roots = torch.randperm(LENGTH + 1 - STEPS)
    with torch.no_grad():
        unrolled = head.unroll(features[None], table[tokens][None], roots, [6, 5, 5, 3])
    assert [len(rows) for rows in unrolled] == [6, 5, 5, 3]
    for step, rows in enumerate(unrolled):
        found = functional.linear(rows, table)
        torch.testing.assert_close(found, expected[step][roots[: len(rows)]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_rows", [0, 1, 3])
def test_attention_of_chains_is_softmax_s(recipe: Any, own_rows: int) -> None:
    """Results and gradients are those of plain attention, for chains from anywhere in the texts."""
    attention = importlib.import_module("chain_attention")
    torch.manual_seed(own_rows)
    sequences, heads, kv_heads, length, dim, chains = 2, 6, 2, 19, 16, 23
    roots = torch.randperm(sequences * length)[:chains]
    text = (sequences, heads, length, dim)
    own = (own_rows, chains, kv_heads, dim)
    query, key, value, own_key, own_value = (
        torch.randn(shape, requires_grad=True) for shape in ((chains, heads, dim), text, text, own, own)
    )
    inputs = (query, key, value, own_key, own_value)
    towards = torch.randn(chains, heads, dim)
    results = []
    for attend in (attention.attend, attention.attend_reference):
        mixed = attend(query, key, value, roots=roots, own_key=own_key, own_value=own_value)
        results.append((mixed, *torch.autograd.grad(mixed, inputs, towards)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_trained_block_is_what_the_engine_drafts(recipe: Any, tmp_path: Path) -> None:
    block = small_head(recipe, block_rank=5)
    recipe.save_head(block, tmp_path)
    recipe.load_head(block, tmp_path)
    table = torch.randn(VOCAB, HIDDEN)
    served = load_eagle_head(
        tmp_path, embedding=table, output=table, target_layers=2, max_positions=64, attend=tree_attention_reference
    )
    assert isinstance(served, BlockHead) and served.block_size == STEPS
    features, tokens = torch.randn(LENGTH, 3 * HIDDEN), torch.randint(VOCAB, (LENGTH,))
    caches = {name: torch.zeros((LENGTH, served.kv_heads, served.head_dim)) for name in ("key_cache", "value_cache")}
    places = torch.arange(LENGTH, dtype=torch.int32)
    fused = served.fuse(features)
    served.store(fused, tokens, positions=places, write_slots=places.long(), **caches)
    blocks = served.block_logits(
        fused, tokens, positions=places, slot_table=places.expand(LENGTH, -1).contiguous(), key_len=places + 1, **caches
    )
    roots = torch.randperm(LENGTH + 1 - STEPS)
    with torch.no_grad():
        unrolled = block.unroll(features[None], table[tokens][None], roots, [6, 5, 5, 3])
    assert [len(rows) for rows in unrolled] == [6, 5, 5, 3]
    for step, rows in enumerate(unrolled):
        own = roots[: len(rows)]
        expected = blocks[own, step] + served.bias(tokens[own + step])
        torch.testing.assert_close(functional.linear(rows, table), expected, rtol=1e-4, atol=1e-4)


def test_a_block_begins_as_the_head(recipe: Any, tmp_path: Path) -> None:
    head = small_head(recipe)
    recipe.save_head(head, tmp_path)
    recipe.load_head(head, tmp_path)
    block = recipe.Block(head.shape, head.taps, steps=STEPS, rank=5)
    recipe.load_head(block, tmp_path)
    inputs = torch.randn(2, LENGTH, 3 * HIDDEN), torch.randn(2, LENGTH, HIDDEN), torch.arange(2 * LENGTH), [2 * LENGTH]
    with torch.no_grad():
        torch.testing.assert_close(block.unroll(*inputs), head.unroll(*inputs))


def test_a_larger_head_goes_on_as_the_same_function(recipe: Any, tmp_path: Path) -> None:
    head = small_head(recipe, kv_heads=1)
    recipe.save_head(head, tmp_path)
    recipe.load_head(head, tmp_path)
    larger = recipe.Eagle3(recipe.replace(head.shape, intermediate_size=80, num_attention_heads=6), head.taps)
    recipe.load_head(larger, tmp_path)
    inputs = torch.randn(2, LENGTH, 3 * HIDDEN), torch.randn(2, LENGTH, HIDDEN), torch.tensor([0, 3, LENGTH]), [3, 3]
    with torch.no_grad():
        expected, found = head.unroll(*inputs), larger.unroll(*inputs)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["head", "block"])
def test_the_whole_recipe_in_little(recipe: Any, tmp_path: Path, kind: str) -> None:
    """Text of the target, a few steps, a checkpoint that the engine loads, and a report."""
    np.random.default_rng(0).integers(1, 8192, 4000).astype(np.uint16).tofile(tmp_path / "source.bin")
    options = ["--tiny", "--stages", "train", "--work", str(tmp_path), "--device", "cpu", "--seconds", "0.1"]
    recipe.main([*options, *(["--block"] if kind == "block" else [])])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] >= 1
    assert report["written_tokens"] == 10 * 24
    assert len(report["held_out"]) == report["recipe"]["unroll"]
    table = torch.zeros(8192, 384)
    head = load_eagle_head(tmp_path / "head", embedding=table, output=table, target_layers=5, max_positions=64)
    assert head.taps == (1, 3, 5)
    assert isinstance(head, BlockHead) == ("head" in report) == (kind == "block")
    assert 1 <= report["acceptance_length"] <= 1 + report["recipe"]["unroll"]


def test_a_block_alone_is_trained_in_bfloat16_on_a_cpu(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, training = torch.device("cpu"), importlib.import_module("training")
    for has_units in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has_units=has_units: {"amx_bf16": has_units})
        assert recipe.BLOCK.compute_dtype(cpu) == (torch.bfloat16 if has_units else torch.float32)
        assert recipe.FULL.compute_dtype(cpu) == training.compute_dtype(cpu) == torch.float32


def test_text_is_written_anew_for_another_target(recipe: Any, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    target, settings = recipe.load_target(embedded_target_path(), cpu), recipe.tiny(recipe.BLOCK)
    settings = replace(settings, written=replace(settings.written, sequences=10, tokens=17))
    np.random.default_rng(0).integers(1, 8192, 4000).astype(np.uint16).tofile(tmp_path / "source.bin")

    def modified_ns() -> int:
        recipe.pair_text(settings, target, tmp_path, cpu)
        return (tmp_path / "written.pt").stat().st_mtime_ns

    first = modified_ns()
    assert modified_ns() == first
    target.model.embed_tokens.weight.data.mul_(-1)
    assert modified_ns() > first


@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_drafter_for_another_target(recipe: Any, tmp_path: Path, kind: str) -> None:
    """A target of SmolLM2's proportions and conversations in its recipe's files: a drafter that the engine loads."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, bos_token_id=7, eos_token_id=8, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    (tmp_path / "text").mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        tokens, chosen_at = draw.integers(VOCAB, size=(6, 24)), draw.choice([0, 70, 100, 255], size=(6, 24))
        np.savez(tmp_path / "text" / f"{number}.npz", tokens=tokens.astype(np.uint16), chosen_at=chosen_at.astype("u1"))
    work = tmp_path / "work"
    places = {"--target": tmp_path / "target", "--conversations": tmp_path / "text", "--work": work}
    options = [str(word) for pair in places.items() for word in pair]
    options += ["--block"] if kind == "block" else []
    recipe.main(["--tiny", *options, "--device", "cpu", "--seconds", "0.1"])
    report = json.loads((work / "report.json").read_text())
    assert report["steps"] >= 1
    assert report["recipe"]["begin_with"] == ""
    assert report["written_tokens"] == (12 - report["recipe"]["measured"]) * 24
    assert json.loads((work / "head" / "config.json").read_text())["eos_token_id"] == 8
    table = torch.zeros(VOCAB, 48)
    head = load_eagle_head(work / "head", embedding=table, output=table, target_layers=5, max_positions=64)
    assert (head.taps, head.kv_heads, head.head_dim) == ((2, 2, 2), 1, 16)
    assert isinstance(head, BlockHead) == (kind == "block")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.25])
def test_the_gradient_of_the_loss_is_autograd_s(recipe: Any, temperature: float) -> None:
    loop = importlib.import_module("loop")
    torch.manual_seed(4)
    drafted, wanted = (torch.randn(5, VOCAB, dtype=torch.float64) * 2 for _ in range(2))
    drafted.requires_grad_(True)
    log_q, log_p = drafted.log_softmax(-1), wanted.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    q, p = ((each / temperature).softmax(-1) for each in (drafted, wanted))
    variation = 0.5 * (q - p).abs().sum(-1)
    (expected,) = torch.autograd.grad((kl + variation).sum(), drafted)
    with torch.no_grad():
        found = loop.judge_rows(drafted, wanted.flip(0), torch.arange(5).flip(0), torch.full((5, 1), temperature))
    for each, value in zip(found, (kl, variation, expected), strict=True):
        torch.testing.assert_close(each.double(), value.detach(), rtol=1e-4, atol=1e-5)


def test_windows_are_drawn_while_the_target_s_rows_are_in_memory(recipe: Any) -> None:
    """Each batch of windows is read once for several steps, and rows stay with their windows."""
    loop, llama = importlib.import_module("loop"), importlib.import_module("llama")
    shape = llama.LlamaShape(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=VOCAB,
    )  # fmt: skip
    target, given = llama.Llama(shape).requires_grad_(False), []

    def windows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            given.append(torch.randint(VOCAB, (2, 7)))
            yield given[-1], given[-1] % 5

    settings = replace(recipe.tiny(recipe.FULL), uses=3, pool_batches=2)
    drawn = loop.drawn_rows(target, windows(), (0, 1, 2), settings)
    for step in range(12):
        rows = next(drawn)
        # Two batches before the first step, then one for three steps.
        assert len(given) == 2 + step // 3
        held = torch.cat(given[-2:])
        found = (rows.tokens[:, None] == held).all(-1)
        assert found.any(1).all() and len(rows.tokens.unique(dim=0)) == 2
        assert torch.equal(rows.chosen_at, rows.tokens % 5)
        features, last = loop.target_rows(target, rows.tokens, (0, 1, 2), torch.float32)
        torch.testing.assert_close((rows.features, rows.last), (features, last))


def test_chains_begin_in_front_of_answers(recipe: Any) -> None:
    """The first token that a chain drafts is an answer's, and the text goes on for the whole chain."""
    loop, nobody = importlib.import_module("loop"), importlib.import_module("conversations").NO_ANSWER
    chosen_at = torch.full((3, 20), nobody)  # of the token after each
    chosen_at[1, 4:9] = 0
    chosen_at[2, 12:20] = 100
    rows = 19
    roots = loop.draw_roots(chosen_at, 8, 6)
    assert sorted(roots.tolist()) == [rows + row for row in range(3, 8)] + [2 * rows + row for row in range(11, 14)]
    more = loop.draw_roots(chosen_at, 3 * 14, 6)
    assert len(more.unique()) == 3 * 14
    assert (more % rows).max() == 13
    assert loop.chain_counts(1000, 4, 0.8) == [960, 768, 640, 512]
    assert loop.chain_counts(3, 4, 0.5) == [3, 2, 1, 1]


@pytest.mark.parametrize("unroll", [1, 3])
def test_held_out_text_may_be_without_answers(recipe: Any, unroll: int) -> None:
    loop, llama = importlib.import_module("loop"), importlib.import_module("llama")
    shape = llama.LlamaShape(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB,
    )  # fmt: skip
    head, target = small_head(recipe), llama.Llama(shape).requires_grad_(False)
    settings, windows = replace(recipe.tiny(recipe.FULL), unroll=unroll), torch.randint(VOCAB, (4, LENGTH))
    chosen_at = torch.full_like(windows, importlib.import_module("conversations").NO_ANSWER)
    found = loop.measure(head, target, windows, chosen_at, settings)
    assert len(found["held_out"]) == unroll
    assert found["acceptance_length_in_answers"] is None
    chosen_at[:, 1:] = 0
    found = loop.measure(head, target, windows, chosen_at, settings)
    assert found["acceptance_length_in_answers"] == found["acceptance_length"]


def test_rows_are_asked_at_the_temperature_of_their_text(recipe: Any) -> None:
    loop = importlib.import_module("loop")
    assert loop.row_temperatures(torch.tensor([[100, 50], [0, 100]])).tolist() == [[1.0], [0.5], [0.25], [1.0]]


def test_what_the_target_writes_is_its_own_choice(recipe: Any) -> None:
    """At temperature 0 every token behind the prompt is the argmax of a forward over all before it."""
    target = recipe.load_target(embedded_target_path(), torch.device("cpu"))
    config = importlib.import_module("sampling").SamplingConfig(
        rounds=1, sequences=2, tokens=14, prompt_tokens=8, temperatures=(0.0,)
    )
    stream = torch.randint(1, 8192, (100,), generator=torch.Generator().manual_seed(0))
    texts, chosen_at = recipe.write_texts(target, stream, config, torch.float32)
    assert chosen_at.tolist() == 28 * [0]
    texts = texts.view(2, 14).long()
    with torch.no_grad():
        assert torch.equal(target(texts)[:, 7:-1].argmax(-1), texts[:, 8:])


@pytest.mark.parametrize("kind", ["head", "block"])
def test_what_ships_is_the_recipe_s(recipe: Any, kind: str) -> None:
    full, folder = (recipe.FULL, embedded_eagle_path()) if kind == "head" else (recipe.BLOCK, embedded_block_path())
    config = json.loads((folder / "config.json").read_text())
    shape = full.shape
    assert (config["intermediate_size"], config["num_attention_heads"]) == (
        shape.intermediate_size,
        shape.num_attention_heads,
    )
    assert tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == full.taps
    assert (config.get("block_rank", 0), config.get("block_size", full.unroll)) == (full.rank, full.unroll)
