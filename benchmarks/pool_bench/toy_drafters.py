"""Toy drafters outside the target: they see commits late, and their growth arrives late, twice or after a loss again.

The toy model's choice after a text is a hash of the sum of `contribution(token, position)` over all of it, so a token
at a wrong place anywhere before changes it. A drafter knows that sum along its own tree; it proposes the right token as
often as its quality says. Each (session, place) has one drafter, whose tree holds what it believes to be alive.

Shapes: S sessions, D places, L nodes of a drafter at most, B rounds for which mail is kept, G records of a round.
"""

# compiled loops take positional arrays
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider.kernels.compiled import compiled
from outrider.kernels.pool.records import WORDS, RecordKind

__all__ = [
    "LATEST",
    "VOCABULARY",
    "Drafters",
    "Mail",
    "Sight",
    "choose",
    "contribution",
    "new_drafters",
    "new_mail",
    "plain_decode",
    "replace_worker",
    "run_drafters",
]

VOCABULARY = 48
NODES = 40
LATEST = 64
_SLOWEST = 3
_RECORDS = 4096
_GROWTH, _RESENT = int(RecordKind.GROWTH), int(RecordKind.RESENT)
_POSITIVE = (1 << 63) - 1


class Drafters(NamedTuple):
    """All drafters, as arrays [S, D] and [S, D, L].

    Attributes:
        worker: a number of its own for each worker that ever had the place; 0: the place is empty.
        known, known_sum: committed tokens that the drafter has seen, and the sum over them.
        next_id, count: of its nodes.
        down, up: rounds that commits take to it, and its growth to the target.
        asked, busy: the round in which a request for the whole tree arrives, and the one in which the tree does.
        pace: new nodes of a round at most.
        quality: how often it proposes the right token.
        ids, tokens, parents, sums: of its nodes; `parents` are indices, -1 the root; `sums` include the node.
        random: [1], where its random numbers are.
    """

    worker: Any
    known: Any
    known_sum: Any
    next_id: Any
    count: Any
    down: Any
    up: Any
    asked: Any
    busy: Any
    pace: Any
    quality: Any
    ids: Any
    tokens: Any
    parents: Any
    sums: Any
    random: Any


class Sight(NamedTuple):
    """What the drafters' surroundings know.

    Attributes:
        now: [1], the round.
        texts: [S, max_len], committed tokens.
        lengths: [B, S], how many of them at each round modulo B.
        since: [S], the rounds in which the rows opened.
        generations: [S].
        lost: [S, D], what the pool says.
    """

    now: Any
    texts: Any
    lengths: Any
    since: Any
    generations: Any
    lost: Any


class Mail(NamedTuple):
    """Records on their way to the target, by the round of their arrival modulo B.

    Attributes:
        records, floats: [B, G, 8] int32, and the same memory as float32.
        worker: [B, G] int64, who sent the record.
        count: [B] int64.
    """

    records: Any
    floats: Any
    worker: Any
    count: Any


def new_drafters(sessions: int, places: int, seed: int) -> Drafters:
    """Empty places."""

    def column(*shape: int, dtype: Any = np.int64) -> Any:
        return np.zeros((sessions, places, *shape), dtype)

    return Drafters(
        worker=column(),
        known=column(),
        known_sum=column(),
        next_id=column(),
        count=column(),
        down=column(),
        up=column(),
        asked=column(),
        busy=column(),
        pace=column(),
        quality=column(dtype=np.float64),
        ids=column(NODES),
        tokens=column(NODES),
        parents=column(NODES),
        sums=column(NODES),
        random=np.array([seed]),
    )


def new_mail() -> Mail:
    """Nothing on its way."""
    records = np.zeros((LATEST, _RECORDS, WORDS), np.int32)
    return Mail(
        records=records,
        floats=records.view(np.float32),
        worker=np.zeros(records.shape[:2], np.int64),
        count=np.zeros(LATEST, np.int64),
    )


@compiled
def mix(x: int) -> int:
    """64 bits, well stirred."""
    x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x14D049BB133111EB
    return x ^ (x >> 31)


@compiled
def contribution(token: int, position: int) -> int:
    """What a token at a position adds to the sum of a text."""
    return mix(token * 1_000_003 + position * 8_191 + 17)


@compiled
def choose(total: int) -> int:
    """The toy model's token after a text with this sum."""
    return (mix(total) & _POSITIVE) % VOCABULARY


@compiled
def plain_decode(text: Any, length: int, end: int, stops: Any, min_end: int) -> int:
    """Continue `text` token by token, from `length` to a stop token or `end`; the length that it has then."""
    total = 0
    for index in range(length):
        total += contribution(text[index], index)
    for index in range(length, end):
        text[index] = choose(total)
        total += contribution(text[index], index)
        if index >= min_end and text[index] in stops:
            return index + 1
    return end


@compiled
def _draw(drafters: Any, most: int) -> int:
    """A random number below `most`."""
    drafters.random[0] += 0x1E3779B97F4A7C15
    return (mix(drafters.random[0]) & _POSITIVE) % most


@compiled
def replace_worker(drafters: Any, row: int, place: int, worker: int, text: Any, length: int) -> None:
    """Put another drafter in a place; it knows `text`."""
    drafters.worker[row, place] = worker
    drafters.known[row, place] = length
    total = 0
    for index in range(length):
        total += contribution(text[index], index)
    drafters.known_sum[row, place] = total
    drafters.next_id[row, place] = 1
    drafters.count[row, place] = 0
    drafters.down[row, place] = _draw(drafters, _SLOWEST + 1)
    drafters.up[row, place] = _draw(drafters, _SLOWEST + 1)
    drafters.asked[row, place] = drafters.busy[row, place] = -1
    drafters.pace[row, place] = 3 if _draw(drafters, 2) > 0 else 20
    drafters.quality[row, place] = 0.3 + 0.7 * _draw(drafters, 1024) / 1024


@compiled
def run_drafters(drafters: Any, mail: Any, sight: Any, records: Any) -> int:
    """Let every drafter see what has reached it by now, answer requests, and grow; deliver what arrives next round.

    The number of `records` written: the mail of the round after this one. What a worker sent that has left its place
    since is dropped, as by whoever connects it.
    """
    now = sight.now[0]
    for row in range(drafters.worker.shape[0]):
        for place in range(drafters.worker.shape[1]):
            if drafters.worker[row, place] == 0:
                continue
            # One request at a time.
            if sight.lost[row, place] and now > drafters.busy[row, place]:
                drafters.asked[row, place] = now + drafters.down[row, place]
                drafters.busy[row, place] = drafters.asked[row, place] + 1 + drafters.up[row, place]
            at = max(now - drafters.down[row, place], sight.since[row]) % len(sight.lengths)
            for index in range(drafters.known[row, place], sight.lengths[at, row]):
                _see(drafters, row, place, sight.texts[row, index])
            _send(drafters, mail, now + 1 + drafters.up[row, place], row, place, sight)
    slot, count = (now + 1) % len(mail.count), 0
    for at in range(mail.count[slot]):
        record = mail.records[slot, at]
        row, place = record[1], record[0] >> 8 & 0xFF
        if record[2] != sight.generations[row] or mail.worker[slot, at] == drafters.worker[row, place]:
            records[count] = record
            count += 1
    mail.count[slot] = 0
    return count


@compiled
def _send(drafters: Any, mail: Any, arrival: int, row: int, place: int, sight: Any) -> None:
    """Send the whole tree if it was asked for, then new nodes, at times twice."""
    if drafters.asked[row, place] == sight.now[0]:
        _post(drafters, mail, arrival, row, place, sight.generations[row], -1)
        for node in range(drafters.count[row, place]):
            _post(drafters, mail, arrival, row, place, sight.generations[row], node)
    before = drafters.count[row, place]
    for _ in range(_draw(drafters, drafters.pace[row, place] + 1)):
        _grow(drafters, row, place)
    for copy in range(2 if _draw(drafters, 10) == 0 else 1):
        late = copy * _draw(drafters, 8)
        for node in range(before, drafters.count[row, place]):
            _post(drafters, mail, arrival + late, row, place, sight.generations[row], node)


@compiled
def _see(drafters: Any, row: int, place: int, token: int) -> None:
    """Move the root of a drafter's tree to a committed token."""
    parents, tokens = drafters.parents[row, place], drafters.tokens[row, place]
    ids, sums = drafters.ids[row, place], drafters.sums[row, place]
    moved = np.full(NODES, -2)
    kept, root = 0, -2
    for node in range(drafters.count[row, place]):
        parent = parents[node]
        if parent == -1 and tokens[node] == token:
            root = node
        elif (parent == root and root >= 0) or (parent >= 0 and moved[parent] >= 0):
            moved[node] = kept
            ids[kept], tokens[kept], sums[kept] = ids[node], tokens[node], sums[node]
            parents[kept] = -1 if parent == root else moved[parent]
            kept += 1
    drafters.count[row, place] = kept
    drafters.known_sum[row, place] += contribution(token, drafters.known[row, place])
    drafters.known[row, place] += 1


@compiled
def _grow(drafters: Any, row: int, place: int) -> None:
    """Add a node below the newest or any node, unless there is one."""
    count = drafters.count[row, place]
    parents, tokens, sums = drafters.parents[row, place], drafters.tokens[row, place], drafters.sums[row, place]
    parent = count - 1 if _draw(drafters, 4) > 0 else _draw(drafters, count + 1) - 1
    total = drafters.known_sum[row, place] if parent < 0 else sums[parent]
    is_right = _draw(drafters, 1024) < 1024 * drafters.quality[row, place]
    token = choose(total) if is_right else _draw(drafters, VOCABULARY)
    for node in range(count):
        if parents[node] == parent and tokens[node] == token:
            return
    if count == NODES:
        return
    position, above = drafters.known[row, place], parent
    while above >= 0:
        position, above = position + 1, parents[above]
    parents[count], tokens[count] = parent, token
    sums[count] = total + contribution(token, position)
    drafters.ids[row, place, count] = drafters.next_id[row, place]
    drafters.next_id[row, place] += 1
    drafters.count[row, place] += 1


@compiled
def _post(drafters: Any, mail: Any, arrival: int, row: int, place: int, generation: int, node: int) -> None:
    """Send a node; for -1 say that the whole tree follows."""
    slot = arrival % len(mail.count)
    at = mail.count[slot]
    assert at < mail.records.shape[1]
    mail.count[slot] += 1
    mail.worker[slot, at] = drafters.worker[row, place]
    record = mail.records[slot, at]
    record[:] = 0
    kind = _GROWTH if node >= 0 else _RESENT
    record[0], record[1], record[2] = kind | place << 8 | (1 << place) << 16, row, generation
    if node >= 0:
        parent = drafters.parents[row, place, node]
        record[3] = drafters.ids[row, place, node]
        record[4] = drafters.ids[row, place, parent] if parent >= 0 else 0
        record[5] = drafters.known[row, place]
        record[6] = drafters.tokens[row, place, node]
        # A function of the node: what is sent again says the same.
        certainty = (mix(drafters.sums[row, place, node] + place) & 1023) / 2048
        mail.floats[slot, at, 7] = np.float32(0.5 * drafters.quality[row, place] + certainty)
