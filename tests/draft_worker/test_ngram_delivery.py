"""Growth of several sources on its way out: what leaves first, what goes with it, and that a mirror can use it all."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.coordinator.committing import Commitment, commit_together

from outrider.coordinator.forest import Forest
from outrider.coordinator.growth import growth_batch
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.growth_thread import CommitCommand, GrowthThread, Load, OpenCommand, SessionFailure
from outrider.draft_worker.ngram_growth import NgramGrowth, NgramGrowthConfig
from outrider.draft_worker.ngram_source import NgramSource
from outrider.draft_worker.ngram_tree import NgramConfig
from outrider.draft_worker.ngram_trie import NgramTrie
from outrider.draft_worker.service import growth_message
from outrider.draft_worker.session import GrowthLimits
from outrider.draft_worker.sourced_growth import SourcedGrowth
from outrider.growth_source import GrowthSource

Make = Callable[..., Any]
KEY = (7, 1)
SONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
LOAD = Load(1, 0, 0, 1, 0.0)


@pytest.fixture
def ngram() -> Iterator[NgramGrowth]:
    source = NgramSource(NgramTrie(capacity=5000, max_trie_depth=6), NgramConfig(), patience_s=60)
    source.start()
    source.add(SONG)
    assert source.settle()
    yield NgramGrowth(source, NgramGrowthConfig(vocab_size=24, max_model_len=200))
    source.stop()
    assert source.join(30)


class Owner:
    def __init__(self) -> None:
        self.steps: list[GrowthStep] = []
        self.records: list[SessionGrowth] = []
        self.came = threading.Semaphore(0)

    def deliver(self, growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> None:
        self.steps.append(step)
        self.records += growths
        self.came.release()

    def fail(self, failure: SessionFailure) -> None:
        raise AssertionError(failure)


def test_guesses_leave_before_the_models_forward_is_begun(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, runner = make_growth()
    owner, at_forward = Owner(), list[int]()
    runner.on_forward = lambda: at_forward.append(len(owner.steps))
    thread = GrowthThread(lambda: SourcedGrowth(model, ngram))
    thread.start()
    thread.submit([OpenCommand(owner, make_start(prompt=[7, 3, 1, 4], owner=owner))])
    assert owner.came.acquire(timeout=60)
    thread.submit([CommitCommand(owner, KEY, 1, 4, [1])])
    thread.stop()
    thread.stopped.result(60)
    assert owner.steps[0].source is GrowthSource.NGRAM
    # The first forward began when the guesses had left.
    assert at_forward[0] >= 1


def test_a_worker_without_a_model_answers_and_sleeps(ngram: NgramGrowth, make_start: Make):
    owner = Owner()
    thread = GrowthThread(lambda: SourcedGrowth(None, ngram))
    thread.start()
    thread.submit([OpenCommand(owner, make_start(prompt=[7, 3, 1, 4], owner=owner))])
    assert owner.came.acquire(timeout=60)
    thread.submit([CommitCommand(owner, KEY, 1, 4, [1, 5])])
    assert owner.came.acquire(timeout=60)
    assert [record.as_of for record in owner.records] == [4, 6]
    assert thread.load().steps == 2
    thread.stop()
    thread.stopped.result(60)


def test_the_message_says_the_source_of_every_node_and_no_time_of_steps(ngram: NgramGrowth, make_start: Make):
    for number in (1, 2):
        ngram.open(make_start(number, prompt=[7, 3, 1, 4]))
    step = ngram.match()
    assert step is not None
    message = growth_message(step.growths, step, LOAD)
    assert list(message.sources) == [int(GrowthSource.NGRAM)] * len(message.node_ids) != []
    assert not message.HasField("report")
    ngram.commit(KEY, 1, 4, [23])
    step = ngram.match()
    assert step is not None
    message = growth_message(step.growths, step, LOAD)
    assert (list(message.session_ids), list(message.as_of), list(message.node_counts)) == ([1], [5], [0])


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_mirror_in_step_can_use_every_node(
    make_growth: Make, ngram: NgramGrowth, make_start: Make, *, has_model: bool, seed: int
):
    """Whatever is committed: every parent is known, nothing is sent twice by one source, credit holds."""
    drawn, credit = random.Random(seed), 30
    growth = SourcedGrowth(make_growth()[0] if has_model else None, ngram)
    tokens = [7, 3, 1, 4]
    growth.open(make_start(prompt=list(tokens), limits=GrowthLimits(max_live_nodes=credit, max_depth=9)))
    mirror = TreeMirror(Forest(), tokens)
    for _ in range(12):
        for _ in range(drawn.randrange(1, 4)):
            matched, begun = growth.match(), growth.begin()
            for step in (matched, growth.finish() if begun else None):
                if step is None or not (records := step.growths):
                    continue
                batch = growth_batch(growth_message(records, step, LOAD), 24)
                assert graft("draft", batch, [mirror]) == [len(records[0].node_ids)]
        assert mirror.forest.acceptance.max() <= 1
        # Along the song, or anything; then some of it was guessed.
        place = SONG.index(tokens[-1]) + 1 if tokens[-1] in SONG else 0
        new = (SONG * 2)[place : place + drawn.randrange(1, 5)]
        if drawn.random() < 0.3:
            new[-1] = drawn.randrange(24)
        growth.commit(KEY, 1, len(tokens), new)
        tokens += new
        commit_together(Commitment(mirror, new))
        assert (mirror.forest.row[mirror.forest.depth > 0] == mirror.row).sum() <= credit
    assert np.isfinite(mirror.forest.value).all()
