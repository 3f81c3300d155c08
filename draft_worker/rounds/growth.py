"""Growth: the nodes that steps of a drafter add, as plain columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.draft_worker.rounds.session import SessionStart
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.growth_source import GrowthSource

_COLUMNS = ("owners", "session_ids", "epochs", "as_of", "complete", "forgot", "again", "counts")
_NODE_COLUMNS = ("node_ids", "parents", "tokens", "acceptance", "distributions")


@dataclass(slots=True)
class Growth:
    """New nodes of several sessions, session by session, and what their steps cost.

    A session has a part for each step that grew it, in the order of the steps.

    Attributes:
        source: drafter of all nodes.
        owners: [P] receivers of the sessions' growth.
        session_ids, epochs: [P] the owners' names for the sessions.
        as_of: [P] committed lengths that the growth continues.
        complete: [P] sync mode: the round's tree is whole. Async: no other drafter is needed this round.
        forgot: [P] the session's tree was dropped before: earlier node ids mean nothing any more.
        again: [P] the session's live tree, sent again.
        counts: [P] nodes of each session.
        node_ids: [n].
        parents: [n] node ids, or 0 for the root at length `as_of`; a parent stands before its children.
        tokens: [n].
        acceptance: [n] estimates given the parent.
        distributions: [n] the q each token was drawn from, under rejection; empty where no node has one.
        steps: how many there were.
        step_ns: time of the steps, in nanoseconds.
        forward_ns: time of their forward passes.
        rows: rows of the forward passes, padding left out.
        num_sessions: sessions of the steps, each counted in every step that it took part in.
    """

    source: GrowthSource = GrowthSource.MODEL
    owners: list[Any] = field(default_factory=list)
    session_ids: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    as_of: list[int] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    forgot: list[bool] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    node_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution | None] = field(default_factory=list)
    steps: int = 1
    step_ns: int = 0
    forward_ns: int = 0
    rows: int = 0
    num_sessions: int = 0

    def add(
        self,
        start: SessionStart,
        as_of: int,
        node_ids: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        acceptance: Sequence[float],
        *,
        distributions: Sequence[DraftDistribution | None] = (),
        complete: bool = False,
    ) -> None:
        """Add a session's nodes, perhaps none."""
        self.owners.append(start.owner)
        self.session_ids.append(start.key[1])
        self.epochs.append(start.epoch)
        self.as_of.append(as_of)
        self.complete.append(complete)
        self.forgot.append(False)
        self.again.append(False)
        self.counts.append(len(node_ids))
        if distributions:
            self.distributions += [None] * (len(self.node_ids) - len(self.distributions))
            self.distributions += distributions
        elif self.distributions:
            self.distributions += [None] * len(node_ids)
        self.node_ids += node_ids
        self.parents += parents
        self.tokens += tokens
        self.acceptance += acceptance

    @property
    def can_be_joined(self) -> bool:
        """True for steps of a model that say nothing beside their nodes: they may travel as one message."""
        says_more = any(self.complete) or any(self.forgot) or any(self.again) or self.distributions
        return self.source is GrowthSource.MODEL and self.rows > 0 and not says_more

    def join(self, following: "Growth") -> None:
        """Add what a later step has grown; both can be joined."""
        for name in (*_COLUMNS, *_NODE_COLUMNS):
            getattr(self, name).extend(getattr(following, name))
        self.steps += following.steps
        self.step_ns += following.step_ns
        self.forward_ns += following.forward_ns
        self.rows += following.rows
        self.num_sessions += following.num_sessions

    def by_owner(self) -> Iterator[tuple[Any, "Growth"]]:
        """Split between the owners of the sessions; nothing is copied where there is one."""
        owners = {id(owner): owner for owner in self.owners}
        if len(owners) < 2:
            yield from ((owner, self) for owner in owners.values())
            return
        costs = {name: getattr(self, name) for name in ("steps", "step_ns", "forward_ns", "rows", "num_sessions")}
        parts = {key: Growth(self.source, **costs) for key in owners}
        begin = 0
        for place, owner in enumerate(self.owners):
            part, end = parts[id(owner)], begin + self.counts[place]
            for name in _COLUMNS:
                getattr(part, name).append(getattr(self, name)[place])
            for name in _NODE_COLUMNS:
                getattr(part, name).extend(getattr(self, name)[begin:end])
            begin = end
        yield from ((owner, parts[key]) for key, owner in owners.items())
