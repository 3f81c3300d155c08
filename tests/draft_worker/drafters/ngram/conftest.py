"""Sessions and a drafter for the tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter, NgramDrafterConfig
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.sampling import SamplingSpec


def session_start(session_id: int = 1, *, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> SessionStart:
    fields: dict[str, Any] = {
        "key": (7, session_id),
        "owner": "owner",
        "epoch": 1,
        "output": (),
        "sampling": SamplingSpec(max_new_tokens=100),
        "limits": GrowthLimits(),
    }
    return SessionStart(prompt=prompt, **fields | changes)


@pytest.fixture
def make_start() -> Callable[..., SessionStart]:
    return session_start


@pytest.fixture
def make_drafter() -> Iterator[Callable[..., NgramDrafter]]:
    """Makes drafters whose tries insert until the test ends."""
    tries: list[SharedTrie] = []

    def make(proposals: ProposalConfig | None = None, **config: int) -> NgramDrafter:
        trie = SharedTrie(NgramTrie(capacity=5000, max_trie_depth=6), proposals or ProposalConfig(), patience_s=60)
        trie.start()
        tries.append(trie)
        return NgramDrafter(
            trie, NgramDrafterConfig(**{"vocab_size": 30, "max_model_len": 200, "max_sessions": 8} | config)
        )

    yield make
    for trie in tries:
        trie.stop()
        assert trie.join(30)
