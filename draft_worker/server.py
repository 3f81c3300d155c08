"""The draft worker process: what of serving is a draft's own."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import LoadedDrafters, load_drafters
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.loop import GrowthLoop, spare_collector
from outrider.draft_worker.service import SERVICE, DraftStream, pack_calibrations
from outrider.front.calls import Calls
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker
from outrider.roles.worker_service import Loaded, Worker, serve_worker
from outrider.security.roles import Role
from outrider.v1 import common_pb2, registry_pb2

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie

__all__ = ["DraftWorkerConfig", "serve"]

Loader = Callable[[DraftWorkerConfig], LoadedDrafters]

# More growth gathers while two messages of it wait: in a queue of messages it would come too late.
_MOST_WAITING = 1


class DraftWorker(Worker[GrowthLoop]):
    """Grows trees; see `Worker`.

    Args:
        loader: makes the drafters, on the thread that grows.
    """

    role = Role.DRAFT

    def __init__(self, config: DraftWorkerConfig, loader: Loader = load_drafters) -> None:
        self._config, self._loader = config, loader
        self._parts: LoadedDrafters | None = None
        self.front = Front(SERVICE, role=self.role, address=config.address, most_waiting=_MOST_WAITING, tls=config.tls)
        self.inbox = Inbox(self.front.data, Calls(self.front.data, SERVICE, {"Speculate": DraftStream}).commands)
        self.thread = GrowthLoop(self._load_drafters, self.inbox)

    def _load_drafters(self) -> Drafters:
        self._parts = parts = self._loader(self._config)
        spare_collector()
        return parts.drafters

    @property
    def _loaded(self) -> LoadedDrafters:
        assert self._parts is not None, "asked for before the thread is ready"
        return self._parts

    def loaded(self) -> Loaded:
        """See `Worker`."""
        parts, config = self._loaded, self._config
        return Loaded(
            model=parts.model,
            limits=registry_pb2.WorkerLimits(max_sessions=config.max_num_seqs),
            metrics=_metrics(self.thread, parts.drafters, model_name=parts.model.name),
            sources=sorted(parts.drafters.calibrations),
        )

    def load(self) -> common_pb2.WorkerLoad:
        """See `Worker`."""
        thread = self.thread
        return common_pb2.WorkerLoad(
            **thread.load()._asdict(),
            calibration=pack_calibrations(self._loaded.drafters.calibrations),
            step_age_ms=int(1e3 * thread.watch.age_s),
            preparing=thread.watch.is_preparing,
        )

    def close(self) -> None:
        """See `Worker`."""
        if self._parts is not None:
            self._parts.close()


def _metrics(loop: GrowthLoop, drafters: Drafters, *, model_name: str) -> Describe:
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
            _describe_ngram(families, drafters.ngram.trie)

    return describe


def _describe_ngram(families: Families, shared: "SharedTrie") -> None:
    """Describe what the n-gram drafter's trie has done."""
    counts, trie = shared.counts, shared.trie
    families.counter("draft_ngram_matches", "Lookups of texts in the trie.", counts.matches)
    families.counter(
        "draft_ngram_hits", "Lookups that found a match: an end that occurred before and went on.", counts.hits
    )
    families.counter(
        "draft_ngram_matched_tokens", "Total length of the longest suffixes found, in tokens.", counts.matched_tokens
    )
    families.counter("draft_ngram_proposed_nodes", "Tree nodes that were found in the trie.", counts.proposed_nodes)
    families.counter("draft_ngram_match_seconds", "Time that lookups took.", counts.match_ns / 1e9)
    families.gauge(
        "draft_ngram_longest_wait_seconds",
        "Longest wait of a lookup for an insertion.",
        counts.longest_wait_ns / 1e9,
    )
    families.counter("draft_ngram_put_off", "Lookups that were put off instead of waiting longer.", counts.put_off)
    families.gauge("draft_ngram_nodes", "Nodes of the trie.", len(trie))
    families.gauge("draft_ngram_capacity", "Most nodes that it may have.", trie.capacity)
    families.counter("draft_ngram_evicted_nodes", "Least recently used nodes that made room.", trie.evicted)
    families.gauge("draft_ngram_waiting_tokens", "Tokens of texts waiting to be inserted.", shared.waiting_tokens)
    families.by_label(
        "counter", "draft_ngram_queued_tokens", "Tokens of texts that were taken for insertion.", "origin",
        {"sessions": counts.queued_tokens, "corpus": counts.corpus_tokens},
    )  # fmt: skip
    families.counter("draft_ngram_inserted_tokens", "Tokens of texts that are in the trie.", counts.inserted_tokens)
    families.counter("draft_ngram_dropped_tokens", "Tokens of texts that found the queue full.", counts.dropped_tokens)
    families.gauge("draft_ngram_inserting", "0 once the thread that inserts has failed.", float(not shared.failed))


serve = functools.partial(serve_worker, DraftWorker)
