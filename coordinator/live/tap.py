"""What happens to one session's token tree, told to those who watch it: a line of JSON an event.

    growth grafted ──> grow      batch sent ──> send      verdict, root moved ──> verdict      client told ──> deliver

A session has a tap only while somebody watches; else what is below costs it a comparison with None. The tap keeps a
table of the nodes that its watchers know of, and finds what is new and what is gone by comparing the mirror with it, so
it needs to be told when, never what. docs/live-page.md describes every line.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.coordinator import clock
from outrider.coordinator.live.mirror_nodes import mirror_nodes
from outrider.coordinator.live.watched import SentTree, WatchedSession
from outrider.coordinator.live.watcher import MAX_LINES, Watcher
from outrider.coordinator.messages import SessionVerdict, VerifyResult

FORMAT, VERSION = "outrider-tree", 1
# Of the prompt and of the text so far, what a header and a snapshot hold.
_MOST_TEXT = 20_000


@dataclass(slots=True)
class _Node:
    """A guess that watchers know of; `key`: of its mirror."""

    key: int
    parent: int
    token: int
    acceptance: float
    is_sent: bool = False


@dataclass(slots=True)
class _Counts:
    """Sums over the rounds that the tap has seen."""

    rounds: int = 0
    grown: int = 0
    sent: int = 0
    accepted: int = 0
    rejected: int = 0
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

    def __init__(self, session: WatchedSession, piece: Callable[[int], bytes]) -> None:
        self._session, self._piece = session, piece
        self._mirror_nodes = mirror_nodes(session.mirror)
        self._epoch_ns = clock.now_ns()
        self._watchers: list[Watcher] = []
        self._next_id = itertools.count(1)
        self._root = 0
        self._nodes: dict[int, _Node] = {}
        self._ids: dict[int, int] = {}
        self._sent: list[int] | None = None
        self._verdict: dict[str, Any] | None = None
        self._counts = _Counts()
        self._sync()
        if session.submission is not None:
            self._sent = self._take_sent(session.submission)

    # -------------------------------------------------------------------------------------------------------- watchers

    def watch(self, *, max_lines: int = MAX_LINES) -> Watcher:
        """A new reader; it gets the header and the tree as it is, then what happens."""
        watcher = Watcher(self._snapshot, self._unwatch, max_lines=max_lines)
        watcher.push(json.dumps(self._header()))
        watcher.push(self._snapshot())
        self._watchers.append(watcher)
        return watcher

    @property
    def watchers(self) -> int:
        """Readers."""
        return len(self._watchers)

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
                "nodes": [self._entry(node_id, int(node.is_sent)) for node_id, node in self._nodes.items()],
                "counts": self._counts.line(),
            }
        )

    # ----------------------------------------------------------------------------------------------------------- hooks

    def note_growth(self, worker_id: str, *, as_of: int) -> None:
        """Growth was grafted, or turned out to be of no use."""
        new, gone = self._sync()
        now_us = self._now_us()
        if gone:
            self._abandon(gone)
            self._tell({"e": "drop", "t": now_us, "nodes": gone})
        self._tell(
            {"e": "grow", "t": now_us, "worker": worker_id, "as_of": as_of, "nodes": list(map(self._entry, new))}
        )

    def note_sent(self) -> None:
        """The session's tree is on its way to a target."""
        submission = self._session.submission
        assert submission is not None
        self._sync()
        if self._sent is not None:
            # The last one was never answered: its target is gone, or had no time for it.
            self._tell({"e": "lost", "t": self._us(submission.submitted_ns)})
            for node_id in self._sent:
                if node_id in self._nodes:
                    self._nodes[node_id].is_sent = False
        self._sent = self._take_sent(submission)
        self._tell(
            {
                "e": "send",
                "t": self._us(submission.submitted_ns),
                "waited": submission.waited_ns // 1000,
                "length": len(self._session.token_ids),
                "nodes": self._sent,
            }
        )

    def note_verdict(
        self, submission: SentTree, verdict: SessionVerdict, result: VerifyResult, token_ids: Sequence[int]
    ) -> None:
        """The target has chosen: `token_ids` are appended, and the mirror has not moved yet."""
        sent, self._sent = self._sent or [], None
        walked = [sent[number - 1] for number in verdict.accepted_nodes]
        # Where a stop string ended the text, what was accepted behind it is of no use to anybody.
        kept, cut = walked[: len(token_ids)], set(walked[len(token_ids) :])
        path = list(kept)
        for token in token_ids[len(kept) :]:
            node_id = self._child(path[-1] if path else self._root, token)
            path.append(next(self._next_id) if node_id is None else node_id)
        accepted = set(kept)
        self._verdict = {
            "e": "verdict",
            "t": self._us(self._session.committed_ns),
            "sent": self._us(submission.submitted_ns),
            "waited": submission.waited_ns // 1000,
            "step": result.step_ns // 1000,
            "forward": result.forward_ns // 1000,
            "accepted": kept,
            "rejected": [node_id for node_id in sent if node_id not in accepted and node_id not in cut],
            "emitted": [[node_id, *self._token(token)] for node_id, token in zip(path, token_ids, strict=True)],
        }
        if path:
            self._root = path[-1]

    def note_moved(self) -> None:
        """The mirror's root stands behind the tokens of the last verdict."""
        if self._verdict is not None:
            self._settle(self._sync_after_move())

    def note_delivered(self, text: str) -> None:
        """The client has been told of the last verdict's tokens."""
        if self._verdict is not None:
            # The session has ended, and its mirror is not moved any more.
            self._settle(list(self._nodes))
        self._tell({"e": "deliver", "t": self._now_us(), "text": text})

    def note_end(self) -> None:
        """The session has ended in whatever way."""
        session = self._session
        if rest := list(self._nodes):
            self._abandon(rest)
            self._tell({"e": "drop", "t": self._now_us(), "nodes": rest})
        reason = "cancelled" if session.result is None else session.result.finish_reason.value
        line = json.dumps({"e": "end", "t": self._now_us(), "reason": reason, "counts": self._counts.line()})
        for watcher in self._watchers:
            watcher.end(line)
        self._watchers.clear()
        session.tap = None

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _settle(self, gone: Iterable[int]) -> None:
        """Tells of the verdict, with what has become of the nodes that it leaves behind."""
        verdict, self._verdict = self._verdict, None
        assert verdict is not None
        accepted, rejected, emitted = verdict["accepted"], verdict["rejected"], verdict["emitted"]
        counts = self._counts
        counts.rounds += 1
        counts.sent += len(accepted) + len(rejected)
        counts.accepted += len(accepted)
        counts.rejected += len(rejected)
        counts.emitted += len(emitted)
        told = {*rejected, *(node_id for node_id, *_ in emitted)}
        verdict["abandoned"] = [node_id for node_id in gone if node_id not in told]
        self._forget(told)
        self._abandon(verdict["abandoned"])
        self._tell(verdict)

    def _sync(self) -> tuple[list[int], list[int]]:
        """Takes in what the mirror holds; ids of what is new, and of what is gone though nobody has judged it."""
        new, seen = [], set()
        for key, parent, token, acceptance in self._mirror_nodes.read():
            seen.add(key)
            if key not in self._ids:
                node_id = self._ids[key] = next(self._next_id)
                parent_id = self._ids.get(parent, self._root)
                self._nodes[node_id] = _Node(key, parent_id, token, acceptance)
                new.append(node_id)
        self._counts.grown += len(new)
        # What is on its way is judged by its verdict, whatever the mirror has made of it meanwhile.
        gone = [node_id for node_id, node in self._nodes.items() if node.key not in seen and not node.is_sent]
        return new, gone

    def _take_sent(self, submission: SentTree) -> list[int]:
        """[n] ids of a tree that is on its way, whose nodes may have gone from a chain since."""
        tree, sent = submission.tree, []
        for number, key in enumerate(self._mirror_nodes.keys_of(tree)):
            if key not in self._ids:
                above = tree.parents[number]
                node_id = self._ids[key] = next(self._next_id)
                self._nodes[node_id] = _Node(key, sent[above - 1] if above else self._root, tree.tokens[number], 1.0)
                self._counts.grown += 1
            sent.append(self._ids[key])
            self._nodes[sent[-1]].is_sent = True
        return sent

    def _sync_after_move(self) -> list[int]:
        alive = {node.key for node in self._mirror_nodes.read()}
        return [node_id for node_id, node in self._nodes.items() if node.key not in alive]

    def _child(self, parent_id: int, token: int) -> int | None:
        for node_id, node in self._nodes.items():
            if node.parent == parent_id and node.token == token:
                return node_id
        return None

    def _abandon(self, node_ids: Sequence[int]) -> None:
        self._counts.abandoned += len(node_ids)
        self._forget(node_ids)

    def _forget(self, node_ids: Iterable[int]) -> None:
        for node_id in node_ids:
            if (node := self._nodes.pop(node_id, None)) is not None:
                del self._ids[node.key]

    # ----------------------------------------------------------------------------------------------------------- lines

    def _entry(self, node_id: int, *state: int) -> list[Any]:
        node = self._nodes[node_id]
        return [node_id, node.parent, *self._token(node.token), round(node.acceptance, 4), *state]

    def _token(self, token: int) -> tuple[int, str]:
        # What has no text shows its id.
        return token, self._piece(token).decode("utf-8", "replace") or f"⟨{token}⟩"

    def _text(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, token_ids[-_MOST_TEXT:])).decode("utf-8", "replace")

    def _now_us(self) -> int:
        return self._us(clock.now_ns())

    def _us(self, at_ns: int) -> int:
        return max(0, at_ns - self._epoch_ns) // 1000


def watch(session: WatchedSession, piece: Callable[[int], bytes], *, max_lines: int = MAX_LINES) -> Watcher:
    """Begins to watch a session; `close` the watcher in the end."""
    if session.tap is None:
        session.tap = SessionTap(session, piece)
    return session.tap.watch(max_lines=max_lines)
