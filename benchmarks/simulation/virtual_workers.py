"""Fake workers on virtual time, in the coordinator's own process: they stand where its links do.

    request -> half a round trip -> a step of its time -> half a round trip -> answer

The target takes batches one after the other, the next as soon as the one before is done if it is there by then.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.simulation.last_step import LastStep, Outcome, Tree
from benchmarks.simulation.path_model import PathModel, mix, share
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.tree_grower import GrownRows, TreeGrower

from outrider.coordinator import clock
from outrider.coordinator.firing import Latency
from outrider.coordinator.messages import (
    Commit,
    Commits,
    GrowthBatch,
    SessionOpening,
    SessionVerdict,
    SpeculationMode,
    TreeSubmission,
    VerifyResult,
)
from outrider.coordinator.successor import Successor
from outrider.succession import NOTHING_EMITTED, Addition


def _after(delay_ns: float, what: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(max(0.0, delay_ns) / 1e9, what)


@dataclass(eq=False)
class _Coming:
    """A batch that follows the one before it; `ends_ns`: until when that runs, and additions change something."""

    successor: Successor
    openings: Sequence[SessionOpening]
    future: "asyncio.Future[VerifyResult]"
    additions: int = 0
    ends_ns: int = 0
    ahead_ns: int = 0


class VirtualTarget:
    """A target and the link to it.

    Attributes:
        busy_ns: time spent in steps.
        steps: so many.
        rows: of all steps.
    """

    def __init__(self, settings: Settings, model: PathModel) -> None:
        self._settings, self._model = settings, model
        self._one_way_ns = settings.target_rtt_ms * 1e6 / 2
        self._sessions: dict[int, tuple[int, int, int, int]] = {}
        """Session to its path's key, its epoch, its committed length and the one with which it ends."""
        self._last = LastStep()
        self._prompts: dict[int, int] = {}
        """Session to the steps that its prompt still takes, oldest first."""
        self._free_at_ns = self._latest_ns = 0
        self._coming: _Coming | None = None
        self.busy_ns = self.steps = self.rows = 0

    def submit(
        self, trees: Sequence[TreeSubmission], *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        """A batch on its way; the future gives its verdicts."""
        self._coming = None
        self._open(openings)
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()
        columns = [(tree.session_id, tree.epoch, tree.length) for tree in trees]
        nodes = [(list(tree.tokens), list(tree.parents)) for tree in trees]
        self._run(future, columns, nodes, comes_ns=clock.now_ns() + round(self._one_way_ns + self._pause_ns()))
        return future

    def follow(
        self, successor: Successor, *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        """The same of one that follows the batch that is on its way."""
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()
        coming = self._coming = _Coming(successor, openings, future)
        self._latest_ns = max(self._latest_ns, clock.now_ns() + round(self._one_way_ns + self._pause_ns()))
        _after(self._latest_ns - clock.now_ns(), lambda: self._arrive(coming))
        return future

    def extend(self, more: Addition) -> None:
        """Adds nodes to that one."""
        del more
        coming = self._coming
        assert coming is not None

        def arrive() -> None:
            if clock.now_ns() <= coming.ends_ns:
                coming.additions += 1

        # Behind that one, wherever both would come at once.
        _after(max(self._latest_ns + 1 - clock.now_ns(), self._one_way_ns), arrive)

    def _arrive(self, coming: "_Coming") -> None:
        """It lies here until the step that it follows has ended."""
        coming.ends_ns, coming.ahead_ns = self._free_at_ns, self._free_at_ns - clock.now_ns()
        _after(coming.ahead_ns, lambda: self._begin(coming))

    def _begin(self, coming: "_Coming") -> None:
        self._open(coming.openings)
        successor, coming.ends_ns = coming.successor, 0
        session_ids, epochs = successor.group.ids, successor.epochs
        trees = self._last.trees(successor.grown(coming.additions)[0], session_ids, epochs)
        columns = list(zip(session_ids, epochs, successor.lengths, strict=True))
        self._run(coming.future, columns, trees, comes_ns=clock.now_ns(), follows=coming)

    def _open(self, openings: Sequence[SessionOpening]) -> None:
        for opening in openings:
            length = len(opening.prompt) + len(opening.output)
            most = len(opening.prompt) + opening.sampling.max_new_tokens
            self._sessions[opening.session_id] = (self.key_of(opening.prompt), opening.epoch, length, most)
            if self._settings.prompt_steps:
                self._prompts[opening.session_id] = self._settings.prompt_steps

    def key_of(self, prompt: Sequence[int]) -> int:
        """The key of the path that a session with this prompt takes."""
        return prompt[0]

    def _run(
        self,
        future: "asyncio.Future[VerifyResult]",
        columns: Sequence[tuple[int, int, int]],
        trees: Sequence[Tree],
        *,
        comes_ns: int,
        follows: "_Coming | None" = None,
    ) -> None:
        """A step of sessions (id, epoch, length) and their trees; what it is if it follows the one before."""
        rows = len(trees) + sum(len(tokens) for tokens, _ in trees) + self._prefill()
        step_ns = round(self._settings.target_step_ns(rows=rows, sessions=len(trees)) * self._luck())
        self._free_at_ns = max(comes_ns, self._free_at_ns) + step_ns
        self.busy_ns += step_ns
        self.steps += 1
        self.rows += rows
        counts = {column[0]: len(tree[0]) for column, tree in zip(columns, trees, strict=True)}
        is_next = follows is not None
        verdicts = [self._verdict(*column, tree, is_next) for column, tree in zip(columns, trees, strict=True)]
        self._last.end()
        result = VerifyResult(
            step=self.steps,
            verdicts=verdicts,
            step_ns=step_ns,
            forward_ns=step_ns,
            step_tokens=rows,
            verified=counts if is_next else None,
            ahead_ns=follows.ahead_ns if follows is not None else 0,
        )

        def answer() -> None:
            coming = self._coming
            additions = 0 if coming is None or coming is follows else coming.additions
            if not future.done():
                future.set_result(replace(result, additions=additions))

        _after(self._free_at_ns + self._one_way_ns - clock.now_ns(), answer)

    def _prefill(self) -> int:
        """Rows of a prompt that this step has, the oldest one's; its session may emit in the step after its last."""
        if not self._prompts:
            return 0
        session_id = next(iter(self._prompts))
        self._prompts[session_id] -= 1
        if self._prompts[session_id] < 0:
            del self._prompts[session_id]
            return self._prefill()
        return self._settings.prompt_rows

    def _luck(self) -> float:
        return 1 + self._settings.target_jitter * (2 * share(mix(self._settings.seed, self.steps)) - 1)

    def _pause_ns(self) -> float:
        """What keeps this batch on its way, beside the way itself."""
        is_late = share(mix(mix(self._settings.seed, self.steps), 1)) < self._settings.pause_share
        return self._settings.pause_ms * 1e6 if is_late else 0.0

    def _verdict(self, session_id: int, epoch: int, length: int, tree: Tree, follows: bool) -> SessionVerdict:
        key, own_epoch, own_length, most = self._sessions[session_id]
        expected = self._last.length(session_id, epoch, own_length) if follows else own_length
        if (epoch, length) != (own_epoch, expected):
            raise ValueError(f"session {session_id}: {(epoch, length)} submitted, {(own_epoch, expected)} held")
        if session_id in self._prompts:
            self._last.note(session_id, epoch, Outcome(own_length, len(tree[0]), NOTHING_EMITTED, NOTHING_EMITTED))
            return SessionVerdict(session_id=session_id, epoch=epoch, deferred=True)
        accepted, emitted = self._model.walk(key, own_length, *tree)
        self._sessions[session_id] = (key, epoch, own_length + len(emitted), most)
        outcome = Outcome.of(own_length, len(tree[0]), accepted, emitted, most=most)
        self._last.note(session_id, epoch, outcome)
        return SessionVerdict(session_id=session_id, epoch=epoch, accepted_nodes=accepted, token_ids=emitted)

    def close_session(self, session_id: int, epoch: int) -> None:
        """Forgets a session."""
        if session_id in self._sessions and self._sessions[session_id][1] == epoch:
            del self._sessions[session_id]
            self._prompts.pop(session_id, None)


class VirtualDraft:
    """A draft and the link to it: grows by itself, and hears of commits between steps.

    Args:
        on_growth: gets what it grew.

    Attributes:
        is_frozen: set, it takes commands and does nothing more, as a stopped process would.
    """

    def __init__(self, settings: Settings, model: PathModel, *, on_growth: Callable[[GrowthBatch], None]) -> None:
        self.is_frozen = False
        self.step_latency = Latency()
        self._grower = TreeGrower(model, width=settings.draft_width)
        self._step_ns = settings.draft_step_ms * 1e6
        self._one_way_ns = settings.draft_rtt_ms * 1e6 / 2
        self._on_growth = on_growth
        self._commands: list[Callable[[], None]] = []
        self._is_stepping = False

    def open_session(self, opening: SessionOpening) -> None:
        """Grows this session's tree from now on."""
        is_sync = opening.mode is SpeculationMode.SYNC
        self._send(
            lambda: self._grower.open(
                opening.session_id,
                key=opening.prompt[0],
                epoch=opening.epoch,
                length=len(opening.prompt) + len(opening.output),
                is_sync=is_sync,
                max_nodes=opening.sync_nodes if is_sync else opening.max_live_nodes,
                max_depth=opening.max_depth,
            )
        )

    def commit(self, commits: Commits) -> None:
        """Tells of tokens."""
        for commit in commits:
            self._send(functools.partial(self._apply, commit))

    def _apply(self, commit: Commit) -> None:
        self._grower.commit(
            commit.session_id, epoch=commit.epoch, position=commit.position, token_ids=list(commit.token_ids)
        )

    def close_session(self, session_id: int, epoch: int) -> None:
        """Forgets a session."""
        self._send(lambda: self._grower.close(session_id, epoch=epoch))

    def _send(self, command: Callable[[], None]) -> None:
        _after(self._one_way_ns, lambda: self._arrive(command))

    def _arrive(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._is_stepping:
            # What leaves together arrives together.
            self._is_stepping = True
            _after(0, self._step)

    def _step(self) -> None:
        if self.is_frozen:
            return
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        grown = self._grower.step()
        self._is_stepping = bool(grown)
        if grown:
            _after(self._step_ns, lambda: self._finish(grown))

    def _finish(self, grown: dict[int, GrownRows]) -> None:
        _after(self._one_way_ns, lambda: self._deliver(grown))
        self._step()

    def _deliver(self, grown: dict[int, GrownRows]) -> None:
        if self.is_frozen:
            return
        self.step_latency.observe(self._step_ns)
        parts = grown.values()
        rows = [row for part in parts for row in part.rows]
        node_ids, parents, tokens, acceptance = zip(*rows, strict=True) if rows else ((),) * 4
        self._on_growth(
            GrowthBatch(
                session_ids=list(grown),
                epochs=[part.epoch for part in parts],
                as_of=[part.as_of for part in parts],
                node_counts=[len(part.rows) for part in parts],
                complete=[part.complete for part in parts],
                node_ids=np.array(node_ids, dtype=np.int64),
                parents=np.array(parents, dtype=np.int64),
                tokens=np.array(tokens, dtype=np.int64),
                acceptance=np.array(acceptance, dtype=np.float64),
            )
        )
