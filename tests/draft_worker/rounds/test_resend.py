"""Live trees that are sent again, and trees that are dropped: what a replica needs to follow either."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.draft_worker.replica import LONGEST, Replica
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.draft_worker.table_model import VOCAB, Bench, session_start, sync_start

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.drafting.growth_source import GrowthSource
from outrider.kernels.pool.records import Verdict
from outrider.sampling import SamplingSpec, SpeculationMode

KEY = (7, 1)
MODEL, NGRAM = GrowthSource.MODEL, GrowthSource.NGRAM
PROMPT = (7, 3, 1, 4)
WORKERS = ["model", "ngram", "model+ngram"]

Own = tuple[GrowthSource, SessionGrowth]


@pytest.fixture
def make(ngram: NgramDrafter) -> Callable[..., Drafters]:
    def make(name: str, **options: Any) -> Drafters:
        settings: dict[str, Any] = {"max_model_len": LONGEST, "num_slots": 900, "max_live_nodes": 40}
        bench = Bench(**settings | options)
        trees = NgramDrafter(ngram.trie, vocab_size=VOCAB, max_model_len=LONGEST, max_sessions=8)
        return Drafters(bench.drafter if "model" in name else None, trees if "ngram" in name else None)

    return make


def drive(drafters: Drafters, most: int = 300) -> list[Own]:
    """Everything until there is nothing to do, or of as many advances."""
    found: list[Own] = []
    for _ in range(most):
        growths = list(drafters.advance())
        found += [(growth.source, own) for growth in growths for own in sessions_of(growth)]
        if not growths:
            break
    return found


def again_of(found: list[Own]) -> list[Own]:
    """From the message on with which trees are sent again, one a source."""
    first = next(place for place, (_, own) in enumerate(found) if own.again)
    sources = [source for source, own in found if own.again]
    assert [source for source, _ in found[first : first + len(sources)]] == sources
    assert len(set(sources)) == len(sources)
    return found[first:]


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_replica_that_begins_with_it_equals_one_that_got_everything(
    make: Callable[..., Drafters], song: list[int], worker: str, seed: int
):
    chance, drafters, tokens = random.Random(seed), make(worker, max_step_nodes=3), [*PROMPT]
    drafters.open(session_start(prompt=PROMPT, max_live_nodes=40))
    full, fresh, compared = Replica(tokens), None, 0

    def receive(found: list[Own]) -> None:
        nonlocal fresh
        for source, own in found:
            assert not own.forgot
            if own.again and source is (MODEL if "model" in worker else NGRAM):
                fresh = Replica(tokens)
            for replica in (full, fresh):
                if replica is not None:
                    verdicts = replica.take(source, own)
                    assert not {Verdict.STALE, Verdict.FULL} & set(verdicts)
                    if own.again and own.as_of == len(tokens):
                        # Each has its place at once: parents stand before their children.
                        assert Verdict.UNKNOWN_PARENT not in verdicts

    for _ in range(40):
        for _ in range(chance.choice([0, 0, 1, 3])):
            receive(drive(drafters, most=1))
        for _ in range(chance.choice([0, 0, 1, 2])):
            drafters.resend(KEY, 1)
        if chance.random() < 0.7:
            # Along the tree, or the song, or anything.
            paths = [path for path in full.tree if len(path) < 4]
            place = song.index(tokens[-1]) + 1 if tokens[-1] in song else 0
            new = [*chance.choice(paths)] if paths and chance.random() < 0.7 else song[place : place + 2]
            new = new if new and chance.random() < 0.9 else [chance.randrange(VOCAB)]
            drafters.commit(KEY, 1, len(tokens), new)
            tokens += new
            for replica in (full, fresh):
                if replica is not None:
                    replica.commit(new)
        if chance.random() < 0.3:
            receive(drive(drafters))
            if fresh is not None:
                assert fresh.tree == full.tree
                compared += len(full.tree) > 3
    assert compared > 3


@pytest.mark.parametrize("worker", WORKERS)
def test_several_requests_are_answered_one_by_one_and_nothing_is_lost(make: Callable[..., Drafters], worker: str):
    drafters = make(worker)
    for number in (1, 2):
        drafters.open(session_start(number, prompt=PROMPT))
    drive(drafters)
    for _ in range(3):
        drafters.resend(KEY, 1)
    drafters.resend((7, 2), 1)
    found = drive(drafters)
    sources = len(worker.split("+"))
    assert sum(own.again for _, own in found if own.session_id == 1) == 3 * sources
    assert sum(own.again for _, own in found if own.session_id == 2) == sources
    answers = {(source, own.session_id, tuple(own.node_ids)) for source, own in found}
    assert len(answers) == 2 * sources
    assert drive(drafters) == []


@pytest.mark.parametrize("worker", WORKERS)
def test_a_tree_of_nothing_is_sent_again_as_well(make: Callable[..., Drafters], worker: str):
    drafters = make(worker)
    drafters.open(session_start(prompt=PROMPT))
    # Before any step has seen the session; whoever asks waits for an answer.
    drafters.resend(KEY, 1)
    first, *others = drive(drafters)
    assert (first[1].again, first[1].node_ids, first[1].as_of) == (True, [], len(PROMPT))
    assert any(own.node_ids for _, own in others)


@pytest.mark.parametrize("worker", WORKERS)
def test_unknown_sessions_and_other_epochs_are_not_answered(make: Callable[..., Drafters], worker: str):
    drafters = make(worker)
    drafters.open(session_start(epoch=2, prompt=PROMPT))
    drive(drafters)
    for key, epoch in (((7, 3), 1), ((8, 1), 2), (KEY, 1), (KEY, 3)):
        drafters.resend(key, epoch)
    assert drive(drafters) == []
    drafters.close(KEY, 2)
    drafters.resend(KEY, 2)
    assert drive(drafters) == []


@pytest.mark.parametrize("worker", WORKERS)
def test_in_sync_mode_the_rounds_tree_is_sent_again_once_it_is_complete(make: Callable[..., Drafters], worker: str):
    drafters = make(worker, max_step_nodes=1)
    drafters.open(sync_start(prompt=PROMPT))
    drafters.resend(KEY, 1)
    found = drive(drafters)
    assert (found[0][1].again, found[0][1].node_ids, found[0][1].complete) == (True, [], False)
    first_round = [(source, own) for source, own in found if own.node_ids or own.complete]
    round_one = [own for _, own in first_round]
    assert [own.complete for own in round_one].count(True) == 1
    drafters.resend(KEY, 1)
    found = again_of(drive(drafters))
    assert sorted(own.node_ids for _, own in found) == sorted(own.node_ids for own in round_one)
    assert [own.complete for _, own in found].count(True) == 1
    assert not any(own.forgot for own in (*round_one, *(own for _, own in found)))
    drafters.commit(KEY, 1, len(PROMPT), [1])
    drafters.resend(KEY, 1)
    found = drive(drafters)
    assert (found[0][1].again, found[0][1].node_ids, found[0][1].as_of) == (True, [], len(PROMPT) + 1)
    # The last round's tree is gone with its commit.
    assert [own.forgot for _, own in found] == [True] + [False] * (len(found) - 1)
    later = {(source, node) for source, own in found for node in own.node_ids}
    assert not later & {(source, node) for source, own in first_round for node in own.node_ids}


@pytest.mark.parametrize("worker", WORKERS)
def test_each_sync_round_drops_the_last_ones_tree_and_says_so_once(make: Callable[..., Drafters], worker: str):
    drafters = make(worker)
    drafters.open(sync_start(prompt=PROMPT))
    assert not any(own.forgot for _, own in drive(drafters))
    for position in range(4, 8):
        drafters.commit(KEY, 1, position, [1])
        found = [own for _, own in drive(drafters)]
        assert [own.forgot for own in found] == [True] + [False] * (len(found) - 1)
        assert {own.as_of for own in found} == {position + 1}


@pytest.mark.parametrize("worker", ["model", "model+ngram"])
def test_a_row_that_begins_anew_has_forgotten_and_uses_no_id_twice(make: Callable[..., Drafters], worker: str):
    drafters, tokens = make(worker), [*PROMPT]
    drafters.open(session_start(prompt=PROMPT, sampling=SamplingSpec(max_new_tokens=600)))
    full, seen = Replica(tokens), dict[tuple[GrowthSource, int], int]()
    for new in ([], [1] * 300, [3, 1, 4]):
        if new:
            drafters.commit(KEY, 1, len(tokens), new)
            tokens += new
            full.commit(new)
        found = drive(drafters)
        assert [own.forgot for _, own in found] == [len(new) == 300] + [False] * (len(found) - 1)
        for source, own in found:
            for node_id in own.node_ids:
                assert seen.setdefault((source, node_id), own.as_of) in {own.as_of, len(tokens)}
            assert set(full.take(source, own)) <= {Verdict.APPENDED, Verdict.MERGED}
        # All that a replica knows is what is alive.
        drafters.resend(KEY, 1)
        fresh = Replica(tokens)
        for source, own in again_of(drive(drafters)):
            fresh.take(source, own)
        assert fresh.tree == full.tree
        assert fresh.tree_of(MODEL)


def test_no_id_is_used_twice_where_a_session_was_computed_twice_before():
    bench = Bench(num_slots=400, max_sessions=4, max_model_len=LONGEST)
    spec = SamplingSpec(max_new_tokens=600)
    bench.open(1, prompt=[1] * 60, sampling=spec)
    young = bench.open(2, prompt=[2] * 40, sampling=spec, max_depth=2)
    bench.finish()
    # The elder takes all slots, and gives them back.
    bench.commit(1, [4] * 320)
    bench.finish()
    computed = len(bench.model.computed)
    bench.close(1)
    bench.finish()
    assert len(bench.model.computed) > computed + 40
    bench.commit(2, [5] * 300)
    # The mirror refuses ids that do not rise.
    bench.finish()
    assert young.growths[-1].as_of == 340
    young.check_children(least=5)
    bench.check_all_given_back()


@pytest.mark.parametrize("mode", [SpeculationMode.ASYNC, SpeculationMode.SYNC])
def test_a_held_session_answers_too(mode: SpeculationMode):
    bench = Bench()
    mirror = bench.open(mode=mode)
    bench.finish()
    bench.drafter.hold(KEY, "unread", is_held=True)
    bench.resend(1)
    bench.finish()
    assert mirror.growths[-1].again
    assert mirror.growths[-1].node_ids
