"""Does a position's choice depend on what it is computed beside? A plain run, and its tokens forced through others.

The plain run decodes every text one token at a time. Its tokens are then the truth that further passes are made to
follow: in each step some sessions verify a random tree, in which the truth goes on along one branch and everything else
is wrong, and now and then a session is opened anew, so that its prompt and output are prefilled in chunks beside the
trees of others. Every choice that a pass makes with the true tokens before it is held against the plain run's. Where it
differs, the session is put back on the truth.

How near the two best scores lie at such a position is asked of the model afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.kernels.noise import gumbel_noise_reference
from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import OpenRequest, Outcome, SessionKey, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

Say = Callable[[str], None]

_INCARNATION = 1
# Sessions whose scores are looked at side by side.
_LOOKED_AT = 16
# A step of a verifier that defers everything so often in a row will never end.
_MOST_DEFERRALS = 10_000


@dataclass(kw_only=True, eq=False)
class Text:
    """A prompt, how it is continued, and the plain run's continuation.

    Attributes:
        prompt: token ids.
        sampling: greedy, or with a seed.
        output: of the plain run; empty before it.
    """

    prompt: list[int]
    sampling: SamplingSpec
    output: list[int]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A choice that differs from the plain run's.

    Attributes:
        text: number of the text.
        place: index in its output.
        chosen, plain: token ids.
        gap: between the two best scores there (logits, or log p + noise); NaN where it was not asked for.
    """

    text: int
    place: int
    chosen: int
    plain: int
    gap: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What a pass is made of.

    Attributes:
        name: of the pass.
        share: of the sessions that stand in a step.
        branch: most true tokens of a tree.
        wrong: most wrong nodes of a tree.
        reopen: probability that a session is opened anew before a step, so that all of it is prefilled.
    """

    name: str
    share: float
    branch: int
    wrong: int
    reopen: float


MIXES = (
    Mix(name="trees", share=1.0, branch=4, wrong=4, reopen=0.0),
    Mix(name="mixed batches", share=0.4, branch=8, wrong=24, reopen=0.0),
    Mix(name="chunked prefill", share=0.6, branch=4, wrong=8, reopen=0.01),
)


@dataclass(kw_only=True)
class Pass:
    """What a pass found.

    Attributes:
        name: of its mix.
        compared: positions, by the temperature of their texts.
        steps: of the verifier.
        differences: in the order in which they came up.
        interrupted: whether it was ended from the keyboard.
    """

    name: str
    compared: Counter[float]
    steps: int
    differences: list[Difference]
    interrupted: bool = False


class Teacher:
    """Runs texts through one verifier.

    Args:
        verifier: nothing else uses it meanwhile.
        after_step: called after every step.
        seed: of trees and mixes.
    """

    def __init__(self, verifier: Verifier, after_step: Callable[[], None], *, seed: int) -> None:
        self._verifier, self._after_step = verifier, after_step
        self._random = np.random.default_rng(seed)
        self._sessions = 0
        self.vocab_size = verifier.model.vocab_size

    def plain(self, texts: Sequence[Text], count: int) -> int:
        """Fills in `count` output tokens of each text, one token of every text a step; the steps taken."""
        followers = [_Follower(self, text) for text in texts]
        for follower in followers:
            follower.open()
        steps = 0
        while waiting := [one for one in followers if len(one.text.output) < count]:
            steps += 1
            for follower, result in zip(waiting, self._step([one.root() for one in waiting]), strict=True):
                follower.text.output.extend(result.token_ids)
                follower.place = len(follower.text.output)
        for follower in followers:
            follower.close()
        return steps

    def follow(self, texts: Sequence[Text], mix: Mix) -> Pass:
        """One pass over the plain run's output; what an interrupt leaves of it counts."""
        followers = [_Follower(self, text, number) for number, text in enumerate(texts)]
        found = Pass(name=mix.name, compared=Counter(), steps=0, differences=[])
        for follower in followers:
            follower.open()
        try:
            while waiting := [one for one in followers if one.place < len(one.text.output)]:
                self._follow_step(waiting, mix, found)
        except KeyboardInterrupt:
            found.interrupted = True
        for follower in followers:
            follower.close()
        return found

    def _follow_step(self, waiting: Sequence[_Follower], mix: Mix, found: Pass) -> None:
        chosen = [one for one in waiting if self._random.random() < mix.share] or waiting[:1]
        for follower in chosen:
            if self._random.random() < mix.reopen:
                follower.close()
                follower.open()
        trees = [one.tree(mix, self._random) for one in chosen]
        found.steps += 1
        for follower, result in zip(chosen, self._step(trees), strict=True):
            compared, difference = follower.judge(result)
            found.compared[follower.text.sampling.temperature] += compared
            if difference is not None:
                found.differences.append(difference)

    def gaps(self, texts: Sequence[Text], differences: Sequence[Difference]) -> list[float]:
        """Between the two best scores of each, the position computed alone but for others that are looked at."""
        gaps: list[float] = []
        for first in range(0, len(differences), _LOOKED_AT):
            some = differences[first : first + _LOOKED_AT]
            lookers = [_Follower(self, texts[difference.text]) for difference in some]
            for looker, difference in zip(lookers, some, strict=True):
                looker.place = difference.place
                looker.open(all_scores=True)
            results: dict[int, TreeResult] = {}
            for _ in range(_MOST_DEFERRALS):
                left = [number for number in range(len(some)) if number not in results]
                if not left:
                    break
                answers = self._step([lookers[number].root() for number in left])
                results |= {
                    number: answer
                    for number, answer in zip(left, answers, strict=True)
                    if answer.outcome is Outcome.ACCEPTED
                }
            for number, difference in enumerate(some):
                _, scores = ranked_scores(texts[difference.text], difference.place, results[number])
                gaps.append(float(scores[0] - scores[1]))
            for looker in lookers:
                looker.close()
        return gaps

    def new_key(self) -> SessionKey:
        """Of a session that has never been."""
        self._sessions += 1
        return _INCARNATION, self._sessions

    def open(self, request: OpenRequest) -> None:
        """Opens or reopens a session."""
        self._verifier.open(request)

    def close(self, key: SessionKey, epoch: int) -> None:
        """Closes it."""
        self._verifier.close(key, epoch)

    def _step(self, trees: Sequence[TreeRequest]) -> list[TreeResult]:
        results = self._verifier.step(trees).results
        self._after_step()
        for result in results:
            if result.outcome is Outcome.ERROR:
                raise RuntimeError(f"a session failed: {result.fault}")
        return list(results)


class _Follower:
    """One text on its way through the verifier; `place` is the index of the next output token."""

    def __init__(self, teacher: Teacher, text: Text, number: int = 0) -> None:
        self.text, self.place = text, 0
        self._teacher, self._number = teacher, number
        self._key, self._epoch = teacher.new_key(), 1

    def open(self, *, all_scores: bool = False) -> None:
        """Opens the session at its place, under a key of its own."""
        self._key, self._epoch = self._teacher.new_key(), 1
        self._open(1 << 30 if all_scores else None)

    def close(self) -> None:
        """Closes the session."""
        self._teacher.close(self._key, self._epoch)

    def root(self) -> TreeRequest:
        """A plain step at the end of what the text has."""
        return self._request([], [])

    def tree(self, mix: Mix, random: np.random.Generator) -> TreeRequest:
        """The truth along one branch, and wrong nodes anywhere; a parent stands before its children."""
        true = self.text.output[self.place : self.place + int(random.integers(0, mix.branch + 1))]
        wrong = int(random.integers(0, mix.wrong + 1))
        order = random.permutation([*([True] * len(true)), *([False] * wrong)]).tolist()
        tokens: list[int] = []
        parents: list[int] = []
        branch, taken = [0], {0: {self._next(0)}}
        for is_true in order:
            number = len(tokens) + 1
            if is_true:
                parent, token = branch[-1], self._next(len(branch) - 1)
                branch.append(number)
                taken[number] = {self._next(len(branch) - 1)}
            else:
                parent = int(random.integers(0, number))
                token = int(random.integers(0, self._teacher.vocab_size))
                # Never the true continuation of its parent, nor a second node with the same token.
                while token in taken[parent]:
                    token = (token + 1) % self._teacher.vocab_size
                taken[parent].add(token)
                taken[number] = set()
            tokens.append(token)
            parents.append(parent)
        return self._request(tokens, parents)

    def judge(self, result: TreeResult) -> tuple[int, Difference | None]:
        """Holds what was emitted against the truth: how many positions were compared, and the one that differs."""
        for offset, token in enumerate(result.token_ids):
            plain = self._next(offset)
            if plain < 0:  # past the plain run's end
                self.place += offset
                return offset, None
            if token != plain:
                difference = Difference(text=self._number, place=self.place + offset, chosen=token, plain=plain)
                self.place += offset + 1
                self._epoch += 1
                self._open(None)
                return offset + 1, difference
        self.place += len(result.token_ids)
        return len(result.token_ids), None

    def _next(self, offset: int) -> int:
        place = self.place + offset
        return self.text.output[place] if place < len(self.text.output) else -1

    def _open(self, logprobs: int | None) -> None:
        text = self.text
        self._teacher.open(
            OpenRequest(
                key=self._key,
                epoch=self._epoch,
                prompt=text.prompt,
                output=text.output[: self.place],
                sampling=replace(text.sampling, logprobs=logprobs),
            )
        )

    def _request(self, tokens: list[int], parents: list[int]) -> TreeRequest:
        length = len(self.text.prompt) + self.place
        return TreeRequest(key=self._key, epoch=self._epoch, length=length, tokens=tokens, parents=parents)


def ranked_scores(text: Text, place: int, result: TreeResult) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what the choice is the largest of, best first; log probabilities differ as logits do."""
    logprobs = result.logprobs
    assert logprobs is not None
    ids, scores = logprobs.top_token_ids[0], logprobs.top_logprobs[0].astype(np.float64)
    if text.sampling.temperature > 0:
        seed = torch.tensor([text.sampling.seed], dtype=torch.int64)
        position = torch.tensor([len(text.prompt) + place], dtype=torch.int64)
        noise = gumbel_noise_reference(seed, position, torch.from_numpy(ids)[None])[0].numpy()
        scores = scores / text.sampling.temperature + noise
    order = np.argsort(-scores)
    return ids[order], scores[order]
