"""Fixtures of this folder's tests; the model of most of them is `table_model.TableModel`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.draft_worker.settling import settle
from tests.draft_worker.table_model import VOCAB
from tests.tiny_llama import write_llama

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie

SONG = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)


@pytest.fixture
def song() -> list[int]:
    """The text that `ngram` knows."""
    return list(SONG)


@pytest.fixture
def ngram() -> Iterator[NgramDrafter]:
    """A drafter whose trie knows one text."""
    trie = SharedTrie(NgramTrie(capacity=5000, max_trie_depth=6), ProposalConfig(), patience_s=60)
    trie.start()
    trie.add(SONG)
    assert settle(trie)
    yield NgramDrafter(trie, vocab_size=VOCAB, max_model_len=200, max_sessions=8)
    trie.stop()
    assert trie.join(30)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_llama(folder, vocab_size=96, max_position_embeddings=256, bos_token_id=0, eos_token_id=1)
    return folder
