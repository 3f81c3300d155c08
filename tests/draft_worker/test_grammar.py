"""What grows for an output that has to match a grammar: only what may follow there, once the grammar is compiled."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.draft_worker.session import GrowthLimits
from outrider.grammar.compiler import GrammarCompiler
from outrider.sampling import SamplingSpec, VerificationRule

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

Make = Callable[..., Any]
# The model of these tests has 24 tokens.
LETTERS = "abcdefghijklmnopqrstuvw"
END = 23
# From every letter of these, to any of them, at least three in all.
ALLOWED = [1, 4, 7, 8, 11, 15, 20]
PATTERN = "[" + "".join(LETTERS[token] for token in ALLOWED) + "]{3,}"
GRAMMAR: dict[str, Any] = {
    "grammar": f"start: /{PATTERN}/",
    "grammar_end_ids": (END,),
    "stop_token_ids": (END,),
    "max_new_tokens": 100,
}


def read() -> str:
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer.to_str()


COMPILER = GrammarCompiler(read)


def masked(logits: np.ndarray, output: Sequence[int]) -> np.ndarray:
    allowed = [*ALLOWED, END] if len(output) >= 3 else ALLOWED
    kept = np.full_like(logits, -np.inf)
    kept[allowed] = logits[allowed]
    return kept


@pytest.fixture
def growth(make_growth: Make) -> Any:
    made, _ = make_growth()
    made._grammars = COMPILER
    COMPILER.compile(GRAMMAR["grammar"], (END,))
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_children_are_the_best_of_what_may_follow(
    growth: Any, make_start: Make, logits_after: Make, tools: Any, temperature: float
) -> None:
    spec = SamplingSpec(temperature=temperature, seed=5, **GRAMMAR)
    growth.open(make_start(sampling=spec))
    prompt = list(make_start().prompt)
    for committed in ([], [4, 11], [20, 1]):
        if committed:
            growth.commit((7, 1), 1, growth.session((7, 1)).length, committed)
        tools.finish(growth)
        session = tools.open_session(growth)
        nodes = [session.tree.root, *session.tree.nodes()]
        expanded = [node for node in nodes if node.child_tokens is not None]
        assert len(expanded) > 5
        for node in expanded:
            tokens = session.tokens + tools.path_tokens(node)
            logits = masked(logits_after(tokens), tokens[len(prompt) :])
            assert node.child_tokens == tools.expected_children(logits, spec, len(tokens))
    depth = {node.position for node in session.tree.nodes()}
    assert any(node.token == END for node in session.tree.nodes())
    assert len(depth) > 1


@pytest.mark.parametrize("rule", [VerificationRule.TARGET_ONLY, VerificationRule.REJECTION])
def test_what_coins_judge_is_drawn_from_what_may_follow(
    growth: Any, make_start: Make, tools: Any, rule: VerificationRule
) -> None:
    spec = SamplingSpec(temperature=1.0, seed=5, verification=rule, **GRAMMAR)
    growth.open(make_start(sampling=spec, limits=GrowthLimits(max_depth=6)))
    tools.finish(growth)
    session = tools.open_session(growth)
    for node in session.tree.nodes():
        path = tools.path_tokens(node)
        # A chain goes on after its end: how long it is must not depend on its tokens.
        if END in path[:-1]:
            continue
        assert node.token in ALLOWED or (node.token == END and len(path) > 3)
        if rule is VerificationRule.REJECTION:
            assert node.distribution is not None
            assert set(node.distribution.token_ids.tolist()) <= {*ALLOWED, END}


def test_a_session_waits_for_its_grammar_and_no_other_does(growth: Any, make_start: Make, tools: Any) -> None:
    compiled: Future[Any] = Future()

    class Slow:
        def start(self, _grammar: str, _end_ids: tuple[int, ...], on_ready: Callable[[], None]) -> Future[Any]:
            compiled.add_done_callback(lambda _done: on_ready())
            return compiled

    woken: list[bool] = []
    growth._grammars, growth.wake = Slow(), lambda: woken.append(True)
    growth.open(make_start(1, sampling=SamplingSpec(**GRAMMAR)))
    growth.open(make_start(2, sampling=SamplingSpec(max_new_tokens=100)))
    steps = tools.finish(growth)
    assert tools.growths_of(steps, 2)
    assert not tools.growths_of(steps, 1)
    assert not woken
    compiled.set_result(COMPILER.compile(GRAMMAR["grammar"], (END,)))
    assert woken
    grown = tools.growths_of(tools.finish(growth), 1)
    assert {token for growth in grown for token in growth.tokens} <= {*ALLOWED, END}
    assert grown


def test_without_the_library_it_guesses(growth: Any, make_start: Make, tools: Any) -> None:
    growth._grammars = GrammarCompiler(lambda: "{}")
    woken: Future[None] = Future()
    growth.wake = lambda: woken.set_result(None)
    growth.open(make_start(sampling=SamplingSpec(**GRAMMAR)))
    woken.result(60)
    grown = tools.growths_of(tools.finish(growth))
    assert not {token for growth in grown for token in growth.tokens} <= {*ALLOWED, END}
