"""Outputs that have to match a grammar: any tree gives the tokens of plain decoding over the same masked logits."""

import functools
import itertools
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.resident_support import FreshHead, held_entries, make_rig, random_head, tree_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from outrider.draft_distribution import DraftDistribution
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.coupled_sampling import coupled_choice
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import Code, OpenRequest, Outcome, SessionFault, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

PROMPT = [5, 9, 33, 2, 17, 40, 8]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
# (ab|cd|e){3,6}x as its words; ab and cd are tokens of their own, too.
PIECES = [*LETTERS, "ab", "cd"]
END = 60
WORDS = {"".join(parts) + "x" for count in range(3, 7) for parts in itertools.product(["ab", "cd", "e"], repeat=count)}
GRAMMAR: dict[str, Any] = {"grammar": "start: /(ab|cd|e){3,6}x/", "grammar_end_ids": (END,), "stop_token_ids": (END,)}

Tree = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer of its 61 tokens."""
    made = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(checkpoint, made)
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    config: dict[str, Any] = {"num_slots": 512, "max_num_seqs": 8, "max_tree_nodes": 16, "torch_threads": 1}
    return Verifier(ModelRunner(EngineConfig(model_path=folder, **config)), max_step_tokens=64)


def allowed_after(tokens: Sequence[int]) -> list[int]:
    return _allowed("".join(PIECES[token] for token in tokens))


@functools.cache
def _allowed(text: str) -> list[int]:
    found = [token for token, piece in enumerate(PIECES) if any(word.startswith(text + piece) for word in WORDS)]
    return found + ([END] if text in WORDS else [])


@torch.inference_mode()
def plain_decode(model: PreTrainedModel, spec: SamplingSpec) -> list[int]:
    """One token at a time through transformers, the grammar's mask by enumeration."""
    output: list[int] = []
    while len(output) < spec.max_new_tokens and END not in output:
        tokens = [*PROMPT, *output]
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        for token in set(tokens):
            penalty = spec.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        banned = torch.ones(len(logits), dtype=torch.bool)
        banned[allowed_after(output)] = False
        logits[banned] = -torch.inf
        output.append(choice(logits, len(tokens), spec))
    return output


def choice(logits: torch.Tensor, position: int, spec: SamplingSpec) -> int:
    seed = np.array([spec.seed], dtype=np.uint64).view(np.int64)
    columns = [torch.tensor([value]) for value in (position, spec.temperature, spec.top_k, spec.top_p, spec.min_p)]
    return int(coupled_choice(logits[None], torch.from_numpy(seed), *columns, choice_index=torch.tensor([0])))


def open_request(spec: SamplingSpec, *, number: int = 1, epoch: int = 1, output: Sequence[int] = ()) -> OpenRequest:
    return OpenRequest(key=(7, number), epoch=epoch, prompt=PROMPT, output=output, sampling=spec)


def request(length: int, tree: Tree = ([], []), *, number: int = 1, epoch: int = 1) -> TreeRequest:
    return TreeRequest(key=(7, number), epoch=epoch, length=length, tokens=tree[0], parents=tree[1])


def random_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """Nodes anywhere, half of them right; the others break the grammar, or end it too early."""
    tokens: list[int] = []
    parents: list[int] = []
    depths = [0]
    for number in range(rng.randint(0, 12)):
        parents.append(rng.randint(0, number))
        depths.append(depths[parents[-1]] + 1)
        is_right = depths[-1] <= len(expected) and rng.random() < 0.5
        tokens.append(expected[depths[-1] - 1] if is_right else rng.choice([*allowed_after([]), END, 30, 31]))
    return tokens, parents


def chain(_rng: random.Random, expected: Sequence[int]) -> Tree:
    """The continuation itself, and more after its end."""
    tokens = [*expected[:6], 1, END]
    return tokens, list(range(len(tokens)))


def no_tree(_rng: random.Random, _expected: Sequence[int]) -> Tree:
    return [], []


def decode(verifier: Verifier, spec: SamplingSpec, expected: Sequence[int], make_tree: Any) -> list[TreeResult]:
    verifier.open(open_request(spec))
    rng, tokens, results = random.Random(2), [], []
    while len(tokens) < spec.max_new_tokens and END not in tokens:
        result = verifier.step([request(len(PROMPT) + len(tokens), make_tree(rng, expected[len(tokens) :]))]).results[0]
        if result.outcome is Outcome.DEFERRED:
            continue
        assert result.outcome is Outcome.ACCEPTED, result.fault
        tokens += result.token_ids
        results.append(result)
    verifier.close((7, 1), 1)
    return results


def tokens_of(results: Sequence[TreeResult]) -> list[int]:
    return [token for result in results for token in result.token_ids]


SPECS = {
    "greedy": SamplingSpec(max_new_tokens=24, **GRAMMAR),
    "coupled": SamplingSpec(temperature=1.5, seed=2**63 + 11, max_new_tokens=24, **GRAMMAR),
    "filters": SamplingSpec(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_new_tokens=24, **GRAMMAR),
    "penalties": SamplingSpec(temperature=1.0, seed=6, repetition_penalty=1.4, max_new_tokens=24, **GRAMMAR),
    "cut": SamplingSpec(temperature=1.5, seed=9, max_new_tokens=3, **GRAMMAR),
}


@pytest.mark.parametrize("name", SPECS)
def test_any_tree_gives_plain_decoding(name: str, verifier: Verifier, reference_model: PreTrainedModel) -> None:
    for seed in range(2):
        spec = replace(SPECS[name], seed=SPECS[name].seed + seed)
        plain = plain_decode(reference_model, spec)
        assert name == "cut" or "".join(PIECES[token] for token in plain[:-1]) in WORDS
        steps = {}
        for make_tree in (no_tree, random_tree, chain):
            results = decode(verifier, spec, plain, make_tree)
            assert tokens_of(results) == plain, make_tree.__name__
            steps[make_tree] = len(results)
        assert steps[no_tree] == len(plain)
        assert steps[chain] <= -(-len(plain) // 6), "the right nodes were not accepted"
    assert verifier.session_count == 0


def test_a_tree_that_is_not_followed_to_its_end_gives_plain_decoding(
    verifier: Verifier, reference_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one branch becomes too costly, those behind it are not looked at: they may be right all the same."""
    real = SessionGrammar.masks

    def masks(self: SessionGrammar, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> np.ndarray:
        found = real(self, tokens, parents)
        self.unfollowed = frozenset(range(3, len(found)))
        found[3:] = -1
        return found

    monkeypatch.setattr(SessionGrammar, "masks", masks)
    for spec in (SPECS["greedy"], SPECS["coupled"], replace(SPECS["coupled"], logprobs=2)):
        plain = plain_decode(reference_model, spec)
        for make_tree in (random_tree, chain):
            results = decode(verifier, spec, plain, make_tree)
            assert tokens_of(results) == plain
            assert all(result.logprobs is None or len(result.logprobs.token_logprobs) == len(result.token_ids)
                       for result in results)  # fmt: skip
            assert make_tree is not chain or len(results) <= -(-len(plain) // 3)


def test_log_probabilities_are_those_without_a_grammar(verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = replace(SPECS["coupled"], logprobs=2)
    plain = plain_decode(reference_model, spec)
    results = decode(verifier, spec, plain, chain)
    with torch.inference_mode():
        logits = reference_model(torch.tensor([[*PROMPT, *plain]])).logits[0, len(PROMPT) - 1 : -1].float()
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(plain)[:, None])[:, 0]
    got = np.concatenate([result.logprobs.token_logprobs for result in results if result.logprobs is not None])
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-4)
    tops = np.concatenate([result.logprobs.top_token_ids for result in results if result.logprobs is not None])
    assert any(token not in allowed_after([]) for token in tops[:, 0].tolist())


def distinct(tree: Tree) -> Tree:
    """Without siblings that hold the same token, and what is below them."""
    places, seen, tokens, parents = {0: 0}, set(), [], []
    for number, (token, parent) in enumerate(zip(*tree, strict=True), start=1):
        if parent in places and (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(places[parent])
            places[number] = len(tokens)
    return tokens, parents


# What a draft that knows nothing of the grammar draws from.
BLIND = DraftDistribution.quantised(np.array([0, 4, 30, 58, 59, END]), np.full(6, 1 / 6, dtype=np.float32))


@pytest.mark.parametrize("rule", [VerificationRule.TARGET_ONLY, VerificationRule.REJECTION])
def test_coins_give_words_too(verifier: Verifier, rule: VerificationRule) -> None:
    accepted, outputs = 0, set()
    for seed in range(16):
        rng, tokens = random.Random(seed), []
        verifier.open(open_request(SamplingSpec(temperature=1.5, seed=seed, verification=rule, **GRAMMAR)))
        while END not in tokens:
            tree = distinct(random_tree(rng, [58, 59, 4, 58, 4]))
            asked = request(len(PROMPT) + len(tokens), tree)
            if rule is VerificationRule.REJECTION:
                drawn = [BLIND.draw(rng.getrandbits(32)) for _ in range(4)]
                asked = replace(asked, tokens=drawn, parents=[0, 1, 2, 3], distributions=[BLIND] * 4)
            result = verifier.step([asked]).results[0]
            assert result.outcome is not Outcome.ERROR, result.fault
            tokens += result.token_ids
            accepted += len(result.accepted_nodes)
        verifier.close((7, 1), 1)
        outputs.add("".join(PIECES[token] for token in tokens[:-1]))
    assert outputs <= WORDS
    assert len(outputs) > 8
    assert accepted > 8


def test_a_session_goes_on_where_another_target_left_it(verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = SPECS["coupled"]
    plain = plain_decode(reference_model, spec)
    verifier.open(open_request(spec, epoch=2, output=plain[:2]))
    tokens = list(plain[:2])
    while END not in tokens:
        result = verifier.step([request(len(PROMPT) + len(tokens), epoch=2)]).results[0]
        tokens += result.token_ids
    assert tokens == plain
    # And where it held more than the sender: it goes back.
    result = verifier.step([request(len(PROMPT) + 1, (plain[1:3], [0, 1]), epoch=2)]).results[0]
    assert list(result.token_ids) == plain[1:4]
    verifier.close((7, 1), 2)


def test_an_output_that_does_not_match_ends_its_session_alone(verifier: Verifier) -> None:
    verifier.open(open_request(SPECS["greedy"], output=[30, 31]))
    verifier.open(open_request(SPECS["greedy"], number=2))
    wrong, right = TreeResult(outcome=Outcome.DEFERRED), TreeResult(outcome=Outcome.DEFERRED)
    while Outcome.DEFERRED in (wrong.outcome, right.outcome):
        wrong, right = verifier.step([request(len(PROMPT) + 2), request(len(PROMPT), number=2)]).results
    assert right.outcome is Outcome.ACCEPTED
    assert wrong.fault is not None
    assert (wrong.fault.code, wrong.fault.message) == (
        Code.INVALID_ARGUMENT,
        "structured_outputs: output token 0 (30) does not match the grammar",
    )
    assert verifier.session_count == 1
    verifier.close((7, 2), 1)
    assert verifier.slots_used == 0


def test_nobody_waits_for_a_grammar_that_is_compiled(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Future[Any] = Future()
    real = verifier._sessions._grammars  # pyright: ignore[reportPrivateUsage]
    matcher = real.compile(GRAMMAR["grammar"], (END,))
    monkeypatch.setattr(GrammarCompiler, "start", lambda *_arguments: compiled)
    verifier.open(open_request(SPECS["greedy"]))
    verifier.open(open_request(SamplingSpec(max_new_tokens=24), number=2))
    for _ in range(3):
        first, second = verifier.step([request(len(PROMPT)), request(len(PROMPT), number=2)]).results
        assert first.outcome is Outcome.DEFERRED
        if second.outcome is Outcome.ACCEPTED:
            break
    else:
        pytest.fail("the other session waited")
    compiled.set_result(matcher)
    assert verifier.step([request(len(PROMPT))]).results[0].outcome is Outcome.ACCEPTED
    verifier.close((7, 1), 1)
    verifier.close((7, 2), 1)


def test_a_model_without_a_tokenizer(checkpoint: Path) -> None:
    config: dict[str, Any] = {"num_slots": 64, "max_num_seqs": 1, "torch_threads": 1}
    verifier = Verifier(ModelRunner(EngineConfig(model_path=checkpoint, **config)), max_step_tokens=64)
    verifier.open(open_request(SPECS["greedy"]))
    result = TreeResult(outcome=Outcome.DEFERRED)
    while result.outcome is Outcome.DEFERRED:
        result = verifier.step([request(len(PROMPT))]).results[0]
    assert result.fault is not None
    assert "tokenizer.json" in result.fault.message
    assert verifier.session_count == 0


def test_a_grammar_without_an_end_is_refused(verifier: Verifier) -> None:
    with pytest.raises(SessionFault, match="grammar_end_ids: empty"):
        verifier.open(open_request(replace(SPECS["greedy"], grammar_end_ids=())))
    assert verifier.session_count == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_head_grows_follows_the_grammar(
    temperature: float, folder: Path, tmp_path: Path, reference_model: PreTrainedModel
) -> None:
    rig = make_rig(folder, random_head(tmp_path, folder), trees={"depth": 4, "top_k": 3, "nodes": 16})
    spec = SamplingSpec(temperature=temperature, seed=5, max_new_tokens=14, repetition_penalty=1.1, **GRAMMAR)
    rig.open(1, spec)
    nodes = 0
    while END not in rig.outputs[1] and len(rig.outputs[1]) < spec.max_new_tokens:
        rig.step([1])
        grown = rig.growth[1]
        if grown is None:
            continue
        tokens, parents = tree_of(grown)
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            assert token in allowed_after([*rig.outputs[1], *paths[parent]])
            paths.append([*paths[parent], token])
        nodes += len(tokens)
    assert rig.outputs[1] == plain_decode(reference_model, spec)
    assert nodes > 0
    assert len(rig.results) < len(rig.outputs[1]), "few tokens may follow each: some guess must have been right"


def test_a_head_survives_an_output_that_breaks_the_grammar(folder: Path, tmp_path: Path) -> None:
    """The session ends at once; what is remembered of it is of use to the next."""
    rig = make_rig(folder, random_head(tmp_path, folder))
    spec = SamplingSpec(max_new_tokens=14, **GRAMMAR)
    rig.open(1, spec, output=[PIECES.index("z")])
    # Until its grammar is compiled, the session waits.
    while (result := rig.verifier.step([request(len(PROMPT) + 1)]).results[0]).outcome is Outcome.DEFERRED:
        pass
    assert result.outcome is Outcome.ERROR
    assert rig.runner.slots.used == 0
    rig.open(2, spec)
    while not rig.outputs[2]:
        rig.step([2])
    tokens, entries = held_entries(rig, 2)
    torch.testing.assert_close(entries, FreshHead(rig, tokens).entries(), rtol=1e-4, atol=1e-4)
