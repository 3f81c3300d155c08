"""Outputs that have to match a grammar, in rounds: any tree gives plain decoding over the same masked logits."""

import functools
import itertools
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.byte_tokenizer import byte_tokenizer
from tests.target_worker.plain_decoding import choice
from tests.target_worker.rounds.driving import (
    PROMPT,
    Decoded,
    Driver,
    Tree,
    make_loop,
    most_rounds,
    no_tree,
    open_request,
)
from transformers import PreTrainedModel

from outrider.grammar.compiler import GrammarCompiler
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.sessions.requests import Code, SessionFault

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

pytestmark = pytest.mark.usefixtures("device")


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
# (ab|cd|e){3,6}x as its words; ab and cd are tokens of their own, too.
PIECES = [*LETTERS, "ab", "cd"]
END = 60
WORDS = {"".join(parts) + "x" for count in range(3, 7) for parts in itertools.product(["ab", "cd", "e"], repeat=count)}
GRAMMAR: dict[str, Any] = {"grammar": "start: /(ab|cd|e){3,6}x/", "grammar_end_ids": (END,), "stop_token_ids": (END,)}

SPECS = {
    "greedy": SamplingSpec(max_new_tokens=24, **GRAMMAR),
    "coupled": SamplingSpec(temperature=1.5, seed=2**63 + 11, max_new_tokens=24, **GRAMMAR),
    "filters": SamplingSpec(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_new_tokens=24, **GRAMMAR),
    "penalties": SamplingSpec(temperature=1.0, seed=6, repetition_penalty=1.4, max_new_tokens=24, **GRAMMAR),
    "cut": SamplingSpec(temperature=1.5, seed=9, max_new_tokens=3, **GRAMMAR),
}


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer of its 61 tokens."""
    made = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(checkpoint, made)
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = byte_tokenizer("<end>", vocab=vocab, merges=[("a", "b"), ("c", "d")])
    assert tokenizer.token_to_id("<end>") == END
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def loop(device, folder) -> RoundLoop:
    return make_loop(folder)


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


def decode(loop: RoundLoop, spec: SamplingSpec, expected: Sequence[int], make_tree: Any, **opened: Any) -> Decoded:
    driver = Driver(loop, seed=2)
    decoded = driver.open(1, spec, expected, make_tree, **opened)
    driver.run()
    return decoded


@pytest.mark.parametrize("name", SPECS)
def test_any_tree_gives_plain_decoding(name, loop, reference_model):
    for seed in range(2):
        spec = replace(SPECS[name], seed=SPECS[name].seed + seed)
        plain = plain_decode(reference_model, spec)
        rounds = {}
        for make_tree in (no_tree, random_tree, chain):
            decoded = decode(loop, spec, plain, make_tree)
            assert decoded.tokens == plain, make_tree.__name__
            assert decoded.finish is (Finish.STOP if plain[-1] == END else Finish.LENGTH)
            rounds[make_tree] = len(decoded.results)
        assert rounds[no_tree] == len(plain)
        assert rounds[chain] <= most_rounds(len(plain), each=6), "the right nodes were not accepted"
    assert loop.kv.slots.used == 0


def test_a_session_goes_on_where_another_target_left_it(loop, reference_model):
    plain = plain_decode(reference_model, SPECS["coupled"])
    assert decode(loop, SPECS["coupled"], plain[2:], no_tree, epoch=2, output=plain[:2]).tokens == plain[2:]


def test_an_output_that_does_not_match_ends_its_session_alone(loop, reference_model):
    driver = Driver(loop)
    wrong = driver.open(1, SPECS["greedy"], [], no_tree, output=[30, 31])
    right = driver.open(2, SPECS["greedy"], [], no_tree)
    driver.run()
    assert right.tokens == plain_decode(reference_model, SPECS["greedy"])
    fault = wrong.results[-1].fault
    assert fault is not None
    assert (fault.code, fault.message, wrong.tokens) == (
        Code.INVALID_ARGUMENT,
        "structured_outputs: output token 0 (30) does not match the grammar",
        [],
    )
    assert (loop.session_count, loop.kv.slots.used) == (0, 0)


def test_nobody_waits_for_a_grammar_that_is_compiled(folder, reference_model, monkeypatch):
    compiled: Future[Any] = Future()
    matcher = GrammarCompiler.of_checkpoint(folder).compile(GRAMMAR["grammar"], (END,))
    callbacks = []

    def start(_compiler, _grammar, _end_ids, callback):
        callbacks.append(callback)
        return compiled

    monkeypatch.setattr(GrammarCompiler, "start", start)
    driver = Driver(make_loop(folder))
    waiting = driver.open(1, SPECS["greedy"], [], no_tree)
    other = driver.open(2, SamplingSpec(max_new_tokens=24), [], no_tree)
    while not other.is_over:
        driver.turn()
    assert not waiting.results
    compiled.set_result(matcher)
    callbacks[0]()
    driver.run()
    assert waiting.tokens == plain_decode(reference_model, SPECS["greedy"])


def test_a_model_without_a_tokenizer(checkpoint):
    loop = make_loop(checkpoint)
    driver = Driver(loop)
    decoded = driver.open(1, SPECS["greedy"], [], no_tree)
    while not decoded.is_over:
        driver.turn()
    fault = decoded.results[-1].fault
    assert fault is not None
    assert "tokenizer.json" in fault.message
    assert loop.session_count == 0


def test_a_grammar_without_an_end_is_refused(loop):
    with pytest.raises(SessionFault, match="grammar_end_ids: empty"):
        loop.open(open_request(1, replace(SPECS["greedy"], grammar_end_ids=())))
    assert loop.session_count == 0
