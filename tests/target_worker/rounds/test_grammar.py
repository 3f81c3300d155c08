"""Outputs that have to match a grammar, in rounds: any tree gives plain decoding over the same masked logits."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.target_worker.rounds.driving import Decoded, Driver, make_loop, most_rounds
from tests.target_worker.test_grammar import (
    BLIND,
    END,
    GRAMMAR,
    PIECES,
    SPECS,
    WORDS,
    Tree,
    chain,
    distinct,
    folder,
    no_tree,
    plain_decode,
    random_tree,
)
from tests.target_worker.verifying import PROMPT

from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.sessions import Code

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

pytestmark = pytest.mark.usefixtures("device")
__all__ = ["folder"]


@pytest.fixture(scope="module")
def loop(device, folder) -> RoundLoop:
    return make_loop(folder)


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
    assert loop.kv.used == 0


def test_a_tree_that_is_not_followed_to_its_end_gives_plain_decoding(loop, reference_model, monkeypatch):
    """Where one branch becomes too costly, those behind it are not looked at: they may be right all the same."""
    real = SessionGrammar.masks

    def masks(self: SessionGrammar, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> np.ndarray:
        found = real(self, tokens, parents)
        self.unfollowed = frozenset(range(3, len(found)))
        found[3:] = -1
        return found

    monkeypatch.setattr(SessionGrammar, "masks", masks)
    for spec in (SPECS["greedy"], SPECS["coupled"]):
        plain = plain_decode(reference_model, spec)
        for make_tree in (random_tree, chain):
            decoded = decode(loop, spec, plain, make_tree)
            assert decoded.tokens == plain
            assert make_tree is not chain or len(decoded.results) <= most_rounds(len(plain), each=3)


@pytest.mark.parametrize("rule", [VerificationRule.TARGET_ONLY, VerificationRule.REJECTION])
def test_coins_give_words_too(loop, rule):
    accepted, outputs = 0, set()
    for seed in range(24):
        rng, driver = random.Random(seed), Driver(loop)
        spec = SamplingSpec(temperature=1.5, seed=seed, verification=rule, **GRAMMAR)
        decoded = driver.open(1, spec, [], no_tree)
        while not decoded.is_over:
            tree: Tree = distinct(random_tree(rng, [58, 59, 4, 58, 4]))
            q = []
            if rule is VerificationRule.REJECTION:
                loop.forget((7, 1), 1, 0)
                tree, q = ([BLIND.draw(rng.getrandbits(32)) for _ in range(4)], [0, 1, 2, 3]), [BLIND] * 4
            driver.grow(1, tree, as_of=len(PROMPT) + len(decoded.tokens), q=q)
            driver.turn()
        driver.run()
        assert decoded.finish is Finish.STOP
        accepted += sum(result.accepted for result in decoded.results)
        outputs.add("".join(PIECES[token] for token in decoded.tokens[:-1]))
    assert outputs <= WORDS
    assert len(outputs) > 8
    assert accepted > 8


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
    assert (loop.session_count, loop.kv.used) == (0, 0)


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
