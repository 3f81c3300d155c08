"""The drafter's trees against plain objects, one node at a time, over random sessions, proposals and commits.

`PlainSession` and `PlainCalibration` say what a tree and the calibration are; the loops over the pool are held
to them.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.draft_worker.session_growth import sessions_of

from outrider.draft_worker.drafters.ngram.calibration import NgramCalibration
from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, Proposals, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.drafting.acceptance_calibration import RELIABILITY_EDGES, RULES
from outrider.sampling import SamplingSpec, SpeculationMode

VOCAB, MAX_LEN, ROWS = 6, 80, 12
ONE = np.float32(1)


class RandomTrie(SharedTrie):
    """One that proposes at random, the same after the same tail until `seed` changes."""

    def __init__(self) -> None:
        super().__init__(NgramTrie(capacity=10, max_trie_depth=5), ProposalConfig())
        self.seed = 0

    def after(self, tail: Sequence[int]) -> list[tuple[int, int, float, int, int]]:
        """Token, parent, share, count and context of each proposal; siblings differ."""
        drawn, proposals = random.Random(f"{self.seed} {tail}"), dict[tuple[int, int], tuple[float, int, int]]()
        for _ in range(drawn.choice([0, 3, 12, 20])):
            last = len(proposals) - 1
            parent = last if drawn.random() < 0.7 else drawn.randrange(-1, last + 1)
            numbers = drawn.choice([0.02, 0.4, 0.9, 1.0, 1.0]), drawn.choice([1, 20, 20]), drawn.choice([5, 16, 16])
            proposals.setdefault((drawn.randrange(VOCAB), parent), numbers)
        return [(*node, *numbers) for node, numbers in proposals.items()]

    def propose(self, texts: TextTails) -> Proposals:
        rows = [self.after(tail[:length].tolist()) for tail, length in zip(texts.tails, texts.lengths, strict=True)]
        tokens, parents, counts, contexts = np.full((4, len(rows), 20), 77, np.int32)
        shares = np.full((len(rows), 20), 77.0)
        for row, own in enumerate(rows):
            for place, numbers in enumerate(own):
                for column, number in zip((tokens, parents, shares, counts, contexts), numbers, strict=True):
                    column[row, place] = number
        found = np.array([(len(own), 1) for own in rows], np.int32)
        return Proposals(tokens, parents, shares, counts, contexts, found)

    def add(self, tokens: Sequence[int], *, start: int = 0) -> bool:
        return True


@dataclass
class PlainNode:
    """A node, or a root."""

    node_id: int
    acceptance: Any = ONE
    value: Any = ONE
    bucket: int = 0
    children: dict[int, "PlainNode"] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The token of the likeliest child, of equals the first."""
        return max(self.children, key=lambda token: self.children[token].acceptance)

    def revalue(self) -> None:
        """Recompute the values below."""
        for child in self.children.values():
            child.value = self.value * child.acceptance
            child.revalue()

    @property
    def size(self) -> int:
        """Nodes below."""
        return sum(1 + child.size for child in self.children.values())


class PlainCalibration:
    """The estimates of `calibration` as they begin, and what they become."""

    def __init__(self, calibration: NgramCalibration) -> None:
        self.learned = calibration.learned.tolist()
        self._prior_hits = [estimate * 200 for estimate in self.learned]
        self._seen = [(0, 0)] * len(self.learned)
        self.bins = {rule: [[0, 0.0, 0] for _ in range(len(RELIABILITY_EDGES) + 1)] for rule in RULES}

    def observe(self, node: PlainNode, *, came_true: bool) -> None:
        """Count one child of a committed token."""
        rule, estimate = RULES[node.bucket // (len(self.learned) // len(RULES))], float(node.acceptance)
        counts = self.bins[rule][bisect_left(RELIABILITY_EDGES, estimate)]
        counts[0], counts[1], counts[2] = counts[0] + 1, counts[1] + estimate, counts[2] + came_true
        hits, trials = self._seen[node.bucket]
        self._seen[node.bucket] = hits, trials = hits + came_true, trials + 1
        self.learned[node.bucket] = (self._prior_hits[node.bucket] + hits) / (200 + trials)


class PlainSession:
    """A session and its tree."""

    def __init__(self, start: SessionStart, trie: RandomTrie, buckets: NgramCalibration) -> None:
        self.start, self.trie, self.buckets = start, trie, buckets
        self.tokens, self.pending = list(start.prompt), list[int]()
        self.root = self.head = PlainNode(0)
        self.made = 0
        self.new: list[tuple[int, int, int, float]] = []

    @property
    def depth_limit(self) -> int:
        return min(self.start.limits.max_depth, self.start.end(MAX_LEN) - len(self.tokens))

    def settle(self, calibration: PlainCalibration) -> None:
        """Commit what is pending."""
        node: PlainNode | None = self.root
        for token in self.pending:
            for proposed, child in node.children.items() if node is not None else ():
                calibration.observe(child, came_true=proposed == token)
            node = node.children.get(token) if node is not None else None
        if self.pending:
            self.root = PlainNode(0) if node is None or self.start.is_sync else node
            self.root.value = ONE
            self.root.revalue()
        self.head = self.root
        self.pending.clear()

    def likeliest(self) -> list[tuple[int, PlainNode]]:
        """Tokens and nodes on the way from child to likeliest child."""
        path, node = [], self.root
        while node.children:
            path.append((node.best, node.children[node.best]))
            node = node.children[node.best]
        return path

    def match(self, calibration: PlainCalibration, min_value: float) -> bool:
        """Grow the settled tree; return whether it leads."""
        self.join([], calibration, min_value)
        for _ in range(0 if self.start.is_sync else 2):
            path = self.likeliest()
            ends = path and path[-1][0] in self.start.stop_ids
            if not 0 < len(path) < self.depth_limit or ends or path[-1][1].value < 0.1:
                break
            self.join(path, calibration, min_value)
        depth = -(-self.depth_limit // 2)
        reached = sum(float(node.value) for _, node in self.likeliest()[: max(depth, 0)])
        return reached >= 2 / 3 * depth and not self.start.is_sync

    def join(self, path: Sequence[tuple[int, PlainNode]], calibration: PlainCalibration, min_value: float) -> None:
        """Add what may follow the text with this path."""
        tail = [*self.tokens, *(token for token, _ in path)][-self.trie.suffix_tokens :]
        top = (path[-1][1] if path else self.root, len(path), False)
        places: list[tuple[PlainNode | None, int, bool]] = []
        greedy = int(self.start.sampling.temperature > 0)
        columns = self.trie.propose(TextTails.of([tail], self.trie.suffix_tokens))
        buckets = self.buckets.estimate(columns, np.array([greedy]))[0][0].tolist()
        for (token, parent, *_), bucket in zip(self.trie.after(tail), buckets, strict=False):
            above, depth, is_end = places[parent] if parent >= 0 else top
            node = None
            if above is not None and depth < self.depth_limit and not is_end:
                node = above.children.get(token)
                left = ONE
                for child in above.children.values():
                    left -= child.acceptance
                acceptance = max(min(np.float32(calibration.learned[bucket]), left), np.float32(0))
                has_room = self.root.size < self.start.limits.max_live_nodes
                if node is None and has_room and above.value * acceptance >= min_value:
                    self.made += 1
                    node = PlainNode(self.made, acceptance, above.value * acceptance, bucket)
                    above.children[token] = node
                    parent_id = 0 if above is self.root else above.node_id
                    self.new.append((node.node_id, parent_id, token, float(acceptance)))
            places.append((node, depth + 1, token in self.start.stop_ids))


class Twins:
    """A drafter, and the same as plain objects."""

    def __init__(self, seed: int) -> None:
        self.random, self.trie = random.Random(seed), RandomTrie()
        self.drafter = NgramDrafter(
            self.trie, vocab_size=VOCAB, max_model_len=MAX_LEN, max_sessions=ROWS, min_value=0.02
        )
        # Without decay, the order of observations does not matter; a strong prior keeps trees large.
        self.drafter.calibration = NgramCalibration(prior_strength=200, decay=1.0)
        self.calibration = PlainCalibration(self.drafter.calibration)
        self.sessions: dict[tuple[int, int], PlainSession] = {}
        self.due: dict[tuple[int, int], PlainSession] = {}
        self.opened = 0

    def open(self) -> None:
        draw, self.opened = self.random, self.opened + 1
        limits = GrowthLimits(
            max_depth=draw.choice([1, 4, 9, 20, 20]),
            max_live_nodes=draw.choice([1, 12, 64, 64, 256]),
            mode=draw.choice([SpeculationMode.ASYNC, SpeculationMode.ASYNC, SpeculationMode.SYNC]),
        )
        sampling = SamplingSpec(
            temperature=draw.choice([0.0, 0.7]),
            stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 0, 1, 2]))),
            max_new_tokens=draw.choice([12, 100]),
        )
        start = SessionStart(
            key=(1, self.opened),
            owner=None,
            epoch=1,
            prompt=[draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 9]))],
            output=(),
            sampling=sampling,
            limits=limits,
        )
        self.drafter.open(start)
        session = PlainSession(start, self.trie, NgramCalibration())
        self.sessions[start.key] = self.due[start.key] = session

    def commit(self, session: PlainSession) -> None:
        tokens = list[int]()
        for _ in range(min(self.random.choice([1, 1, 3, 8]), MAX_LEN - len(session.tokens))):
            # Mostly along the tree, if not always by the likeliest child.
            follows = session.head.children and self.random.random() < 0.9
            token = session.head.best if follows else self.random.randrange(VOCAB)
            tokens.append(token)
            session.head = session.head.children.get(token, PlainNode(0))
        if tokens:
            self.drafter.commit(session.start.key, tokens)
            self.due[session.start.key] = session
            session.tokens += tokens
            session.pending += tokens

    def close(self) -> None:
        key = self.random.choice(list(self.sessions))
        self.sessions.pop(key).settle(self.calibration)
        self.due.pop(key, None)
        self.drafter.close(key)

    def match(self) -> int:
        """Compare the new nodes of all sessions that are due; return how many there are."""
        left_out = {key for key in self.due if self.random.random() < 0.2}
        growth = self.drafter.match(left_out)
        found = {own.session_id: own for own in sessions_of(growth)}
        due = [self.due.pop(key) for key in list(self.due) if key not in left_out]
        for session in due:
            session.settle(self.calibration)
        for session in due:
            key = session.start.key
            leads, own = session.match(self.calibration, 0.02), found.pop(key[1])
            nodes = list(zip(own.node_ids, own.parents, own.tokens, own.acceptance, strict=True))
            assert nodes == session.new
            assert own.as_of == len(session.tokens)
            assert own.complete == (leads or session.start.is_sync)
            assert (key in self.drafter.leading) == leads
            session.new.clear()
        assert not found
        return 0 if growth is None else growth.rows

    def check_calibration(self) -> None:
        assert self.drafter.calibration.learned.tolist() == self.calibration.learned
        found = {own.rule: own for own in self.drafter.calibration.reliability()}
        for rule, bins in self.calibration.bins.items():
            children, predicted, hits = map(list, zip(*bins, strict=True))
            assert (rule in found) == any(children)
            if rule in found:
                assert (found[rule].children, found[rule].hits) == (children, hits)
                assert found[rule].predicted == pytest.approx(predicted)

    def go_on(self, rounds: int) -> int:
        """Random rounds; return how many nodes came."""
        draw, nodes = self.random, 0
        for _ in range(rounds):
            self.trie.seed = draw.randrange(3)
            if self.sessions and draw.random() < 0.7:
                self.close()
            while len(self.sessions) < ROWS and draw.random() < 0.7:
                self.open()
            nodes += self.match()
            self.check_calibration()
            for session in draw.choices(list(self.sessions.values()), k=len(self.sessions) // 2):
                self.commit(session)
        return nodes


@pytest.mark.parametrize("seed", range(6))
def test_trees_are_those_of_plain_objects(seed: int):
    assert Twins(seed).go_on(150) > 1000
