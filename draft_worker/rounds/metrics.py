"""A draft worker's metrics."""

from typing import TYPE_CHECKING

from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.loop import GrowthLoop
from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie


def draft_metrics(loop: GrowthLoop, drafters: Drafters, *, model_name: str) -> Describe:
    """Describe a growth loop that is ready, and its drafters; any thread may ask."""

    def describe(families: Families) -> None:
        load = loop.load()
        gauges = WorkerGauges(
            sessions=load.sessions,
            slots_used=load.slots_used,
            slots_cached=0,
            slots_total=load.slots_total,
            waiting=loop.waiting,
            step_age_s=loop.watch.age_s,
        )
        describe_worker(families, loop.counts, gauges, role="draft", model_name=model_name)
        families.counter(
            "draft_holds", "Times that a coordinator did not read growth and its sessions rested.", loop.holds
        )
        if drafters.ngram is not None:
            describe_ngram(families, drafters.ngram.trie)

    return describe


def describe_ngram(families: Families, shared: "SharedTrie") -> None:
    """Describe what the n-gram drafter's trie has done."""
    counts, trie = shared.counts, shared.trie
    families.counter("draft_ngram_matches", "Texts that were looked for in the trie.", counts.matches)
    families.counter("draft_ngram_hits", "Of these, texts that end as one before that went on.", counts.hits)
    families.counter("draft_ngram_matched_tokens", "Of the longest suffixes found, in sum.", counts.matched_tokens)
    families.counter("draft_ngram_guessed_nodes", "Nodes of all trees that were found.", counts.proposed_nodes)
    families.counter("draft_ngram_match_seconds", "Time that looking took.", counts.match_ns / 1e9)
    families.gauge(
        "draft_ngram_longest_wait_seconds",
        "Longest that looking waited for an insertion.",
        counts.longest_wait_ns / 1e9,
    )
    families.counter("draft_ngram_put_off", "Looks that were put off instead of waiting longer.", counts.put_off)
    families.gauge("draft_ngram_nodes", "Nodes of the trie.", len(trie))
    families.gauge("draft_ngram_capacity", "Most nodes that it may have.", trie.capacity)
    families.counter("draft_ngram_evicted_nodes", "Least recently used nodes that made room.", trie.evicted)
    families.gauge("draft_ngram_waiting_tokens", "Of texts that wait to be inserted.", shared.waiting_tokens)
    families.by_label(
        "counter", "draft_ngram_queued_tokens", "Of texts that were taken for insertion.", "origin",
        {"sessions": counts.queued_tokens, "corpus": counts.corpus_tokens},
    )  # fmt: skip
    families.counter("draft_ngram_inserted_tokens", "Of texts that are in the trie.", counts.inserted_tokens)
    families.counter("draft_ngram_dropped_tokens", "Of texts that found the queue full.", counts.dropped_tokens)
    families.gauge("draft_ngram_inserting", "0 once the thread that inserts has failed.", float(not shared.failed))
