"""The coordinator's copy of one session's token tree, merged from the growth of any number of draft workers.

A draft and its mirror are out of step by a network's delay: growth arrives that was made before the draft knew of the
last commits. `as_of` says which committed length the draft had applied; growth that descends from what was committed
since is grafted, the rest is dropped.

Under the rejection rule the tree is a chain: what one draft has drawn, token after token, each with its q. Nothing here
looks at a token or a q of it to decide what stays, for that would bias what the target makes of it: a node replaces
whatever its parent had below it, and a draft that goes takes its chain along.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.coordinator.messages import Growth
from outrider.tree import Node, TokenTree


@dataclass
class _WorkerView:
    """How one worker's node ids map into the mirror.

    Attributes:
        nodes: id to live node.
        committed: id to committed length (the node's token is the last of that length), until as_of has passed it.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    as_of: int = 0
    complete_as_of: int = -1


class MirrorTree:
    """One session's mirror.

    Args:
        token_ids: the session's committed tokens, prompt and output; the mirror reads this list and `commit` is called
            after every append to it.
        is_chain: whether the tree is a chain of nodes with a q each.
    """

    def __init__(self, token_ids: list[int], *, is_chain: bool = False) -> None:
        self._token_ids = token_ids
        self.is_chain = is_chain
        self.length = len(token_ids)
        self.tree = TokenTree(token_ids[-1])
        self.root_was_drafted = False
        """Whether the root was a node of the tree before it was committed: a draft may be expanding it by now."""
        self._views: dict[str, _WorkerView] = {}

    def graft(self, worker_id: str, growth: Growth) -> int:
        """Adds growth; returns how many of its nodes stand in the tree now, or are committed tokens."""
        view = self._views.setdefault(worker_id, _WorkerView())
        if growth.as_of > self.length:
            return 0
        self._forget_passed(view, growth.as_of)
        grafted = 0
        distributions = growth.distributions or [None] * len(growth.node_ids)
        columns = zip(growth.node_ids, growth.parents, growth.tokens, growth.acceptance, distributions, strict=True)
        for node_id, parent_id, token, acceptance, distribution in columns:
            if self.is_chain and distribution is None:
                # Not drawn from anything that the target could divide by.
                continue
            parent = self._place_of(view, parent_id, growth.as_of)
            if isinstance(parent, Node):
                if self.is_chain and parent.children:
                    self._cut_below(parent)
                view.nodes[node_id] = node = self.tree.add(parent, token, acceptance)
                node.distribution = distribution
            elif parent is not None and self._token_ids[parent] == token:
                view.committed[node_id] = parent + 1
            else:
                continue
            grafted += 1
        if growth.complete:
            view.complete_as_of = growth.as_of
        return grafted

    def _place_of(self, view: _WorkerView, node_id: int, as_of: int) -> Node | int | None:
        """Where a worker's node stands: live, committed (the length at which it is the last token), or nowhere."""
        if (node := view.nodes.get(node_id)) is not None:
            return node
        length = view.committed.get(node_id) if node_id else as_of
        return self.tree.root if length == self.length else length

    @staticmethod
    def _forget_passed(view: _WorkerView, as_of: int) -> None:
        if as_of <= view.as_of:
            return
        view.as_of = as_of
        view.committed = {node_id: length for node_id, length in view.committed.items() if length > as_of}

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves the root along tokens that have just been appended to the session's list."""
        length_at: dict[Node, int] = {}
        for place, node in enumerate(self.tree.commit(token_ids), start=1):
            length_at[node] = self.length + place
        self.root_was_drafted = len(length_at) == len(token_ids)
        self.length += len(token_ids)
        assert self.length == len(self._token_ids)
        for view in self._views.values():
            for node_id, node in view.nodes.items():
                if node in length_at:
                    view.committed[node_id] = length_at[node]
        self._forget_dead()

    def _cut_below(self, node: Node) -> None:
        """The draft has begun anew there."""
        self.tree.size -= sum(1 for _ in node.walk())
        node.children.clear()
        self._forget_dead()

    def _forget_dead(self) -> None:
        alive = set(self.tree.root.walk())
        for view in self._views.values():
            view.nodes = {node_id: node for node_id, node in view.nodes.items() if node in alive}

    def clear(self) -> None:
        """Drops all nodes (sync mode grows every round's tree afresh)."""
        self.tree = TokenTree(self._token_ids[-1])
        for view in self._views.values():
            view.nodes.clear()

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, or opens the session anew: its ids mean nothing any more; its nodes stay, a chain goes."""
        self._views.pop(worker_id, None)
        if self.is_chain:
            self.clear()

    @property
    def is_complete(self) -> bool:
        """Whether some worker has said that the tree of this round is whole (sync mode)."""
        return any(view.complete_as_of == self.length for view in self._views.values())
