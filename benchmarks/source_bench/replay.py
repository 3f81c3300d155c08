"""Texts that a target has written, replayed on virtual time: which source would have drafted them how fast.

The coordinator's own scheduler, loops and mirrors decide; n-grams are grown by the worker's own sessions, estimates and
trie; the times of steps are given. So two mixtures are compared at equal step times, the same on every machine.

A text's first token is its number, beyond the vocabulary, by which target and model draft know it. The model draft's
guesses below the true path are what the draft checkpoint guesses there; elsewhere they are wrong anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from benchmarks.simulation import virtual_time
from benchmarks.simulation.path_model import Guess, PathModel, mix
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.tree_grower import GrownRows
from benchmarks.simulation.virtual_workers import VirtualDraft, VirtualTarget

from outrider.coordinator import clock
from outrider.coordinator.firing import Latency
from outrider.coordinator.messages import (
    Commits,
    GenerationRequest,
    GrowthBatch,
    SessionOpening,
    SpeculationMode,
    TokenDelta,
)
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.text_stream import TextStream
from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter, NgramDrafterConfig
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, Proposals, TextTails, propose
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.drafters import Drafters, shared_limits
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.errors import OutriderError, Superseded, WorkerUnavailable
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec

NUMBERS = 1 << 20
"""The first token of text n is this plus n."""
MIXTURES = ("off", "model", "ngram", "model+ngram", "model/ngram")
_MOST_TOKENS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class ReplayText:
    """What was asked and written.

    Attributes:
        prompt: token ids.
        output: token ids.
        guesses: [len(output)] the draft's children at each place of the output, best first: (token, chance).
    """

    prompt: Sequence[int]
    output: Sequence[int]
    guesses: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Times, sizes and n-grams.

    Attributes:
        sessions: texts at a time.
        target_step_ms, target_row_us: of a target's step, and of each row of it.
        draft_step_ms, draft_width: of a model draft's step: its time, and the nodes that it expands.
        match_ms: from a commit's arrival to its n-grams.
        insert_us: of a token, until matches know it; all sessions' tokens in turn.
        rtt_ms: round trip to a draft.
        max_nodes, max_depth, max_live_nodes: of trees.
        ngram: how proposals are made of the trie.
        trie_depth: of the trie.
    """

    sessions: int = 1
    target_step_ms: float = 8.0
    target_row_us: float = 10.0
    draft_step_ms: float = 0.75
    draft_width: int = 8
    match_ms: float = 0.1
    insert_us: float = 10.0
    rtt_ms: float = 0.5
    max_nodes: int = 24
    max_depth: int = 8
    max_live_nodes: int = 128
    ngram: ProposalConfig = field(default_factory=ProposalConfig)
    trie_depth: int = 18

    def of_simulation(self) -> Settings:
        """The same for virtual workers."""
        return Settings(
            sessions=self.sessions,
            target_step_ms=self.target_step_ms,
            target_row_us=self.target_row_us,
            draft_step_ms=self.draft_step_ms,
            draft_width=self.draft_width * self.sessions,
            draft_rtt_ms=self.rtt_ms,
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            max_live_nodes=self.max_live_nodes,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayFigures:
    """One pass over the texts.

    Attributes:
        seconds: of virtual time.
        tokens: that were written.
        verifications: of one session each.
        accepted: nodes.
        rows: of all steps.
        sources: by word: drafted, submitted, accepted.
        outputs: of each text.
    """

    seconds: float
    tokens: int
    verifications: int
    accepted: int
    rows: int
    sources: dict[str, tuple[int, int, int]]
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """All sessions together."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification, the target's own one included."""
        return 1 + self.accepted / self.verifications


class TextModel(PathModel):
    """A target that writes the texts, and a draft that guesses what the checkpoint did."""

    def __init__(self, texts: Sequence[ReplayText]) -> None:
        super().__init__(seed=0, rank_rates=(0.5, 0.2, 0.1, 0.1), spread=0.0)
        self._texts = texts

    def token(self, session: int, position: int) -> int:
        """What the target writes there."""
        text = self._texts[session - NUMBERS]
        at = position - 1 - len(text.prompt)
        return text.output[at] if at < len(text.output) else 0

    def guesses(self, session: int, position: int, path_hash: int | None) -> list[Guess]:
        """The draft's children, best first; a wrong path goes on as other texts do, and is wrong."""
        text = self._texts[session - NUMBERS]
        at = position - 1 - len(text.prompt)
        if path_hash is not None:
            at = path_hash % len(text.output)
        if at >= len(text.output):
            return []
        return [
            Guess(token, chance, None if path_hash is None and token == text.output[at] else mix(path_hash or at, rank))
            for rank, (token, chance) in enumerate(text.guesses[at], start=1)
        ]


class _ReplayTrie(SharedTrie):
    """The trie without its thread: each token is in it `insert_us` after it came."""

    def __init__(self, settings: ReplaySettings) -> None:
        super().__init__(NgramTrie(capacity=3_000_000, max_trie_depth=settings.trie_depth), settings.ngram)
        self._token_ns = settings.insert_us * 1e3
        self._due: deque[tuple[float, Sequence[int], int]] = deque()
        self._free_at_ns = 0.0

    def add(self, tokens: Sequence[int], *, start: int = 0) -> bool:
        """Queue it for its time."""
        self._free_at_ns = max(self._free_at_ns, clock.now_ns()) + self._token_ns * (len(tokens) - start)
        self._due.append((self._free_at_ns, tokens, start))
        return True

    def propose(self, texts: TextTails) -> Proposals:
        """Return what may follow by what is in the trie at this time."""
        while self._due and self._due[0][0] <= clock.now_ns():
            _, tokens, start = self._due.popleft()
            self.trie.insert((tokens, start))
        return propose(self.trie, texts, self.config)


class _NgramGrower:
    """The worker's own n-gram sessions where a virtual draft has its trees."""

    def __init__(self, settings: ReplaySettings) -> None:
        # Sessions that end may be closed after the next ones are opened.
        config = NgramDrafterConfig(
            vocab_size=2 * NUMBERS, max_model_len=_MOST_TOKENS, max_sessions=2 * settings.sessions
        )
        self.drafters = Drafters(None, NgramDrafter(_ReplayTrie(settings), config))

    def commit(self, session_id: int, *, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        with suppress(Superseded):
            self.drafters.commit((0, session_id), epoch, position, token_ids)

    def close(self, session_id: int, *, epoch: int) -> None:
        self.drafters.close((0, session_id), epoch)

    def step(self) -> dict[int, GrownRows]:
        grown: dict[int, GrownRows] = {}
        for growth in self.drafters.advance():
            for _, own in growth.by_owner():
                rows = list(zip(own.node_ids, own.parents, own.tokens, own.acceptance, strict=True))
                (epoch,), (as_of,), (complete,) = own.epochs, own.as_of, own.complete
                grown[own.session_ids[0]] = GrownRows(epoch=epoch, as_of=as_of, rows=rows, complete=complete)
        return grown


class _NgramDraft(VirtualDraft):
    """A virtual draft whose trees are the trie's."""

    def __init__(self, settings: ReplaySettings, *, is_alone: bool, on_growth: Callable[[GrowthBatch], None]) -> None:
        of_simulation = replace(settings.of_simulation(), draft_step_ms=settings.match_ms)
        super().__init__(of_simulation, PathModel(seed=0, rank_rates=(0.5,), spread=0.0), on_growth=on_growth)
        self._own = self._grower = _NgramGrower(settings)  # pyright: ignore[reportAttributeAccessIssue]
        self._is_alone = is_alone

    def open_session(self, opening: SessionOpening) -> None:
        """Grows this session's tree from now on."""
        start = SessionStart(
            key=(0, opening.session_id),
            # So that growth is split between sessions.
            owner=opening,
            epoch=opening.epoch,
            prompt=opening.prompt,
            output=opening.output,
            sampling=opening.sampling,
            limits=GrowthLimits(max_live_nodes=opening.max_live_nodes, max_depth=opening.max_depth),
            is_shared=not self._is_alone,
        )
        self._send(lambda: self._own.drafters.open(start))


class _BothDrafts:
    """One worker that grows by a model and by n-grams, as its coordinator sees it."""

    def __init__(self, model: VirtualDraft, ngram: _NgramDraft) -> None:
        self._model, self._ngram = model, ngram

    @property
    def step_latency(self) -> Latency:
        return self._model.step_latency

    def open_session(self, opening: SessionOpening) -> None:
        of_ngram, of_model = shared_limits(opening.max_live_nodes)
        self._ngram.open_session(replace(opening, max_live_nodes=of_ngram))
        self._model.open_session(replace(opening, max_live_nodes=of_model))

    def commit(self, commits: Commits) -> None:
        self._ngram.commit(commits)
        self._model.commit(commits)

    def close_session(self, session_id: int, epoch: int) -> None:
        self._ngram.close_session(session_id, epoch)
        self._model.close_session(session_id, epoch)


class Replay:
    """A scheduler, a target that writes the texts, and a mixture's drafts; made on the loop that runs it."""

    def __init__(self, texts: Sequence[ReplayText], mixture: str, settings: ReplaySettings) -> None:
        self._texts, self._mixture, self._settings = texts, mixture, settings
        own = settings.of_simulation()
        self.scheduler = Scheduler(own.coordinator_config())
        self._model = TextModel(texts)
        self._target = VirtualTarget(own, self._model)
        self._limits = own.worker_limits()
        self.scheduler.add_target("target", self._target, self._limits)  # pyright: ignore[reportArgumentType]
        if mixture == "model+ngram":
            both = _BothDrafts(self._model_draft("both", step=2), self._ngram_draft("both", is_alone=False))
            self._add("both", both, [GrowthSource.MODEL, GrowthSource.NGRAM])
            return
        for word in mixture.split("/"):
            if word == "model":
                self._add(word, self._model_draft(word), [GrowthSource.MODEL])
            elif word == "ngram":
                self._add(word, self._ngram_draft(word, is_alone=True), [GrowthSource.NGRAM])

    def _add(self, worker_id: str, link: Any, sources: Sequence[GrowthSource]) -> None:
        self.scheduler.add_draft(worker_id, link, self._limits, sources=list(map(int, sources)))

    def _model_draft(self, worker_id: str, *, step: int = 1) -> VirtualDraft:
        def take(growth: GrowthBatch) -> None:
            numbered = replace(growth, node_ids=step * growth.node_ids, parents=step * growth.parents)
            self.scheduler.take_growth(worker_id, numbered)

        return VirtualDraft(self._settings.of_simulation(), self._model, on_growth=take)

    def _ngram_draft(self, worker_id: str, *, is_alone: bool) -> _NgramDraft:
        def take(growth: GrowthBatch) -> None:
            sources = np.full(len(growth.node_ids), int(GrowthSource.NGRAM))
            self.scheduler.take_growth(worker_id, replace(growth, sources=sources))

        return _NgramDraft(self._settings, is_alone=is_alone, on_growth=take)

    async def run(self) -> ReplayFigures:
        """All texts once, so many at a time."""
        before, began_ns = self._counts(), clock.now_ns()
        outputs: dict[int, list[int]] = {}
        waiting = iter(range(len(self._texts)))

        async def session() -> None:
            for number in waiting:
                outputs[number] = await self._write(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.sessions):
                group.create_task(session())
        seconds = (clock.now_ns() - began_ns) / 1e9
        after = self._counts()
        tokens, verifications, accepted, rows = (end - start for start, end in zip(before[0], after[0], strict=True))
        sources = {
            word: tuple(end - start for start, end in zip(before[1].get(word, (0, 0, 0)), counts, strict=True))
            for word, counts in after[1].items()
        }
        return ReplayFigures(
            seconds=seconds,
            tokens=tokens,
            verifications=verifications,
            accepted=accepted,
            rows=rows,
            sources=sources,  # pyright: ignore[reportArgumentType]
            outputs=[outputs[number] for number in range(len(self._texts))],
        )

    def _counts(self) -> tuple[tuple[int, ...], dict[str, tuple[int, int, int]]]:
        totals = self.scheduler.totals
        sources = {
            own.source.name.lower(): (own.drafted, own.submitted, own.accepted)
            for own in self.scheduler.source_counts()
        }
        own = (totals.emitted_tokens, totals.verify_steps, totals.accepted_tokens, self._target.rows)
        return own, sources

    async def _write(self, number: int) -> list[int]:
        text = self._texts[number]
        request = GenerationRequest(
            request_id=f"text-{number}",
            prompt_token_ids=(NUMBERS + number, *text.prompt),
            sampling=SamplingSpec(max_new_tokens=len(text.output)),
            mode=SpeculationMode.OFF if self._mixture == "off" else SpeculationMode.ASYNC,
            max_nodes=self._settings.max_nodes,
            max_depth=self._settings.max_depth,
        )
        generation = self.scheduler.submit(request, [TextStream(None)])
        written: list[int] = []
        async with aclosing(generation):
            async for event in generation:
                if isinstance(event, TokenDelta):
                    written += event.token_ids
        return written

    async def stop(self) -> None:
        """Ends the loops."""
        with suppress(OutriderError):
            await self.scheduler.stop(WorkerUnavailable("the replay is over"))


def replay(texts: Sequence[ReplayText], mixture: str, settings: ReplaySettings, *, passes: int) -> list[ReplayFigures]:
    """Passes one after the other, from an empty trie on."""

    async def main() -> list[ReplayFigures]:
        own = Replay(texts, mixture, settings)
        try:
            return [await own.run() for _ in range(passes)]
        finally:
            await own.stop()

    return virtual_time.run(main())
