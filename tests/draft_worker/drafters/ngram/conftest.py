"""Drafters for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie


@pytest.fixture
def make_drafter() -> Iterator[Callable[..., NgramDrafter]]:
    """Makes drafters whose tries insert until the test ends."""
    tries: list[SharedTrie] = []

    def make(proposals: ProposalConfig | None = None, **config: int) -> NgramDrafter:
        trie = SharedTrie(NgramTrie(capacity=5000, max_trie_depth=6), proposals or ProposalConfig(), patience_s=60)
        trie.start()
        tries.append(trie)
        return NgramDrafter(trie, **{"vocab_size": 30, "max_model_len": 200, "max_sessions": 8} | config)

    yield make
    for trie in tries:
        trie.stop()
        assert trie.join(30)
