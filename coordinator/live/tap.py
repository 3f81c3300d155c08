"""Events of one session's token tree for its viewers, as JSON lines.

    growth has come ──> grow      the target has chosen ──> verdict      client told ──> deliver

A session has a tap only while somebody watches; else what is below costs it a comparison with None. The tap keeps a
tree of its own, the only one in a coordinator, of what has passed by: it is for the eye. docs/live-page.md describes
every line.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.coordinator.api.access import Caller
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.live.watcher import MAX_LINES, Watcher
from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.messages import GenerationRequest, GrowthBatch, Outcome, RoundResults
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.drafting.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.coordinator.sessions.session import Session

FORMAT, VERSION = "outrider-tree", 2
# Of the prompt and of the text so far, what a header and a snapshot hold.
_MOST_TEXT = 20_000
# A door that sends lines along with its events is behind by one round at most.
_MOST_RECORDED = 65_536


@dataclass(slots=True)
class _Node:
    """A guess that watchers know of."""

    parent: int
    token: int
    acceptance: float


@dataclass(slots=True)
class _Counts:
    """Sums over the rounds that the tap has seen."""

    rounds: int = 0
    grown: int = 0
    selected: int = 0
    accepted: int = 0
    abandoned: int = 0
    emitted: int = 0

    def line(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


class SessionTap:
    """The events of one session, for any number of watchers.

    Args:
        session: that is watched; all that it needs to know of its tap is whether there is one.
        piece: the bytes of text that a token stands for; none for those without a text.
    """

    def __init__(self, session: "Session", piece: Callable[[int], bytes]) -> None:
        self._session, self._piece = session, piece
        self._epoch_ns = clock.now_ns()
        self._watchers: list[Watcher] = []
        self._next_id = itertools.count(1)
        self._root = 0
        self._nodes: dict[int, _Node] = {}
        # What each drafter, a source of a worker, calls a node or a committed token.
        self._ids: dict[tuple[str, GrowthSource, int], int] = {}
        # Of the last tokens, by committed length: growth may hang from one of them.
        self._roots: dict[int, int] = {len(session.token_ids): self._root}
        self._counts = _Counts()

    # -------------------------------------------------------------------------------------------------------- watchers

    def watch(self, *, max_lines: int = MAX_LINES) -> Watcher:
        """A new reader; it gets the header and the tree as it is, then what happens."""
        watcher = Watcher(self._snapshot, self._unwatch, max_lines=max_lines)
        watcher.push(json.dumps(self._header()))
        watcher.push(self._snapshot())
        self._watchers.append(watcher)
        return watcher

    def _unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and self._session.tap is self:
            self._session.tap = None

    def _tell(self, event: dict[str, Any]) -> None:
        line = json.dumps(event)
        for watcher in self._watchers:
            watcher.push(line)

    def _header(self) -> dict[str, Any]:
        session = self._session
        sampling = session.sampling
        return {
            "format": FORMAT,
            "version": VERSION,
            "request_id": session.request.request_id,
            "choice": session.index,
            "mode": session.mode.value,
            "rule": sampling.rule.value,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "prompt_tokens": session.prompt_length,
            "prompt": self._text(session.token_ids[: session.prompt_length])[-_MOST_TEXT:],
        }

    def _snapshot(self) -> str:
        session = self._session
        return json.dumps(
            {
                "e": "tree",
                "t": self._now_us(),
                "length": len(session.token_ids),
                "text": self._text(session.token_ids[session.prompt_length :])[-_MOST_TEXT:],
                "root": [self._root, *self._token(session.token_ids[-1])],
                "nodes": list(map(self._entry, self._nodes)),
                "counts": self._counts.line(),
            }
        )

    # ----------------------------------------------------------------------------------------------------------- hooks

    def note_growth(self, worker_id: str, growth: GrowthBatch, place: int) -> None:
        """Show the session's part of a growth message, without nodes whose parent is not known here."""
        new, as_of, start = list[int](), growth.as_of[place], sum(growth.node_counts[:place])
        nodes = slice(start, start + growth.node_counts[place])
        columns = (growth.node_ids, growth.parents, growth.tokens, growth.acceptance)
        for name, above, token, acceptance in zip(*(column[nodes].tolist() for column in columns), strict=True):
            parent = self._ids.get((worker_id, growth.source, above)) if above else self._roots.get(as_of)
            if parent is None or (parent != self._root and parent not in self._nodes):
                continue
            node_id = self._child(parent, token)
            if node_id is None:
                node_id = next(self._next_id)
                self._nodes[node_id] = _Node(parent, token, acceptance)
                new.append(node_id)
            self._ids[worker_id, growth.source, name] = node_id
        self._counts.grown += len(new)
        event = {"e": "grow", "worker": worker_id, "as_of": as_of, "nodes": list(map(self._entry, new))}
        self._tell({**event, "t": self._now_us()})

    def note_verdict(self, outcome: Outcome, results: RoundResults) -> None:
        """Show the target's verdict; the outcome's tokens have been appended."""
        path, at, token_ids = list[int](), self._root, outcome.token_ids
        length = len(self._session.token_ids) - len(token_ids)
        for token in token_ids:
            node_id = self._child(at, token)
            at = next(self._next_id) if node_id is None else node_id
            path.append(at)
            length += 1
            self._roots[length] = at
        accepted = path[: outcome.accepted]
        below = self._below(path[-1]) if path else set(self._nodes)
        gone = [node_id for node_id in self._nodes if node_id not in below and node_id not in path]
        counts = self._counts
        counts.rounds += 1
        counts.selected += outcome.selected
        counts.accepted += len(accepted)
        counts.emitted += len(path)
        counts.abandoned += len(gone)
        event = {
            "e": "verdict",
            "t": self._us(self._session.committed_ns),
            "step": results.report.step_ns // 1000,
            "forward": results.report.forward_ns // 1000,
            "selected": outcome.selected,
            "accepted": accepted,
            "emitted": [[node_id, *self._token(token)] for node_id, token in zip(path, token_ids, strict=True)],
            "abandoned": gone,
        }
        if path:
            self._root = path[-1]
        self._forget({*gone, *path})
        for old in [length for length in self._roots if length < len(self._session.token_ids) - len(token_ids)]:
            del self._roots[old]
        self._tell(event)

    def note_delivered(self, text: str) -> None:
        """Note that the client has received the last verdict's tokens."""
        self._tell({"e": "deliver", "t": self._now_us(), "text": text})

    def note_end(self) -> None:
        """Show the end of the session, however it came."""
        session = self._session
        if rest := list(self._nodes):
            self._counts.abandoned += len(rest)
            self._forget(rest)
            self._tell({"e": "drop", "t": self._now_us(), "nodes": rest})
        reason = "cancelled" if session.result is None else session.result.finish_reason.value
        line = json.dumps({"e": "end", "t": self._now_us(), "reason": reason, "counts": self._counts.line()})
        for watcher in self._watchers:
            watcher.end(line)
        self._watchers.clear()
        session.tap = None

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _child(self, parent_id: int, token: int) -> int | None:
        for node_id, node in self._nodes.items():
            if node.parent == parent_id and node.token == token:
                return node_id
        return None

    def _below(self, root: int) -> set[int]:
        """Nodes below one; parents stand before their children."""
        found = {root}
        for node_id, node in self._nodes.items():
            if node.parent in found:
                found.add(node_id)
        return found - {root}

    def _forget(self, node_ids: Iterable[int]) -> None:
        for node_id in node_ids:
            self._nodes.pop(node_id, None)
        kept = {*self._nodes, *self._roots.values()}
        self._ids = {name: node_id for name, node_id in self._ids.items() if node_id in kept}

    # ----------------------------------------------------------------------------------------------------------- lines

    def _entry(self, node_id: int) -> list[Any]:
        node = self._nodes[node_id]
        return [node_id, node.parent, *self._token(node.token), round(node.acceptance, 4)]

    def _token(self, token: int) -> tuple[int, str]:
        # What has no text shows its id.
        return token, self._piece(token).decode("utf-8", "replace") or f"⟨{token}⟩"

    def _text(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, token_ids[-_MOST_TEXT:])).decode("utf-8", "replace")

    def _now_us(self) -> int:
        return self._us(clock.now_ns())

    def _us(self, at_ns: int) -> int:
        return max(0, at_ns - self._epoch_ns) // 1000


def watch(session: "Session", piece: Callable[[int], bytes], *, max_lines: int = MAX_LINES) -> Watcher:
    """Begin to watch a session; `close` the watcher in the end."""
    tap = session.tap
    if tap is None:
        # pyright resolves the package's link: to it this file's class and the one imported by name are two.
        tap = session.tap = SessionTap(session, piece)  # pyright: ignore[reportAttributeAccessIssue]
    return tap.watch(max_lines=max_lines)


def pieces(tokenizer: TextTokenizer | None) -> Callable[[int], bytes]:
    """The text of tokens, by a tokenizer; without one, none."""
    return tokenizer.piece if tokenizer is not None else lambda token: b""


def record(generations: Generations, checked: GenerationRequest, caller: Caller) -> Watcher | None:
    """Watch a request's first choice from its beginning, just after its start; return None if it has ended at once."""
    session = generations.live[caller.name, checked.request_id].sessions[0]
    if session.is_finished:
        return None
    return watch(session, pieces(generations.tokenizer), max_lines=_MOST_RECORDED)
