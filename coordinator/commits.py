"""What a step's result does to its sessions, all of them together.

The next batch waits for this, so it does what that needs and no more: trees move their roots, and it turns out who
goes on. Tokens are appended and drafts told as soon as the batch has left or is held, and before where a session has
ended or somebody looks at its tokens; counting and learning (`VerifyLoop`) come then, and clients hear after that.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outrider.compiled import IS_COMPILED
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.commit_kernels import Told, note_commits
from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.forest import Forest, Moves
from outrider.coordinator.group import Bools, Group
from outrider.coordinator.messages import Commit, Commits
from outrider.coordinator.mirror import move_roots
from outrider.coordinator.parts import Parts
from outrider.coordinator.rounds import Step
from outrider.coordinator.rows import Ints
from outrider.coordinator.session import Session
from outrider.coordinator.taking import careful_places, take_carefully, take_plainly
from outrider.coordinator.trees import Trees
from outrider.coordinator.verdicts import Verdicts


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Of S sessions to whom a step gave tokens.

    Attributes:
        step: whose result it was.
        group: the sessions.
        lengths: [S] committed tokens before.
        token_ids: [S] those of each that are kept.
        emitted: [S] how many these are.
        nodes: [S] of the tree that was verified.
        accepted: [S] nodes that were accepted, and kept.
        is_on: [S] whether it goes on.
        is_drafted: [S] whether a draft grows for it.
        told_ns: [S] when it had its last tokens before; 0 where these are the first.
        is_covered: [S] whether its last token was a node of its tree.
        is_wrong: [S] not, although there were other nodes there.
        careful: places of those that have their tokens already; the others' are still to be appended (`take_tokens`).
        verdicts: [S]
        is_watched: somebody follows a tree.
    """

    step: Step
    group: Group
    lengths: Ints
    token_ids: Sequence[Sequence[int]]
    emitted: Ints
    nodes: Ints
    accepted: Ints
    is_on: Bools
    is_drafted: Bools
    told_ns: Ints
    is_covered: Bools
    is_wrong: Bools
    careful: Sequence[int] = ()
    verdicts: Verdicts | None = None
    is_watched: bool = False

    @property
    def sessions(self) -> Sequence[Session]:
        """[S]"""
        return self.group.sessions


class Answered(NamedTuple):
    """S sessions of a batch to whom a step gave tokens.

    Attributes:
        places: [S] in the batch.
        sessions: [S]
        verdicts: [S]
    """

    places: Ints
    sessions: Sequence[Session]
    verdicts: Verdicts


def whole_answer(step: Step) -> Answered | None:
    """The answer to a batch all of whose sessions have got tokens, as most are; None where one has to look at each."""
    flight, result, _ = step
    group, verdicts = flight.group, Verdicts.of(result.verdicts)
    if not verdicts.have_tokens or verdicts.session_ids != group.ids:
        return None
    sessions = group.sessions
    if verdicts.epochs != [session.target_epoch for session in sessions]:
        return None
    for session in sessions:
        if session.flight is not flight or session.result is not None or session.generation.is_closed:
            return None
    if result.verified is not None and list(map(result.verified.get, group.ids)) != flight.trees.counts.tolist():
        return None
    return Answered(np.arange(len(sessions)), sessions, verdicts)


def commit(step: Step, answered: Answered) -> Committed:
    """Takes what a target accepted, all of it."""
    committed = commit_trees(step, answered)
    take_tokens(committed)
    return replace(committed, verdicts=None)


def take_tokens(committed: Committed) -> None:
    """What `commit_trees` has left: before anybody looks at these sessions' tokens, and once."""
    if (verdicts := committed.verdicts) is not None:
        take_plainly(committed.group, verdicts, committed.step, committed.nodes, committed.careful)


def commit_trees(step: Step, answered: Answered) -> Committed:
    """Takes what a target accepted, as far as the next batch waits for it."""
    if not answered.sessions:
        return _nothing(step)
    trees, group = step.flight.trees, step.flight.group
    places, verdicts = answered.places, answered.verdicts
    nodes = trees.counts[places]
    if answered.sessions is not group.sessions and answered.sessions != group.sessions:
        # Not all of them have got tokens, or in another order.
        group = Group(answered.sessions)
    states, rows = group.states, group.rows
    lengths = states.length[rows]
    careful = careful_places(group, verdicts, lengths)
    token_ids: Sequence[Sequence[int]] = verdicts.token_ids
    is_on, numbers = np.ones(len(group), dtype=np.bool_), verdicts.accepted
    if careful:
        taken = take_carefully(group, verdicts, step, nodes, careful)
        if any(group.sessions[place].is_finished for place in careful):
            is_on = np.array([not session.is_finished for session in group.sessions])
        if any(len(own) < verdicts.token_ids.counts[place] for place, own in zip(careful, taken, strict=True)):
            # Where a stop string ended the text, what was accepted behind it is of no use.
            token_ids = list(token_ids)
            for place, own in zip(careful, taken, strict=True):
                token_ids[place] = own
        numbers = _kept_numbers(numbers, token_ids)
    for session in group.sessions:
        session.flight = None
    kept = Parts.of(token_ids)
    told = Told(states.told_ns, states.committed_ns, states.unanswered, states.draft)
    of_trees = numbers.array, numbers.counts, trees.starts[places], trees.slots
    told_ns, is_drafted, slots = _note_commits(told, rows, is_on, *of_trees, step.result_ns)
    if group.forest is not None and group.forest.mix.is_active:
        _note_sources(group.forest, trees, places, slots)
    moves = Moves(
        rows=rows,
        counts=kept.counts,
        tokens=kept.array,
        accepted=numbers.counts,
        slots=slots,
        keeps_tree=group.keeps_tree,
    )
    _move(group, moves, token_ids, is_on)
    return Committed(
        step=step,
        group=group,
        lengths=lengths,
        token_ids=token_ids,
        emitted=kept.counts,
        nodes=nodes,
        # The commit's own: what the target drafted by itself is added to it (`one_graph.credit`).
        accepted=numbers.counts.copy(),
        is_on=is_on,
        is_drafted=is_drafted,
        told_ns=told_ns,
        is_covered=states.was_drafted[rows],
        is_wrong=states.was_missed[rows],
        careful=careful,
        verdicts=verdicts,
        is_watched=any(group.sessions[place].tap is not None for place in careful),
    )


def _nothing(step: Step) -> Committed:
    none, no = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    numbers = dict.fromkeys(("lengths", "emitted", "nodes", "accepted", "told_ns"), none)
    answers = dict.fromkeys(("is_on", "is_drafted", "is_covered", "is_wrong"), no)
    return Committed(step=step, group=Group(()), token_ids=(), **numbers, **answers)


def _kept_numbers(accepted: Parts, token_ids: Sequence[Sequence[int]]) -> Parts:
    """[S] accepted nodes of each session whose tokens are kept, by their numbers in its tree, from 1."""
    if (accepted.counts <= Parts.of(token_ids).counts).all():
        return accepted
    return Parts.of([own[: len(kept)] for own, kept in zip(accepted, token_ids, strict=True)])


def _note_commits(  # noqa: PLR0917
    told: Told, rows: Ints, is_on: Bools, numbers: Ints, accepted: Ints, starts: Ints, slots: Ints, at_ns: int
) -> tuple[Ints, Bools, Ints]:
    """As of `note_commits`."""
    if IS_COMPILED:
        return note_commits(told, rows, is_on, numbers, accepted, starts, slots, at_ns)
    before, is_drafted = told.told_ns[rows], told.draft[rows] != 0
    told.committed_ns[rows] = told.told_ns[rows] = at_ns
    told.unanswered[rows[is_drafted & is_on]] += 1
    return before, is_drafted, slots[numbers - 1 + np.repeat(starts, accepted)]


def _note_sources(forest: Forest, trees: Trees, places: Ints, accepted: Ints) -> None:
    """Credits the sources of what was verified, once there are several."""
    is_answered = np.zeros(len(trees), dtype=np.bool_)
    is_answered[places] = True
    sent = trees.slots[np.repeat(is_answered, trees.counts)]
    forest.mix.note_round(forest, sent[sent >= 0], accepted[accepted >= 0])


def _move(group: Group, moves: Moves, token_ids: Sequence[Sequence[int]], is_on: Bools) -> None:
    """Moves the roots of the trees and chains of those that go on, and speculate."""
    moved = is_on & group.is_tree
    if moved.all():
        assert group.forest is not None
        move_roots(group.forest, moves)
        return
    states = group.states
    states.length[moves.rows[~moved]] += moves.counts[~moved]
    if group.forest is not None and moved.any():
        move_roots(group.forest, moves.only(moved))
    for place in group.chains:
        chain = group.mirrors[place]
        if is_on[place] and isinstance(chain, ChainMirror):
            chain.commit(token_ids[place], keeps_chain=bool(moves.keeps_tree[place]))
            states.was_drafted[group.rows[place]] = chain.root_was_drafted
            states.was_missed[group.rows[place]] = chain.root_was_missed


def tell_drafts(committed: Committed, drafts: Mapping[str, DraftPeer]) -> None:
    """Each draft hears of what its sessions have committed that go on; `drafts` by worker id."""
    group = committed.group
    if not len(group):
        return
    states = group.states
    numbers = np.where(committed.is_on, states.draft[group.rows], 0)
    positions, token_ids = committed.lengths, committed.token_ids
    for peer in drafts.values():
        places = np.flatnonzero(numbers == peer.number)
        if not len(places):
            continue
        is_all = len(places) == len(group)
        commits = Commits(
            session_ids=group.ids if is_all else [group.ids[place] for place in places.tolist()],
            epochs=states.draft_epoch[group.rows[places]].tolist(),
            positions=positions[places].tolist(),
            token_ids=token_ids if is_all else [token_ids[place] for place in places.tolist()],
        )
        peer.link.commit(commits)
    if numbers.min() >= 0:
        return
    several: defaultdict[str, list[Commit]] = defaultdict(list)
    for place in np.flatnonzero(numbers < 0).tolist():
        session, new = group.sessions[place], committed.token_ids[place]
        for worker_id, epoch in session.draft_epochs.items():
            several[worker_id].append(Commit(session.session_id, epoch, int(positions[place]), new))
    for worker_id, commits in several.items():
        drafts[worker_id].link.commit(Commits.of(commits))
