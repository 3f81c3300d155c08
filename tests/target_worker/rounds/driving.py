"""Rounds of a tiny model, and a drafter that grows whatever tree a test wants: what the tests of rounds share."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.drafters.model import DraftModel
from outrider.target_worker.rounds.buckets import Bucket
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.draft_steps import DraftSteps, Floats, RoundRates
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.round_times import CapturedTimes, Demand
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.rounds.step_cost import PrefillAllowance
from outrider.target_worker.sessions.requests import OpenRequest

# Of the models: the fixture `device` sets it.
DEVICE = "cpu"

PROMPT = [5, 9, 33, 2, 17, 40, 8]
TARGET_ONLY = SamplingSpec(temperature=1.0, verification=VerificationRule.TARGET_ONLY)
# Every way to choose a token that is decided by the prompt and the parameters alone.
SPECS = {
    "greedy": SamplingSpec(max_new_tokens=24),
    "coupled": SamplingSpec(temperature=1.0, seed=2**63 + 11, max_new_tokens=24),
    "coupled-filters": SamplingSpec(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5, choice_index=2, max_new_tokens=24
    ),
    "penalties": SamplingSpec(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, max_new_tokens=24),
    "penalties-coupled": SamplingSpec(
        temperature=1.0, seed=3, repetition_penalty=0.8, frequency_penalty=-0.5, max_new_tokens=24
    ),
    "bias": SamplingSpec(logit_bias={3: 2.5, 40: -100.0, 11: 2.0}, temperature=0.7, seed=9, max_new_tokens=24),
    "allowed": SamplingSpec(allowed_token_ids=(4, 8, 15, 16, 23, 42), temperature=1.0, seed=1, max_new_tokens=24),
    "stop": SamplingSpec(temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 9)), max_new_tokens=40),
    "min-new": SamplingSpec(
        temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 3)), min_new_tokens=9, max_new_tokens=40
    ),
    "short": SamplingSpec(max_new_tokens=3),
    "logprobs": SamplingSpec(temperature=1.0, seed=8, logprobs=4, repetition_penalty=1.5, max_new_tokens=16),
}

Tree = tuple[list[int], list[int]]
"""Tokens, and for each the number of its parent: 0 is the root, 1 the first node."""
NO_TREE: Tree = ([], [])


class FixedTimes(CapturedTimes):
    """Every node is worth its row, and prompts are computed in chunks of a given size, however busy the machine is."""

    def __init__(self, buckets: Sequence[Bucket], chunk: int) -> None:
        captured_ns = [1e6 + 1e3 * (bucket.rows + bucket.prefill) for bucket in buckets]
        super().__init__(buckets, captured_ns, slowdown=0.3)
        self._chunk = chunk

    def plan(self, gains: npt.NDArray[np.int64], demand: Demand) -> tuple[int, PrefillAllowance]:
        # Without graphs there is one bucket.
        bucket = 0 if len(self._buckets) == 1 else super().plan(gains, demand)[0]
        return bucket, PrefillAllowance(most=min(demand.missing, self._chunk, self._buckets[bucket].prefill))

    def drafted_rates(self, demand: Demand, gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        # As if a round took a second, and a step a millisecond.
        return (demand.sessions + gained) / (1e9 + 1e6 * np.arange(len(drafted_ns)))


class FixedSteps(DraftSteps):
    """As many steps before every round, however busy the machine is."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def choose(self, sessions: int, times_ns: Sequence[float], rates: RoundRates, *, prompt_ns: float) -> int:
        return self.steps


_ROUNDS: dict[str, Any] = {"max_step_rows": 64, "max_session_rows": 16, "max_prefill_tokens": 64, "capacity": 64}

TreeMaker = Callable[[random.Random, Sequence[int]], Tree]
"""Makes a tree of the output that is expected next."""


def random_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """Nodes anywhere, half of them with the token that plain decoding has at that depth."""
    tokens, parents, depths = [], [], [0]
    for number in range(rng.randint(0, 12)):
        parent = rng.randint(0, number)
        depth = depths[parent] + 1
        depths.append(depth)
        right = expected[depth - 1] if depth <= len(expected) else rng.randrange(61)
        tokens.append(right if rng.random() < 0.5 else rng.randrange(61))
        parents.append(parent)
    return tokens, parents


def oracle_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The continuation itself, a wrong sibling before each right node, beyond the end of the output as well."""
    tokens, parents, last = [], [], 0
    for token in [*expected[:6], 1, 2]:
        tokens += [(token + 1) % 61, token]
        parents += [last, last]
        last = len(tokens)
    return tokens, parents


def adversarial_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The right first token twice, one of them under the wrong parent, and a right chain below a wrong node."""
    right = [*expected[:3], 4, 4, 4]
    wrong = (right[0] + 1) % 61
    return [wrong, right[0], right[1], right[0], right[1], wrong, right[2]], [0, 1, 1, 0, 4, 4, 5]


def no_tree(_rng: random.Random, _expected: Sequence[int]) -> Tree:
    return NO_TREE


def make_loop(checkpoint: Path, **overrides: Any) -> RoundLoop:
    """Rounds of a model; engine and round sizes by their names, and `chunk`, the size of prefill chunks."""
    return loop_of(make_runner(checkpoint, **overrides), **overrides)


def make_runner(checkpoint: Path, **overrides: Any) -> ModelRunner:
    """The model that `make_loop` runs."""
    engine: dict[str, Any] = {"num_slots": 512, "max_num_seqs": 8, "torch_threads": 1, "device": DEVICE}
    if DEVICE == "cuda":
        engine["dtype"] = "float32"
    engine |= {name: value for name, value in overrides.items() if name not in {*_ROUNDS, "chunk"}}
    most = overrides.get("max_session_rows", _ROUNDS["max_session_rows"])
    return ModelRunner(EngineConfig(model_path=checkpoint, max_tree_nodes=most, **engine))


def loop_of(runner: ModelRunner, **overrides: Any) -> RoundLoop:
    """Rounds of a loaded model."""
    return rounds_of(runner, **overrides)[0]


def rounds_of(
    runner: ModelRunner,
    *,
    kind: type[RoundProgram] = RoundProgram,
    chunk: int = 64,
    draft: DraftModel | None = None,
    **overrides: Any,
) -> tuple[RoundLoop, Any]:
    """Rounds of a loaded model, perhaps with a draft model beside it, and the program of a kind that they run."""
    config = config_of(runner, **overrides)
    program = kind.of_runner(runner, config, draft=draft)
    return RoundLoop(runner, config, times=FixedTimes(program.buckets, chunk), program=program), program


def config_of(runner: ModelRunner, **overrides: Any) -> RoundConfig:
    """Sizes of a loaded model's rounds."""
    return RoundConfig(
        max_sessions=runner.config.max_num_seqs,
        max_model_len=runner.info.max_model_len,
        **_ROUNDS | {name: value for name, value in overrides.items() if name in _ROUNDS},
    )


def open_request(
    number: int, spec: SamplingSpec, *, epoch: int = 1, prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()
) -> OpenRequest:
    return OpenRequest(key=(7, number), epoch=epoch, prompt=prompt, output=output, sampling=spec)


def most_rounds(tokens: int, *, each: int) -> int:
    """Return the most rounds that tokens take, so many a round; on a GPU half the rounds run ahead, without a tree."""
    return -(-tokens // each) * (2 if DEVICE == "cuda" else 1)


@dataclass
class Decoded:
    """Tokens and results that a session has been given."""

    tokens: list[int] = field(default_factory=list)
    results: list[SessionResult] = field(default_factory=list)

    @property
    def finish(self) -> Finish:
        return self.results[-1].finish if self.results else Finish.NONE

    @property
    def is_over(self) -> bool:
        return bool(self.results) and (self.finish is not Finish.NONE or self.results[-1].fault is not None)


class Driver:
    """Grows a tree for each session whenever it has committed something, and turns the rounds.

    Args:
        loop: the rounds.
        seed: of the trees.
    """

    def __init__(self, loop: RoundLoop, *, seed: int = 0) -> None:
        self.loop = loop
        self.decoded: dict[int, Decoded] = {}
        self._rng = random.Random(seed)
        self._woken = threading.Event()
        loop.wake = self._woken.set
        self._node_ids = itertools.count(1)
        self._makers: dict[int, tuple[TreeMaker, Sequence[int], int, int]] = {}
        # By session, the epoch and the length that a tree was last grown for.
        self._grown: dict[int, tuple[int, int]] = {}

    def open(
        self,
        number: int,
        spec: SamplingSpec,
        expected: Sequence[int],
        make_tree: TreeMaker,
        *,
        epoch: int = 1,
        prompt: Sequence[int] = PROMPT,
        output: Sequence[int] = (),
    ) -> Decoded:
        """Open a session whose trees are made of what it is expected to put out."""
        self.loop.open(open_request(number, spec, epoch=epoch, prompt=prompt, output=output))
        self._makers[number] = make_tree, expected, len(prompt) + len(output), epoch
        decoded = self.decoded[number] = Decoded()
        return decoded

    def grow(
        self,
        number: int,
        tree: Tree,
        *,
        as_of: int,
        epoch: int = 1,
        place: int = 0,
        q: Sequence[DraftDistribution] = (),
    ) -> None:
        """Grow a tree below the token at index as_of - 1; node 1 is its first, 0 the root."""
        tokens, parents = tree
        ids = [0, *(next(self._node_ids) for _ in tokens)]
        if tokens:
            self.loop.grow(Growth.of_session(
                (7, number), epoch, place, as_of, ids[1:], [ids[parent] for parent in parents], tokens,
                [0.9] * len(tokens), distributions=q,
            ))  # fmt: skip

    def turn(self) -> list[SessionResult]:
        """Let one turn pass, and hand out its results; on a GPU, one more round has been read by then."""
        for number, decoded in self.decoded.items():
            if not decoded.is_over and (7, number) in self.loop.keys:
                make_tree, expected, start, epoch = self._makers[number]
                grown = epoch, start + len(decoded.tokens)
                if self._grown.get(number) != grown:
                    self._grown[number] = grown
                    tree = make_tree(self._rng, expected[len(decoded.tokens) :])
                    self.grow(number, tree, as_of=grown[1], epoch=grown[0])
        read = self.loop.rounds_read
        results = self.loop.turn()
        while DEVICE == "cuda" and self.loop.is_busy and self.loop.rounds_read == read:
            results += self.loop.turn()
        for result in results:
            decoded = self.decoded[result.key[1]]
            decoded.tokens += result.tokens
            decoded.results.append(result)
        return results

    def run(self, *, most_turns: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(most_turns):
            self.turn()
            if self.loop.has_work:
                continue
            if not self.loop.session_count:
                return
            # A grammar is being compiled, in a thread of its own.
            assert self._woken.wait(60), "sessions are open, and nothing is to be done"
            self._woken.clear()
        raise AssertionError(f"{self.loop.session_count} sessions are open after {most_turns} turns")
