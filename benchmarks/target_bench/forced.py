"""Count choices that depend on what else a round computes: sessions alone, then the same tokens beside others.

`Runs.alone` decodes one text after the other, one row a round. Its tokens are the truth that later passes follow: all
texts run side by side, some with trees in which the truth goes on along one branch and everything else is wrong, and
now and then a session is opened anew, so that its prompt and output are prefilled in chunks beside the others. Every
choice made behind true tokens is compared with the truth. Where it differs, the session is put back on the truth.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.kernels.noise import gumbel_noise_reference
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions import OpenRequest, SessionKey

_INCARNATION = 1
# Estimated chance of every node, right or wrong: all are worth verifying.
_ACCEPTANCE = 0.9


@dataclass(kw_only=True, eq=False)
class Text:
    """A prompt, its sampling, and what the target makes of it alone.

    Attributes:
        prompt: token ids.
        sampling: greedy, or with a seed; it also bounds the output.
        output: empty before `Runs.alone`.
    """

    prompt: list[int]
    sampling: SamplingSpec
    output: list[int]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A choice that differs from the one made alone.

    Attributes:
        text: number of the text.
        place: index in its output.
        chosen, alone: token ids.
        gap: score of one less that of the other, computed alone; NaN where it was not asked for.
    """

    text: int
    place: int
    chosen: int
    alone: int
    gap: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Contents of a pass.

    Attributes:
        name: of the pass.
        branch: most true tokens of a tree.
        wrong: most wrong nodes of a tree.
        reopen: probability that a session is opened anew behind a round.
    """

    name: str
    branch: int = 0
    wrong: int = 0
    reopen: float = 0.0


MIXES = (
    Mix(name="side by side"),
    Mix(name="trees", branch=6, wrong=8),
    Mix(name="chunked prefill", branch=4, wrong=4, reopen=0.02),
)


@dataclass(kw_only=True)
class Pass:
    """Findings of a pass.

    Attributes:
        name: of its mix.
        compared: positions, by the temperature of their texts.
        rounds: of the target.
        accepted: nodes.
        differences: in the order in which they came up.
        interrupted: whether it was ended from the keyboard.
    """

    name: str
    compared: Counter[float]
    rounds: int = 0
    accepted: int = 0
    differences: list[Difference]
    interrupted: bool = False


class Runs:
    """Runs texts through the rounds of a target.

    Args:
        loop: nothing else uses it meanwhile; without a prefix cache, as KV that is found is not computed.
        seed: of trees, and of when sessions are opened anew.
    """

    def __init__(self, loop: RoundLoop, *, seed: int) -> None:
        self._loop, self._random = loop, np.random.default_rng(seed)
        self._sessions = 0

    def alone(self, texts: Sequence[Text]) -> int:
        """Decode the texts one after the other, to the ends that their sampling names; return the rounds."""
        earlier = self._loop.rounds_read
        for text in texts:
            self._open(text)
            text.output = [token for result in self._results() for token in result.tokens]
        return self._loop.rounds_read - earlier

    def beside(self, texts: Sequence[Text], mix: Mix) -> Pass:
        """Run one pass over texts that were decoded alone; an interrupt leaves what was found by then."""
        found = Pass(name=mix.name, compared=Counter(), differences=[])
        earlier, running = self._loop.rounds_read, dict[SessionKey, _Follower]()
        for number, text in enumerate(texts):
            running[self._open(text)] = _Follower(text, number)
        try:
            while running:
                for result in self._turn():
                    if (follower := running.get(result.key)) is not None:
                        self._follow(running, follower, result, mix, found)
        except KeyboardInterrupt:
            found.interrupted = True
        for key in running:
            self._loop.close(key, 1)
        self._settle()
        found.rounds = self._loop.rounds_read - earlier
        return found

    def gaps(self, texts: Sequence[Text], differences: Sequence[Difference]) -> list[float]:
        """Return how far the scores of both tokens of each difference lie apart, computed alone."""
        return [self._gap(texts[difference.text], difference) for difference in differences]

    def _follow(
        self, running: dict[SessionKey, _Follower], follower: _Follower, result: SessionResult, mix: Mix, found: Pass
    ) -> None:
        text, key = follower.text, result.key
        compared, difference = follower.judge(result.tokens)
        found.compared[text.sampling.temperature] += compared
        found.accepted += result.accepted
        if difference is not None:
            found.differences.append(difference)
        is_over = follower.place == len(text.output)
        if is_over or difference is not None or self._random.random() < mix.reopen:
            del running[key]
            self._loop.close(key, 1)
            if not is_over:
                running[self._open(text, follower.place)] = follower
            return
        if result.lost:
            self._loop.resend(key, 1, 0)
        ids, parents, tokens = follower.tree(mix, self._random, vocab_size=self._loop.model.vocab_size)
        if ids:
            as_of = len(text.prompt) + follower.place
            self._loop.grow(Growth.of_session(key, 1, 0, as_of, ids, parents, tokens, [_ACCEPTANCE] * len(ids)))

    def _gap(self, text: Text, difference: Difference) -> float:
        tokens = (difference.alone, difference.chosen)
        scores = np.array([self._logprob(text, difference.place, token) for token in tokens])
        if text.sampling.temperature > 0:
            seed, position = torch.tensor([text.sampling.seed]), torch.tensor([len(text.prompt) + difference.place])
            noise = gumbel_noise_reference(seed, position, torch.tensor([tokens]))[0].numpy()
            scores = scores / text.sampling.temperature + noise
        return float(abs(scores[0] - scores[1]))

    def _logprob(self, text: Text, place: int, token: int) -> float:
        """Return the log probability of a token behind the first ones of a text's output."""
        only = replace(text.sampling, allowed_token_ids=(token,), logprobs=0, max_new_tokens=place + 1)
        self._open(replace(text, sampling=only), place)
        (result,) = [result for result in self._results() if result.tokens]
        assert result.logprobs is not None
        return float(result.logprobs.token_logprobs[0])

    def _open(self, text: Text, place: int = 0) -> SessionKey:
        """Open a session behind the first `place` tokens of the text's output."""
        self._sessions += 1
        key = _INCARNATION, self._sessions
        output = text.output[:place]
        self._loop.open(OpenRequest(key=key, epoch=1, prompt=text.prompt, output=output, sampling=text.sampling))
        return key

    def _results(self) -> list[SessionResult]:
        """Turn until the sessions have ended."""
        found: list[SessionResult] = []
        while not found or found[-1].finish is Finish.NONE:
            found += self._turn()
        self._settle()
        return found

    def _turn(self) -> list[SessionResult]:
        results = self._loop.turn()
        for result in results:
            if result.fault is not None:
                raise RuntimeError(f"session {result.key[1]}: {result.fault}")
        if not results:
            time.sleep(0)
        return results

    def _settle(self) -> None:
        while self._loop.has_work:
            self._loop.turn()


class _Follower:
    """One text on its way; `place` is the index of the next output token."""

    def __init__(self, text: Text, number: int) -> None:
        self.text, self.place, self._number, self._nodes = text, 0, number, 0

    def judge(self, tokens: Sequence[int]) -> tuple[int, Difference | None]:
        """Compare committed tokens with the truth: how many positions were compared, and the one that differs."""
        for offset, token in enumerate(tokens):
            alone = self.text.output[self.place]
            self.place += 1
            if token != alone:
                place = self.place - 1
                return offset + 1, Difference(text=self._number, place=place, chosen=token, alone=alone)
        return len(tokens), None

    def tree(self, mix: Mix, random: np.random.Generator, *, vocab_size: int) -> tuple[list[int], list[int], list[int]]:
        """Return ids, parents and tokens: the truth along one branch, and wrong nodes anywhere."""
        truth = [*self.text.output[self.place : self.place + int(random.integers(0, mix.branch + 1))]]
        order = [True] * len(truth) + [False] * int(random.integers(0, mix.wrong + 1))
        ids, parents, tokens = [0], list[int](), list[int]()
        # What stands behind the root and each true node; wrong nodes are no child of the same parent with that token.
        branch, following = [0], {0: self._next(0)}
        for is_true in random.permutation(order).tolist():
            self._nodes += 1
            if is_true:
                parent, token = branch[-1], truth[len(branch) - 1]
                branch.append(self._nodes)
                following[self._nodes] = self._next(len(branch) - 1)
            else:
                parent, token = int(random.choice(ids)), int(random.integers(0, vocab_size))
                token = (token + 1) % vocab_size if token == following.get(parent) else token
            ids.append(self._nodes)
            parents.append(parent)
            tokens.append(token)
        return ids[1:], parents, tokens

    def _next(self, offset: int) -> int | None:
        place = self.place + offset
        return self.text.output[place] if place < len(self.text.output) else None
