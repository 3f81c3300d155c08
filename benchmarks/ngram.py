"""The n-gram drafter by itself: how fast its trie inserts and matches, what memory it takes, and whether matches wait.

    python benchmarks/ngram.py

insert   tokens of a text that repeats itself, in one go, into an empty trie
match    proposals for suffixes of that text, for all sessions at once, while nothing else runs
soak     many more tokens, until the trie is full and evicts; memory before and after
stalls   on the full trie: matches for all sessions every millisecond, while tokens are inserted as fast as possible.
         A match waits for one insertion at most, and is put off if that lasts too long; it counts with its wait.

Wall-clock times include what else the machine does, so the limits of stalls are for CPU time, which the system counts
by thread: how long an insertion holds the lock, which is how long a match waits, and a match.

    python benchmarks/ngram.py --soak-tokens 20000000 --stall-rounds 5000      some minutes
    python benchmarks/ngram.py --growth 1 16 64                                what growth by n-grams takes, alone

growth   CPU time of the thread that grows: `NgramDrafter.commit` of 13 tokens for each session, and the
         `NgramDrafter.match` after that, with the looks ahead; in a text that the trie has seen four times

The text: passages of 2,000 tokens, of which a part is quoted again and again, and words by Zipf's law between quotes.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

_VOCABULARY = 32_000
_PASSAGES, _PASSAGE = 50, 2_000
_AT_ONCE = 512
# Of growth: tokens of a prompt, and of a commit.
_PROMPT, _COMMITTED = 64, 13
_MATCH_LIMIT_MS, _WAIT_LIMIT_MS = 1.0, 2.0


class Text:
    """An endless text that repeats itself.

    Args:
        seed: the same gives the same text.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._passages = [self._words(_PASSAGE) for _ in range(_PASSAGES)]

    def _words(self, count: int) -> Any:
        return self._random.zipf(1.3, size=count).astype(np.int64) % _VOCABULARY

    def tokens(self, count: int) -> list[int]:
        """The next so many tokens."""
        parts, length = [], 0
        while length < count:
            passage = self._passages[self._random.integers(_PASSAGES)]
            first = int(self._random.integers(_PASSAGE - 5))
            parts += [passage[first : first + int(self._random.integers(5, 100))], self._words(20)]
            length += len(parts[-1]) + len(parts[-2])
        return np.concatenate(parts)[:count].tolist()


def resident_mb() -> float:
    """Memory of this process that is there, in MB; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 1e6 if status.is_file() else 0.0


def insert(trie: Any, tokens: Sequence[int]) -> float:
    """Seconds that it takes."""
    began, suffix = time.perf_counter(), trie.max_trie_depth - 1
    for first in range(0, len(tokens), _AT_ONCE):
        before = min(first, suffix)
        trie.insert((tokens[first - before : first + _AT_ONCE], before))
        trie.make_ready(_AT_ONCE * trie.max_trie_depth)
    return time.perf_counter() - began


def queries(tokens: Sequence[int], sessions: int, random: Any) -> list[Sequence[int]]:
    """A place in the text for each session, and what stands before it."""
    return [tokens[place : place + 32] for place in random.integers(0, max(len(tokens) - 32, 1), size=sessions)]


def match_times_ms(match: Any, tokens: Sequence[int], *, sessions: int, rounds: int, pause_s: float = 0.0) -> Any:
    """[rounds, 2] milliseconds that it takes to match all sessions, by the clock and of this thread's CPU time."""
    random, times = np.random.default_rng(1), []
    for _ in range(rounds):
        texts = queries(tokens, sessions, random)
        time.sleep(pause_s)
        began, cpu_began = time.perf_counter_ns(), time.thread_time_ns()
        match(texts)
        times.append((time.perf_counter_ns() - began, time.thread_time_ns() - cpu_began))
    return np.array(times) / 1e6


def spread(times: Any) -> dict[str, float]:
    """Of [n, 2] milliseconds."""
    by_clock, of_cpu = times.T
    return {
        "median_ms": float(np.median(by_clock)),
        "p99_ms": float(np.percentile(by_clock, 99)),
        "longest_ms": float(by_clock.max()),
        "longest_cpu_ms": float(of_cpu.max()),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts, one after the other on one trie."""
    from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, TextTails, propose
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
    from outrider.draft_worker.drafters.ngram.trie import NgramTrie
    from outrider.kernels.compiled import IS_COMPILED
    from outrider.worker import share_interpreter

    # As every worker does.
    share_interpreter()
    config, text, sessions = ProposalConfig(), Text(), options.sessions
    tiny = NgramTrie(capacity=100)
    tiny.insert(([1, 2, 1, 2], 0))
    suffix = tiny.max_trie_depth - 1
    propose(tiny, TextTails.of([[1]], suffix), config)
    before_mb = resident_mb()
    trie = NgramTrie(capacity=options.capacity)
    figures: dict[str, Any] = {"compiled": IS_COMPILED, "sessions": sessions, "capacity": options.capacity}

    tokens = text.tokens(options.tokens)
    seconds = insert(trie, tokens)
    figures["insert"] = {"tokens": len(tokens), "seconds": seconds, "us_per_token": 1e6 * seconds / len(tokens),
                         "nodes": len(trie)}  # fmt: skip
    times = match_times_ms(
        lambda texts: propose(trie, TextTails.of(texts, suffix), config), tokens, sessions=sessions, rounds=200
    )
    figures["match"] = spread(times)

    seconds, soaked, rss = 0.0, 0, [resident_mb()]
    while soaked < options.soak_tokens:
        piece = text.tokens(min(1_000_000, options.soak_tokens - soaked))
        seconds += insert(trie, piece)
        soaked += len(piece)
        rss.append(resident_mb())
        tokens = piece
    figures["soak"] = {"tokens": soaked, "seconds": seconds, "nodes": len(trie), "evicted": trie.evicted,
                       "reserved_mb": trie.reserved_bytes / 1e6,
                       "resident_mb": [round(mb - before_mb) for mb in rss]}  # fmt: skip

    shared = SharedTrie(trie, config)
    shared.start()

    def match(texts: Sequence[Sequence[int]]) -> object:
        return shared.propose(TextTails.of(texts, suffix))

    alone = match_times_ms(match, tokens, sessions=sessions, rounds=options.stall_rounds, pause_s=1e-3)
    shared.counts.longest_wait_ns = shared.counts.longest_hold_ns = 0
    # More than it can insert meanwhile.
    shared.add(text.tokens(min(2_000_000, 150 * options.stall_rounds)))
    beside = match_times_ms(match, tokens, sessions=sessions, rounds=options.stall_rounds, pause_s=1e-3)
    inserted = shared.counts.inserted_tokens
    shared.stop()
    shared.join(60)
    figures["stalls"] = {"rounds": options.stall_rounds, "alone": spread(alone), "beside_insertions": spread(beside),
                         "inserted_tokens": inserted, "evicted": trie.evicted - figures["soak"]["evicted"],
                         "put_off": shared.counts.put_off,
                         "longest_wait_ms": shared.counts.longest_wait_ns / 1e6,
                         "longest_hold_cpu_ms": shared.counts.longest_hold_ns / 1e6,
                         "most_tokens_at_once": shared.counts.most_at_once}  # fmt: skip
    return figures


def _settle(trie: Any) -> None:
    """Wait until everything queued is inserted."""
    while trie.waiting_tokens > 0 and not trie.failed:
        time.sleep(0.005)


def growth_times(sessions: int, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time of a round of so many sessions, medians, and nodes of a session and round."""
    from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter, NgramDrafterConfig, warm_up
    from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
    from outrider.draft_worker.drafters.ngram.trie import NgramTrie
    from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
    from outrider.sampling import SamplingSpec

    warm_up()
    text = Text().tokens(30_000)
    trie = SharedTrie(NgramTrie(capacity=3_000_000), ProposalConfig(), patience_s=10)
    trie.start()
    for _ in range(4):
        trie.add(text)
    _settle(trie)
    config = NgramDrafterConfig(vocab_size=_VOCABULARY, max_model_len=4096, max_sessions=sessions)
    drafter = NgramDrafter(trie, config)
    longest = _PROMPT + _COMMITTED * rounds
    begins = np.random.default_rng(1).integers(0, len(text) - longest, size=sessions).tolist()
    sampling, limits = SamplingSpec(max_new_tokens=4096), GrowthLimits(max_depth=2 * _COMMITTED)
    for number, begin in enumerate(begins):
        prompt = text[begin : begin + _PROMPT]
        drafter.open(
            SessionStart(
                key=(1, number), owner=None, epoch=1, prompt=prompt, output=[], sampling=sampling, limits=limits
            )
        )
    drafter.match()
    times, nodes = [], 0
    for length in range(_PROMPT, longest, _COMMITTED):
        _settle(trie)
        began = time.thread_time_ns()
        for number, begin in enumerate(begins):
            drafter.commit((1, number), text[begin + length : begin + length + _COMMITTED])
        committed = time.thread_time_ns()
        growth = drafter.match()
        times.append((committed - began, time.thread_time_ns() - committed))
        nodes += growth.rows if growth is not None else 0
    trie.stop()
    trie.join(60)
    commit_ms, match_ms = (np.median(times, axis=0) / 1e6).tolist()
    return {"sessions": sessions, "commit_ms": commit_ms, "match_ms": match_ms, "nodes": nodes / rounds / sessions}


def show_growth(figures: Sequence[dict[str, float]], console: Console) -> None:
    """The table of `--growth`."""
    table = Table("sessions", "commit", "match", "both", "nodes of a session", title="a round, CPU time")
    for row in figures:
        both_ms = row["commit_ms"] + row["match_ms"]
        times = (f"{figure:.2f} ms" for figure in (row["commit_ms"], row["match_ms"], both_ms))
        table.add_row(str(row["sessions"]), *times, f"{row['nodes']:.1f}")
    console.print(table)


def show(figures: dict[str, Any], console: Console) -> None:
    """The table."""
    table = Table("", "figure", "target", title="n-gram drafter" + ("" if figures["compiled"] else ", plain Python"))
    of_insert, soak, stalls = figures["insert"], figures["soak"], figures["stalls"]
    a_token = f"{of_insert['us_per_token']:.1f} us a token, {of_insert['nodes']:,} nodes"
    table.add_row(f"insert {of_insert['tokens']:,} tokens", f"{of_insert['seconds']:.1f} s, {a_token}")
    limit = f"below {_MATCH_LIMIT_MS} ms" if figures["compiled"] else ""
    table.add_row(f"match and build, {figures['sessions']} sessions", _words(figures["match"]), limit)
    table.add_row(f"soak {soak['tokens']:,} tokens",
                  f"{soak['nodes']:,} nodes, {soak['evicted']:,} evicted; {max(soak['resident_mb'])} MB at most, "
                  f"{soak['resident_mb'][-1]} at the end", f"{soak['reserved_mb']:.0f} MB and the text")  # fmt: skip
    table.add_row("matches without insertions", _words(stalls["alone"]))
    table.add_row("matches beside insertions", _words(stalls["beside_insertions"]))
    table.add_row("longest wait for an insertion",
                  f"{stalls['longest_wait_ms']:.2f} ms, {stalls['put_off']} put off, "
                  f"{stalls['inserted_tokens']:,} tokens inserted meanwhile")  # fmt: skip
    table.add_row("longest insertion under the lock",
                  f"{stalls['longest_hold_cpu_ms']:.2f} ms of CPU time, {stalls['most_tokens_at_once']} tokens at most",
                  f"below {_WAIT_LIMIT_MS} ms")  # fmt: skip
    console.print(table)


def _words(times: dict[str, float]) -> str:
    by_clock = f"{times['median_ms']:.2f} ms, 99 %: {times['p99_ms']:.2f} ms, longest {times['longest_ms']:.2f} ms"
    return f"{by_clock} ({times['longest_cpu_ms']:.2f} of CPU time)"


def run(arguments: Sequence[str]) -> int:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens that are inserted first")
    parser.add_argument("--sessions", type=int, default=64, help="texts that are matched at once")
    parser.add_argument("--soak-tokens", type=int, default=2_000_000, help="tokens that are inserted afterwards")
    parser.add_argument("--capacity", type=int, default=10_000_000, help="nodes of the trie")
    parser.add_argument("--stall-rounds", type=int, default=2_000, help="matches that are looked at for waits")
    parser.add_argument("--growth", type=int, nargs="+", help="measure growth alone, for so many sessions each")
    parser.add_argument("--growth-rounds", type=int, default=60, help="commits of each session")
    parser.add_argument("--no-numba", action="store_true", help="as on a machine without numba")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.no_numba:
        sys.modules["numba"] = None  # pyright: ignore[reportArgumentType]
    if options.growth:
        rounds = [growth_times(sessions, options.growth_rounds) for sessions in options.growth]
        if options.json:
            print(json.dumps(rounds, indent=1))  # noqa: T201
        else:
            show_growth(rounds, Console(width=140))
        return 0
    figures = measure(options)
    if options.json:
        print(json.dumps(figures, indent=1))  # noqa: T201
    else:
        show(figures, Console(width=140))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
