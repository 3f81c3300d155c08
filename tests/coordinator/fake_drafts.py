"""A draft of the fake model, which guesses."""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.coordinator.fake_workers import VOCABULARY, Growth, Node, batch_of, next_token, tokens_of

from outrider.coordinator.sessions.messages import GrowthBatch
from outrider.coordinator.workers.worker_link import Latency
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import common_pb2, draft_pb2
from outrider.wire import split_by_counts


@dataclass
class DraftSession:
    """A session as the fake draft has it; of each source nodes by id, with their parents."""

    epoch: int
    tokens: list[int]
    sources: list[GrowthSource]
    nodes: defaultdict[GrowthSource, dict[int, tuple[int, Node]]] = field(default_factory=lambda: defaultdict(dict))


class FakeDraft:
    """Grows guesses of which a given share is right; growth reaches the scheduler after a random delay.

    Each source grows a tree of its own, and all begin with the same ids.
    """

    def __init__(self, *, accuracy: float, delay_s: float, seed: int = 0, sources: Sequence[GrowthSource] = ()) -> None:
        self.sources = sources or [GrowthSource.MODEL]
        self.step_latency = Latency()
        self.step_latency.observe(1e6)
        self.accuracy = accuracy
        self.delay_s = delay_s
        self.random = random.Random(seed)
        self.sessions: dict[int, DraftSession] = {}
        self.closed: list[tuple[int, int]] = []
        self.asked_again: list[tuple[int, int]] = []
        self.commits = 0
        self.deliver: Callable[[GrowthBatch], None] = lambda growth: None
        self._epochs: dict[int, int] = {}
        self._ids = Counter[GrowthSource]()
        self._tasks: set[asyncio.Task[None]] = set()

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        assert opening.epoch > self._epochs.get(opening.session_id, 0)
        self._epochs[opening.session_id] = opening.epoch
        sources = [source for source in self.sources if not opening.sources or source in opening.sources]
        # It has been chosen for something.
        assert sources
        self.sessions[opening.session_id] = DraftSession(opening.epoch, tokens_of(opening), sources)
        self._later(self._grow(opening.session_id))

    def commit(self, commits: draft_pb2.CommitBatch) -> None:
        self.commits += 1
        columns = (commits.session_ids, commits.epochs, commits.positions, split_by_counts(commits.token_counts))
        for session_id, epoch, position, span in zip(*columns, strict=True):
            # One that was closed with this round hears of it once more.
            if (session := self.sessions.get(session_id)) is not None:
                assert (session.epoch, len(session.tokens)) == (epoch, position)
                session.tokens.extend(commits.tokens[span])
                self._later(self._grow(session_id))

    def ask_again(self, session_id: int, epoch: int) -> None:
        assert self.sessions[session_id].epoch == epoch
        self.asked_again.append((session_id, epoch))
        self._later(self._send_again(session_id))

    def close_session(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        self.sessions.pop(session_id, None)

    def _later(self, work: Iterator[list[Growth]]) -> None:
        """Both what is grown now and what is sent again leave after a moment."""
        growths = next(work)

        async def send(growths: list[Growth]) -> None:
            await asyncio.sleep(self.random.random() * self.delay_s)
            with contextlib.suppress(StopIteration):
                growths = next(work)
            for growth in growths:
                self.deliver(batch_of(growth))

        task = asyncio.ensure_future(send(growths))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _grow(self, session_id: int) -> Iterator[list[Growth]]:
        session = self.sessions[session_id]
        grown = {source: self._chain(session, source) for source in session.sources}
        as_of = len(session.tokens)
        yield [
            self._growth(session_id, session.epoch, source, as_of, [(own, *rest) for own, rest in nodes.items()])
            for source, nodes in grown.items()
        ]
        for source, nodes in grown.items():
            session.nodes[source] |= nodes

    def _chain(self, session: DraftSession, source: GrowthSource) -> dict[int, tuple[int, Node]]:
        """Guesses below the root, and beside each a worse one."""
        tokens, as_of = list(session.tokens), len(session.tokens)
        parent, path, nodes = 0, tuple[int, ...](), dict[int, tuple[int, Node]]()
        for _ in range(6):
            right = next_token(tokens)
            guess = right if self.random.random() < self.accuracy else (right + 1) % VOCABULARY
            above = parent
            for token in (guess, (guess + 5) % VOCABULARY):
                self._ids[source] += 1
                node_id = self._ids[source]
                nodes[node_id] = (above, Node(as_of, (*path, token), 0.7 if token == guess else 0.1, source))
                parent = node_id if token == guess else parent
            path = (*path, guess)
            tokens.append(guess)
        return nodes

    def _send_again(self, session_id: int) -> Iterator[list[Growth]]:
        """The live trees, as they are when they leave."""
        session, found = self.sessions[session_id], list[Growth]()
        yield found
        for source in session.sources:
            live = {
                own: (above, node._replace(as_of=len(session.tokens), path=below))
                for own, (above, node) in session.nodes[source].items()
                if (below := node.below(session.tokens))
            }
            rows = [(own, above if above in live else 0, node) for own, (above, node) in live.items()]
            found.append(self._growth(session_id, session.epoch, source, len(session.tokens), rows, again=True))
        yield found

    def _growth(
        self,
        session_id: int,
        epoch: int,
        source: GrowthSource,
        as_of: int,
        nodes: Sequence[tuple[int, int, Node]],
        *,
        again: bool = False,
    ) -> Growth:
        return Growth(
            session_id=session_id,
            epoch=epoch,
            as_of=as_of,
            node_ids=[own for own, _, _ in nodes],
            parents=[above for _, above, _ in nodes],
            tokens=[node.path[-1] for _, _, node in nodes],
            acceptance=[node.acceptance for _, _, node in nodes],
            complete=not again,
            again=again,
            source=source,
        )
