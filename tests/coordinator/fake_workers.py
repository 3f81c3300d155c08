"""A fake model, messages of its workers, and a target of it that runs rounds by itself."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np

from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import (
    FaultKind,
    GenerationRequest,
    GrowthBatch,
    Outcome,
    RoundResults,
    SessionFault,
)
from outrider.coordinator.sessions.session import Session
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.growth_source import GrowthSource
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_from_bytes, uints_from_bytes

VOCABULARY = 50
PLACES = 4
ENDLESS = SamplingSpec(max_new_tokens=100_000)
_CODES = {
    FaultKind.LOST: grpc.StatusCode.NOT_FOUND,
    FaultKind.NO_ROOM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultKind.REFUSED: grpc.StatusCode.INVALID_ARGUMENT,
    FaultKind.REPLACED: grpc.StatusCode.ABORTED,
}


def next_token(token_ids: Sequence[int]) -> int:
    """The fake target's choice: any fixed function of the prefix will do."""
    return (token_ids[-1] * 7 + len(token_ids) * 3 + token_ids[0]) % VOCABULARY


def make_request(number: int = 1, *, tokens: int = 40, **changes: Any) -> GenerationRequest:
    """A request whose prompt no other number has."""
    settings = {
        "request_id": f"request-{number}",
        "prompt_token_ids": (number, 2, 3),
        "sampling": SamplingSpec(max_new_tokens=tokens),
    }
    return GenerationRequest(**settings | changes)


def expected_output(request: GenerationRequest) -> list[int]:
    """The tokens that the fake target gives a choice."""
    token_ids, sampling, begin = list(request.prompt_token_ids), request.sampling, len(request.prompt_token_ids)
    while len(token_ids) - begin < sampling.max_new_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in sampling.stop_token_ids:
            break
    return token_ids[begin:]


async def tokens_read(generation: Generation) -> list[int]:
    """All that a client still reads."""
    return [token async for event in generation for token in getattr(event, "token_ids", ())]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """New nodes of one session's tree from one drafter of a draft worker: a part of a `GrowthBatch`."""

    session_id: int
    epoch: int
    as_of: int
    node_ids: Sequence[int]
    parents: Sequence[int]
    tokens: Sequence[int]
    acceptance: Sequence[float]
    distributions: Sequence[DraftDistribution | None] = ()
    complete: bool = False
    source: GrowthSource = GrowthSource.MODEL
    forgot: bool = False
    again: bool = False


def growth_of(session: Session, tokens: Sequence[int], *, draft: str = "draft", first: int = 1, **more: Any) -> Growth:
    """A chain from the session's root."""
    ids = list(range(first, first + len(tokens)))
    columns = {
        "session_id": session.session_id,
        "epoch": session.draft_epochs[draft],
        "as_of": len(session.token_ids),
        "node_ids": ids,
        "parents": [0, *ids][: len(ids)],
        "tokens": tokens,
        "acceptance": [0.5] * len(ids),
    }
    return Growth(**columns | more)


def batch_of(*growths: Growth) -> GrowthBatch:
    """Growth of several sessions, by one source, as one message."""
    (source,) = {growth.source for growth in growths}

    def column(name: str) -> list[Any]:
        return [value for growth in growths for value in getattr(growth, name)]

    return GrowthBatch(
        session_ids=[growth.session_id for growth in growths],
        epochs=[growth.epoch for growth in growths],
        as_of=[growth.as_of for growth in growths],
        node_counts=[len(growth.node_ids) for growth in growths],
        complete=[growth.complete for growth in growths],
        forgot=[growth.forgot for growth in growths],
        again=[growth.again for growth in growths],
        node_ids=np.array(column("node_ids"), np.uint32),
        parents=np.array(column("parents"), np.uint32),
        tokens=np.array(column("tokens"), np.uint32),
        acceptance=np.array(column("acceptance"), np.float32),
        distributions=[q for growth in growths for q in growth.distributions or [None] * len(growth.node_ids)],
        source=source,
    )


def results_of(
    outcomes: Sequence[Outcome], *, faults: Sequence[tuple[int, int, SessionFault]] = (), number: int = 0, **report: int
) -> RoundResults:
    """Results of several sessions as one message; faults as (session id, epoch, why)."""
    message = target_pb2.RoundResults(
        session_ids=[outcome.session_id for outcome in outcomes],
        epochs=[outcome.epoch for outcome in outcomes],
        token_counts=[len(outcome.token_ids) for outcome in outcomes],
        tokens=[token for outcome in outcomes for token in outcome.token_ids],
        accepted_counts=[len(outcome.sources) for outcome in outcomes],
        selected_counts=[outcome.selected for outcome in outcomes],
        selected_by_source=[count for outcome in outcomes for count in outcome.selected_by_source],
        grown_by_source=[count for outcome in outcomes for count in outcome.grown_by_source],
        accepted_sources=[sources for outcome in outcomes for sources in outcome.sources],
        finishes=[target_pb2.Finish.Name(2 * outcome.is_over) for outcome in outcomes],
        cached_tokens=[outcome.cached_tokens for outcome in outcomes],
        lost=[outcome.lost for outcome in outcomes],
        tree_ends=[outcome.tree_end for outcome in outcomes],
        errors=[
            common_pb2.SessionError(session_id=session_id, epoch=epoch, code=_CODES[kind].value[0], message=message)
            for session_id, epoch, (kind, message) in faults
        ],
        report=common_pb2.StepReport(**report),
    )
    return RoundResults(message, number)


def tokens_of(opening: common_pb2.SessionOpen) -> list[int]:
    """Prompt and output."""
    return uints_from_bytes(opening.prompt + opening.output).tolist()


def nodes_of(growth: target_pb2.RelayedGrowth) -> tuple[list[int], list[int], list[int]]:
    """Ids, parents and tokens."""
    ids, parents, tokens = map(uints_from_bytes, (growth.node_ids, growth.parents, growth.tokens))
    return ids.tolist(), parents.tolist(), tokens.tolist()


class Everything(set[int]):
    """All sessions."""

    def __contains__(self, item: object) -> bool:
        return True


class Node(NamedTuple):
    """A candidate: the tokens from index `as_of` on."""

    as_of: int
    path: tuple[int, ...]
    acceptance: float
    source: int

    def below(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the part of the path that is not committed; empty if the path is dead."""
        committed = len(tokens) - self.as_of
        return self.path[committed:] if self.path[:committed] == tuple(tokens[self.as_of :]) else ()


@dataclass
class Place:
    """A draft's place in a session.

    Attributes:
        nodes: by the draft's ids.
        is_taken: a draft has it.
        is_lost: growth is missing, and what comes is dropped until the tree is sent again.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    is_taken: bool = False
    is_lost: bool = False


class Tree(dict[tuple[int, ...], int]):
    """Paths below the root, and which sources have proposed them (bit sets)."""


@dataclass
class TargetSession:
    """A session as the fake target has it."""

    opening: common_pb2.SessionOpen
    allow: int = 1 << 31
    is_alone: bool = False
    complete_at: int = 0
    waits_since: float | None = None
    places: list[Place] = field(default_factory=lambda: [Place() for _ in range(PLACES)])

    def __post_init__(self) -> None:
        self.tokens, self.sampling = tokens_of(self.opening), SamplingSpec.from_proto(self.opening.sampling)
        self.prompt_length = len(uints_from_bytes(self.opening.prompt))

    def tree(self) -> Tree:
        """The nodes to verify."""
        found = Tree()
        for place in self.places:
            for node in place.nodes.values():
                if path := node.below(self.tokens):
                    found[path] = found.get(path, 0) | 1 << node.source
        limits = self.opening.limits
        within = {path: bits for path, bits in found.items() if len(path) <= limits.max_depth}
        return Tree(list(within.items())[: limits.max_nodes])

    @property
    def lost(self) -> int:
        return sum(place.is_lost << number for number, place in enumerate(self.places))


Trees = dict[int, tuple[TargetSession, Tree]]
"""By session id, who takes part in a round, and with what tree."""


class FakeTarget:
    """Runs rounds by itself, verifies with `next_token` along the trees that have come, and tells what it has found.

    Attributes:
        sessions: that are open, by id.
        rounds: by round, for each session what it committed there.
        changes: (session id, place, what has become of it), all that were told.
        grown: what was relayed.
        told: both, and opens, as they came: "open 1", "TAKEN 1.0", "grow 1.0 2" (session, place, nodes).
        bounds: (session id, allow, alone).
        closed: (session id, epoch).
        runs: cleared, it begins no round.
        fail_sessions: ids of sessions that are closed with the next round, with a fault of `fault_kind`.
        loses_growth: growth is lost from now on, until it is sent again.
        is_lost: it is gone when its round ends.
        on_results: gets what a round has given.
        on_lost: called once, with the reason.
    """

    def __init__(self, *, step_s: float = 0.0001) -> None:
        self.step_s = step_s
        self.sessions: dict[int, TargetSession] = {}
        self.rounds: list[dict[int, list[int]]] = []
        self.changes: list[tuple[int, int, int]] = []
        self.grown: list[target_pb2.RelayedGrowth] = []
        self.told: list[str] = []
        self.bounds: list[tuple[int, int, bool]] = []
        self.closed: list[tuple[int, int]] = []
        self.runs = asyncio.Event()
        self.runs.set()
        self.fail_sessions: set[int] = set()
        self.fault_kind = FaultKind.LOST
        self.loses_growth = False
        self.is_lost = False
        self.errors: list[BaseException] = []
        self.on_results: Callable[[RoundResults], None] = lambda results: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._epochs: dict[int, int] = {}
        self._turns_alone = False
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------- commands

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        assert opening.epoch > self._epochs.get(opening.session_id, 0)
        self._epochs[opening.session_id] = opening.epoch
        self.sessions[opening.session_id] = TargetSession(opening)
        self.told.append(f"open {opening.session_id}")
        self.wake()

    def change_place(self, session_id: int, epoch: int, place: int, change: int) -> None:
        assert place < PLACES
        self.changes.append((session_id, place, change))
        name = target_pb2.PlaceChange.Name(target_pb2.PlaceChange.ValueType(change)).removeprefix("PLACE_CHANGE_")
        self.told.append(f"{name} {session_id}.{place}")
        if (session := self._session(session_id, epoch)) is None:
            return
        own = session.places[place]
        if change == target_pb2.PLACE_CHANGE_TAKEN:
            session.places[place] = Place(is_taken=True)
        elif change == target_pb2.PLACE_CHANGE_LEFT:
            assert own.is_taken
            own.is_taken = False
        else:
            assert change == target_pb2.PLACE_CHANGE_RESENT
            assert own.is_taken
            own.is_lost = False

    def grow(self, growth: target_pb2.RelayedGrowth) -> None:
        self.grown.append(growth)
        begin, acceptance = 0, floats_from_bytes(growth.acceptance)
        ids, parents, tokens = nodes_of(growth)
        columns = (growth.session_ids, growth.epochs, growth.places, growth.as_of, growth.node_counts)
        for number, (session_id, epoch, place, as_of, count) in enumerate(zip(*columns, strict=True)):
            nodes, begin = range(begin, begin + count), begin + count
            self.told.append(f"grow {session_id}.{place} {count}")
            if (session := self._session(session_id, epoch)) is None:
                continue
            own = session.places[place]
            assert own.is_taken
            own.is_lost = own.is_lost or self.loses_growth
            if not own.is_lost:
                for node in nodes:
                    above, parent = parents[node], own.nodes.get(parents[node])
                    if above and parent is None:
                        continue
                    base = (as_of, ()) if parent is None else (parent.as_of, parent.path)
                    source = growth.sources[node] if growth.sources else GrowthSource.MODEL
                    path = (*base[1], tokens[node])
                    own.nodes[ids[node]] = Node(base[0], path, acceptance[node], source)
            if growth.complete and growth.complete[number]:
                session.complete_at = as_of
        self.wake()

    def bound(self, session_id: int, epoch: int, allow: int, *, alone: bool) -> None:
        self.bounds.append((session_id, allow, alone))
        if (session := self._session(session_id, epoch)) is not None:
            session.allow, session.is_alone = allow, alone
        self.wake()

    def close_session(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        if self._session(session_id, epoch) is not None:
            del self.sessions[session_id]

    def _session(self, session_id: int, epoch: int) -> TargetSession | None:
        """Return the session of this epoch; None if it has ended here meanwhile."""
        assert 0 < epoch <= self._epochs[session_id]
        session = self.sessions.get(session_id)
        return session if session is not None and session.opening.epoch == epoch else None

    # --------------------------------------------------------------------------------------------------------- rounds

    def wake(self) -> None:
        """Something has come: unless rounds are run, they begin."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def fail(self, session_id: int, kind: FaultKind, message: str) -> None:
        """Close a session between two rounds, and say why."""
        session = self.sessions.pop(session_id)
        fault = SessionFault(kind=kind, message=message)
        self.on_results(results_of([], faults=[(session_id, session.opening.epoch, fault)]))

    async def _run(self) -> None:
        """Until there is nothing to do."""
        while not self.is_lost:
            await self.runs.wait()
            taking_part = self._taking_part()
            failing = [session_id for session_id in self.sessions if session_id in self.fail_sessions]
            if not taking_part and not failing:
                self._task = None
                return
            trees = {session_id: (session, session.tree()) for session_id, session in taking_part.items()}
            await asyncio.sleep(self.step_s)
            if not self.is_lost:
                self._tell(trees, failing)
        self.on_lost("the fake target was lost")

    def _tell(self, trees: Trees, failing: Sequence[int]) -> None:
        try:
            self.on_results(self.verify(trees, failing))
        except Exception as error:  # noqa: BLE001 - as a link does: what cannot be taken loses the worker
            if isinstance(error, AssertionError):
                self.errors.append(error)
            self.is_lost = True

    def _taking_part(self) -> dict[int, TargetSession]:
        ready = {
            session_id: session
            for session_id, session in self.sessions.items()
            if session.allow > len(session.tokens) and self._has_tree(session)
        }
        alone = {session_id: session for session_id, session in ready.items() if session.is_alone}
        assert len(alone) <= 1
        others = {session_id: session for session_id, session in ready.items() if not session.is_alone}
        self._turns_alone = bool(alone) and not (self._turns_alone and others)
        return alone if self._turns_alone else others

    def _has_tree(self, session: TargetSession) -> bool:
        """Return True if a sync session has the whole tree of its round, or has waited long enough for it."""
        is_grown = any(place.is_taken for place in session.places)
        if session.opening.limits.mode != common_pb2.SPECULATION_MODE_SYNC or not is_grown:
            return True
        if session.complete_at == len(session.tokens):
            session.waits_since = None
            return True
        loop, wait_s = asyncio.get_running_loop(), session.opening.limits.sync_wait_ms / 1e3
        if session.waits_since is None:
            session.waits_since = loop.time()
            loop.call_later(wait_s, self.wake)
        if loop.time() - session.waits_since < wait_s:
            return False
        session.waits_since = None
        return True

    def verify(self, trees: Trees, failing: Sequence[int]) -> RoundResults:
        """Return a round's outcomes for sessions with trees, and the faults of those that fail."""
        outcomes, faults = list[Outcome](), list[tuple[int, int, SessionFault]]()
        for session_id in failing:
            if (session := self.sessions.pop(session_id, None)) is not None:
                fault = SessionFault(kind=self.fault_kind, message="the fake target says no")
                faults.append((session_id, session.opening.epoch, fault))
                self.fail_sessions.discard(session_id)
        done: dict[int, list[int]] = {}
        for session_id, (session, tree) in trees.items():
            if self.sessions.get(session_id) is session:
                outcomes.append(self._outcome(session, tree))
                done[session_id] = list(outcomes[-1].token_ids)
        self.rounds.append(done)
        number = len(self.rounds)
        return results_of(outcomes, faults=faults, number=number, step_ns=1000, forward_ns=900, plain_ns=800)

    def choose(self, session: TargetSession) -> int:
        """The next token."""
        return next_token(session.tokens)

    def _outcome(self, session: TargetSession, tree: Tree) -> Outcome:
        sampling, path, sources = session.sampling, tuple[int, ...](), list[int]()
        is_over = False
        while not is_over:
            token = self.choose(session)
            session.tokens.append(token)
            path = (*path, token)
            output = len(session.tokens) - session.prompt_length
            is_over = token in sampling.stop_token_ids or output >= sampling.max_new_tokens
            if path not in tree:
                break
            sources.append(tree[path])
        if is_over:
            del self.sessions[session.opening.session_id]
        return Outcome(
            session_id=session.opening.session_id,
            epoch=session.opening.epoch,
            token_ids=path,
            accepted=len(sources),
            selected=len(tree),
            selected_by_source=[sum(bits >> source & 1 for bits in tree.values()) for source in GrowthSource],
            sources=sources,
            is_over=is_over,
            lost=session.lost,
            tree_end=tree_end(tree, path),
        )


def tree_end(tree: Tree, path: tuple[int, ...]) -> target_pb2.TreeEnd:
    """Where committed tokens have left a tree."""
    if path in tree:
        return target_pb2.TREE_END_COVERED
    is_missed = any(other[:-1] == path[:-1] for other in tree)
    return target_pb2.TREE_END_MISSED if is_missed else target_pb2.TREE_END_STARVED
