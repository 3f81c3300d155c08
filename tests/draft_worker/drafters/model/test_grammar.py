"""Growth under a grammar: only tokens that may follow, once the grammar is compiled."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.byte_tokenizer import byte_tokenizer
from tests.draft_worker.table_model import Bench, Context, Mirror, best_children, law_after

from outrider.grammar.compiler import GrammarCompiler
from outrider.sampling import SamplingSpec, VerificationRule

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

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
    return byte_tokenizer("<end>", vocab={letter: token for token, letter in enumerate(LETTERS)}).to_str()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    made = GrammarCompiler(read)
    made.compile(GRAMMAR["grammar"], (END,))
    return made


def masked_law(context: Context, spec: SamplingSpec) -> torch.Tensor:
    law = law_after(context, 3, spec)
    allowed = [*ALLOWED, END] if len(context) >= 6 else ALLOWED
    kept = torch.full_like(law, -torch.inf)
    kept[allowed] = law[allowed]
    return kept


def grown_tokens(mirror: Mirror) -> set[int]:
    return {node.context[-1] for node in mirror.live}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_children_are_the_best_of_what_may_follow(compiler: GrammarCompiler, temperature: float):
    bench = Bench(grammars=compiler)
    spec = SamplingSpec(temperature=temperature, seed=5, **GRAMMAR)
    other, mirror = bench.open(2, max_depth=30), bench.open(1, sampling=spec)
    for committed in ([], [4, 11], [20, 1]):
        bench.commit(1, committed)
        bench.commit(2, [5])
        bench.finish()
        other.check_children(least=5)
        assert len(mirror.expanded) > 5
        for context, children in mirror.expanded.items():
            tokens = [node.context[-1] for node in children]
            assert tokens == best_children(context, masked_law(context, spec), spec)
    assert END in grown_tokens(mirror)


@pytest.mark.parametrize("rule", [VerificationRule.TARGET_ONLY, VerificationRule.REJECTION])
def test_what_coins_judge_is_drawn_from_what_may_follow(compiler: GrammarCompiler, rule: VerificationRule):
    bench = Bench(grammars=compiler)
    mirror = bench.open(sampling=SamplingSpec(temperature=1.0, seed=5, verification=rule, **GRAMMAR), max_depth=6)
    bench.finish()
    assert len(mirror.live) > 5
    for node in mirror.live:
        path = node.context[3:]
        # A chain goes on after its end: how long it is must not depend on its tokens.
        if END in path[:-1]:
            continue
        assert path[-1] in ALLOWED or (path[-1] == END and len(path) > 3)
        if rule is VerificationRule.REJECTION:
            assert node.distribution is not None
            assert set(node.distribution.token_ids.tolist()) <= {*ALLOWED, END}


class Slow(GrammarCompiler):
    """Compiles when it is told."""

    def __init__(self) -> None:
        super().__init__(read)
        self.compiled: Future[Any] = Future()

    def start(self, grammar: str, end_ids: tuple[int, ...], on_ready: Callable[[], None] | None = None) -> Future[Any]:
        assert on_ready is not None
        self.compiled.add_done_callback(lambda _done: on_ready())
        return self.compiled


def test_a_session_waits_for_its_grammar_and_no_other_does(compiler: GrammarCompiler):
    slow, woken = Slow(), list[bool]()
    bench = Bench(grammars=slow)
    bench.drafter.wake = lambda: woken.append(True)
    mirror = bench.open(1, sampling=SamplingSpec(**GRAMMAR))
    other = bench.open(2)
    bench.finish()
    other.check_children(least=10)
    assert not mirror.growths
    assert not woken
    slow.compiled.set_result(compiler.compile(GRAMMAR["grammar"], (END,)))
    assert woken
    bench.finish()
    assert grown_tokens(mirror) <= {*ALLOWED, END}
    assert mirror.live


def test_a_grammar_that_cannot_be_followed_is_left_to_the_target():
    woken: Future[None] = Future()
    bench = Bench(grammars=GrammarCompiler(lambda: "{}"))
    bench.drafter.wake = lambda: woken.set_result(None)
    mirror = bench.open(sampling=SamplingSpec(**GRAMMAR))
    woken.result(60)
    bench.finish()
    assert not grown_tokens(mirror) <= {*ALLOWED, END}
    mirror.check_children(least=10)
