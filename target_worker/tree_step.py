"""The usual step: trees of sessions whose prompts are computed, chosen and walked by the device. Over columns.

Nothing of such a step has to be planned: every tree fits, every slot is there, and of what comes back only tokens and
paths are read. What lies between two steps on the device is the host's time alone, so a session is looked at once when
a step begins and once when it ends, and slots are taken and freed for all at once. Whatever is not usual is left to
`outrider.target_worker.planning` and `outrider.target_worker.forward_step`, which give the same results.

Shapes: bs trees, T rows of all of them (root and nodes, tree after tree), m rows of the longest path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from outrider import succession_kernels
from outrider.compiled import IS_COMPILED
from outrider.engine import step_trees
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_runner import LaunchedStep
from outrider.engine.step_staging import StepAnswer
from outrider.engine.step_trees import TreeColumns
from outrider.engine.tree_kernels import are_trees
from outrider.target_worker.asked_trees import AskedTrees
from outrider.target_worker.sessions import DEFERRED, Outcome, Session, SessionKey, TreeRequest, TreeResult
from outrider.target_worker.synthetic import DecidedPath
from outrider.wire import split_by_counts

# A member of an enum is looked up anew wherever it is named.
_ACCEPTED, _ERROR = Outcome.ACCEPTED, Outcome.ERROR


class TreeStep:
    """A usual step under way; as `outrider.target_worker.forward_step.ForwardStep`, but for what it decides.

    Attributes:
        results: of all trees that were asked for, in their order; what the forward decides is still missing.
        places: [bs] the sessions' places in `results`.
        sessions: [bs]
        columns: as the step was staged.
        decided: [paths] of the trees in `columns.decided`, in their order.
        tokens: T.
        forward_ns: how long the device worked on it; 0 until `finish`.
        may_overlap: whether another step may be started before this one is finished.
    """

    def __init__(self, usual: _Usual, launched: LaunchedStep, *, may_overlap: bool) -> None:
        self.results, self.places, self.sessions, self.columns, self.decided = usual
        self.tokens = len(self.columns.tokens)
        self.forward_ns = 0
        self.may_overlap = may_overlap
        self._launched = launched

    @property
    def is_done(self) -> bool:
        """Whether the device is done with it."""
        return self._launched.is_done

    def answer(self) -> StepAnswer:
        """The walks as the device took them, once it is done."""
        answer = self._launched.result()
        self.forward_ns = self._launched.device_ns()
        return answer


class _Usual(NamedTuple):
    """See `TreeStep`."""

    results: list[TreeResult]
    places: list[int]
    sessions: list[Session]
    columns: TreeColumns
    decided: list[DecidedPath]


class TreeSteps:
    """Begins and finishes usual steps.

    Args:
        runner: the target.
        max_rows: most rows of a step.
    """

    def __init__(self, runner: ModelRunner, *, max_rows: int) -> None:
        self._runner, self._slots = runner, runner.slots
        self._max_rows, self._max_tree_rows = max_rows, runner.config.max_tree_nodes + 1
        self._last: TreeStep | None = None

    def begin(self, trees: Sequence[TreeRequest], sessions: Mapping[SessionKey, Session]) -> TreeStep | None:
        """Reserves the step's slots and launches it; None, and nothing has changed, where something is unusual.

        Args:
            trees: all that are asked for.
            sessions: all that are open.
        """
        steps = self._runner.steps
        if not trees or steps is None or not steps.takes_trees:
            return None
        asked = trees if isinstance(trees, AskedTrees) else AskedTrees.of(trees)
        usual = None if asked is None else self._usual(asked, sessions)
        if usual is None or not self._slots.extend_rows(usual.columns.rows, usual.columns.roots, usual.columns.counts):
            return None
        step = TreeStep(usual, steps.launch(steps.stage_trees(usual.columns)), may_overlap=not self._runner.is_tapped)
        for session in usual.sessions:
            session.in_flight = True
        self._last = step
        return step

    def look_ahead(self) -> None:
        """Makes what steps after the last one that was begun will need; whoever has time for it calls it."""
        step, self._last = self._last, None
        if step is not None:
            for tree, _ in step.columns.decided:
                coins = step.sessions[tree].coins
                assert coins is not None
                coins.make_ahead(step.columns.roots[tree])

    def _usual(self, trees: AskedTrees, sessions: Mapping[SessionKey, Session]) -> _Usual | None:
        lengths = self._slots.lengths
        results = [DEFERRED] * len(trees)
        places: list[int] = []
        asked: list[Session] = []
        coins: list[int] = []
        for place, (key, epoch, length, settled) in enumerate(
            zip(trees.keys, trees.epochs, trees.lengths, trees.settled, strict=True)
        ):
            if settled is not None:
                if settled.outcome is _ERROR:
                    return None
                results[place] = settled
                continue
            session = sessions.get(key)
            if (
                session is None
                or session.epoch != epoch
                or session.in_flight
                or len(session.tokens) != length
                or lengths[session.row] != length - 1
                or length >= session.limit
                or session.sampling.reads_logits
            ):
                return None
            if session.coins is not None:
                coins.append(len(asked))
            places.append(place)
            asked.append(session)
        if (
            not asked
            or len(trees.tokens) > self._max_rows
            or max(trees.counts) > self._max_tree_rows
            or self._others_wait(asked, sessions)
        ):
            return None
        rows = [session.row for session in asked]
        columns = TreeColumns(
            rows=rows,
            roots=[lengths[row] for row in rows],
            # Nodes past the session's end are never accepted: their positions stay within what the model knows.
            lasts=[session.limit - 1 for session in asked],
            counts=trees.counts,
            tokens=trees.tokens,
            parents=trees.parents,
            records=b"".join([session.sampling.record for session in asked]),
        )
        if len(set(rows)) < len(rows) or not self._are_trees(columns, [session.tokens[-1] for session in asked]):
            return None
        decided = _decided(trees, columns.roots, asked, coins) if coins else []
        columns.decided = [(tree, path.end) for tree, path in zip(coins, decided, strict=True)]
        return _Usual(results, places, asked, columns, decided)

    def _others_wait(self, asked: Sequence[Session], sessions: Mapping[SessionKey, Session]) -> bool:
        """Whether a session that is not asked for has a prompt to be computed."""
        if len(asked) == len(sessions):
            return False
        lengths = self._slots.lengths
        return any(not other.in_flight and lengths[other.row] < len(other.tokens) - 1 for other in sessions.values())

    def _are_trees(self, columns: TreeColumns, roots: Sequence[int]) -> bool:
        """Whether nodes are tokens of the model's, and parents stand before their children; tells the roots' tokens."""
        tokens, parents, counts = columns.tokens, columns.parents, np.array(columns.counts)
        assert isinstance(tokens, np.ndarray) and isinstance(parents, np.ndarray)
        if IS_COMPILED:
            return are_trees(counts, np.array(roots), tokens, parents, self._runner.vocab_size)
        firsts = counts.cumsum() - counts
        tokens[firsts] = 0
        if not 0 <= tokens.min() <= tokens.max() < self._runner.vocab_size or parents.min() < 0:
            return False
        # A root's parent is its own number, 0: as many as there are trees do not stand before their children.
        number = np.arange(len(tokens)) - firsts.repeat(counts)
        tokens[firsts] = roots
        return int(np.count_nonzero(parents >= number)) == len(counts)

    def finish(self, step: TreeStep) -> list[TreeResult]:
        """Waits for the step and commits what the walks accept; what is asked of each session, in order.

        Raises:
            WorkerUnavailable: a process that shares the model was lost; what the forward left is void.
        """
        with self._runner.ranks.guard():
            answer = step.answer()
        columns, results = step.columns, step.results
        # A tree's rows follow one another, so a row's distance from the root's is its number.
        numbers = (answer.rows - answer.rows[:, :1]).tolist()
        walks = list(zip(answer.tokens.tolist(), numbers, answer.accepted.tolist(), strict=True))
        for (place, _), path in zip(columns.decided, step.decided, strict=True):
            # That path, and the token chosen at its end.
            final = path.final(walks[place][0][0])
            walks[place] = [*path.tokens, final], [0, *path.nodes], len(path.nodes)
        sizes: list[int] = []
        kept: list[int] = []
        for place, session, root, last, (chosen, nodes, accepted) in zip(
            step.places, step.sessions, columns.roots, columns.lasts, walks, strict=True
        ):
            count, room = accepted + 1, last - root
            ends = count >= room
            emitted = chosen[: room if ends else count]
            stops = session.stop_token_ids
            if not stops.isdisjoint(emitted):
                emitted = emitted[: next(number for number, token in enumerate(emitted, 1) if token in stops)]
                ends = True
            count = len(emitted)
            session.tokens += emitted
            session.in_flight = False
            session.reached = max(session.reached, root + count)
            sizes.append(count)
            kept += nodes[:count]
            results[place] = TreeResult(
                outcome=_ACCEPTED,
                accepted_nodes=nodes[1 : count + (count <= accepted)],
                token_ids=emitted,
                cached_tokens=session.cached_tokens,
                ended=ends,
            )
        # The root and all emitted tokens but the last, which is the next root, keep their KV.
        if len(kept) < step.tokens:
            self._slots.retain_rows(columns.rows, columns.roots, columns.counts, kept=kept, sizes=sizes)
        return results


def _decided(
    trees: AskedTrees, roots: Sequence[int], sessions: Sequence[Session], coins: Sequence[int]
) -> list[DecidedPath]:
    """The paths that coins accept, of some of the trees.

    Args:
        trees: A with a tree to verify.
        roots: [A] index of each root in its session's tokens.
        sessions: [A]
        coins: which of the A have coins.
    """
    tokens, parents = trees.tokens.tolist(), trees.parents.tolist()
    rows = list(split_by_counts(trees.counts))
    decided: list[DecidedPath] = []
    for tree in coins:
        found, nodes = sessions[tree].coins, slice(rows[tree].start + 1, rows[tree].stop)
        assert found is not None
        decided.append(found.decide(tokens[nodes], parents[nodes], root=roots[tree]))
    return decided


def warm_up() -> None:
    """Compiles what steps go through, or loads what was compiled, before anybody waits for it."""
    step_trees.warm_up()
    if IS_COMPILED:
        succession_kernels.warm_up()
