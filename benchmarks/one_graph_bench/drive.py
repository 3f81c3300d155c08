"""Sessions of one verifier, driven round after round, each in its contender's way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.sampling import SamplingSpec
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.resident_growth import DraftLimits, GrownNodes
from outrider.target_worker.sessions import OpenRequest, Outcome, SessionKey, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

_WARM_ROUNDS = 3
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What some rounds gave.

    Attributes:
        rounds: of all sessions together.
        seconds: for all of them.
        drafting_seconds: of these, for trees.
        tokens: emitted.
        drafted, accepted: nodes that were verified, and those of them that were accepted.
        sessions: in each round.
    """

    rounds: int
    seconds: float
    drafting_seconds: float
    tokens: int
    drafted: int
    accepted: int
    sessions: int

    @property
    def tokens_per_second(self) -> float:
        """Of all sessions."""
        return self.tokens / self.seconds

    @property
    def free_tokens_per_second(self) -> float:
        """The same, had drafting taken no time."""
        return self.tokens / (self.seconds - self.drafting_seconds)

    @property
    def round_ms(self) -> float:
        """Of one round."""
        return 1e3 * self.seconds / self.rounds

    @property
    def tokens_per_round(self) -> float:
        """Of a session."""
        return self.tokens / self.rounds / self.sessions


class Sessions:
    """Some sessions that are always stepped together.

    Args:
        verifier: that has them.
        prompts: token ids, one a session.
        nodes: of a tree that is sent; 0 sends none.
        resident: whether the worker's own candidates are asked for.
        draft: that grows the trees.
        temperature: at which all of them sample, each with a seed of its own.
    """

    def __init__(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        *,
        nodes: int = 0,
        resident: bool = False,
        draft: ResidentDraft | None = None,
        temperature: float = 0.0,
    ) -> None:
        self._verifier, self._nodes, self._resident, self._draft = verifier, nodes, resident, draft
        self._lengths = {(1, next(_numbers)): len(prompt) for prompt in prompts}
        self._growth: dict[SessionKey, GrownNodes | None] = dict.fromkeys(self._lengths)
        for seed, (key, prompt) in enumerate(zip(self._lengths, prompts, strict=True)):
            sampling = SamplingSpec(temperature=temperature, seed=seed, max_new_tokens=1 << 20)
            verifier.open(
                OpenRequest(key=key, epoch=1, prompt=list(prompt), output=(), sampling=sampling, draft=DraftLimits())
            )

    def requests(self) -> list[TreeRequest]:
        """The next round's."""
        return [self._request(key) for key in self._lengths]

    def take(self, results: Sequence[TreeResult]) -> None:
        """Follows a round."""
        for key, result in zip(self._lengths, results, strict=True):
            self._take(key, result)

    def warm_up(self) -> None:
        """Prefills, and runs the first rounds.

        Whoever has its first token rests until all have: prefill beside sessions that run is slow on purpose, and they
        would be at their end before the last of many prompts is done.
        """
        waiting = list(self._lengths)
        while waiting:
            results = self._verifier.step([self._request(key) for key in waiting]).results
            for key, result in zip(waiting, results, strict=True):
                self._take(key, result)
            waiting = [
                key for key, result in zip(waiting, results, strict=True) if result.outcome is not Outcome.ACCEPTED
            ]
        for _ in range(_WARM_ROUNDS):
            self.take(self._verifier.step(self.requests()).results)

    def run(self, *, rounds: int) -> Pace:
        """So many rounds, timed."""
        tokens = drafted = accepted = 0
        clock = _DraftingClock(self._draft)
        began = time.perf_counter()
        for _ in range(rounds):
            requests = self.requests()
            results = self._verifier.step(requests).results
            self.take(results)
            tokens += sum(len(result.token_ids) for result in results)
            drafted += sum(
                result.drafted + len(request.tokens) for request, result in zip(requests, results, strict=True)
            )
            accepted += sum(len(result.accepted_nodes) for result in results)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return Pace(
            rounds=rounds,
            seconds=seconds,
            drafting_seconds=clock.stop(),
            tokens=tokens,
            drafted=drafted,
            accepted=accepted,
            sessions=len(self._lengths),
        )

    def close(self) -> None:
        """Ends the sessions."""
        for key in self._lengths:
            self._verifier.close(key, 1)

    def _request(self, key: SessionKey) -> TreeRequest:
        tokens, parents = self._tree(key)
        return TreeRequest(
            key=key, epoch=1, length=self._lengths[key], tokens=tokens, parents=parents, resident=self._resident
        )

    def _take(self, key: SessionKey, result: TreeResult) -> None:
        if result.outcome is Outcome.ERROR:
            raise RuntimeError(f"session {key[1]}: {result.fault}")
        self._lengths[key] += len(result.token_ids)
        self._growth[key] = result.growth

    def _tree(self, key: SessionKey) -> tuple[Sequence[int], Sequence[int]]:
        """The best nodes of what was grown last, as a coordinator would send them."""
        growth = self._growth[key]
        return ((), ()) if growth is None or not self._nodes else best_nodes(growth, most=self._nodes)


def best_nodes(growth: GrownNodes, *, most: int) -> tuple[list[int], list[int]]:
    """The tokens and parents (node numbers) of the nodes of highest path value."""
    values: dict[int, float] = {0: 1.0}
    for node, parent, acceptance in zip(growth.node_ids, growth.parents, growth.acceptance, strict=True):
        values[node] = values[parent] * acceptance
    ranked = sorted(growth.node_ids, key=lambda node: -values[node])[:most]
    kept = [place for place, node in enumerate(growth.node_ids) if node in set(ranked)]
    numbers = {0: 0} | {growth.node_ids[place]: number for number, place in enumerate(kept, start=1)}
    return [growth.tokens[place] for place in kept], [numbers[growth.parents[place]] for place in kept]


class _DraftingClock:
    """How long a resident draft takes behind steps, where there is one that grows trees."""

    def __init__(self, draft: ResidentDraft | None) -> None:
        self._draft, self._seconds = draft, 0.0
        if draft is None or not draft.grows:
            self._draft = None
            return
        follow = draft.follow

        def timed(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return follow(*arguments)  # type: ignore[arg-type]
            finally:
                self._seconds += time.perf_counter() - began

        setattr(draft, "follow", timed)  # noqa: B010 it is a method, for pyright

    def stop(self) -> float:
        """The seconds; the draft is left as it was."""
        if self._draft is not None:
            del self._draft.__dict__["follow"]
        return self._seconds
