"""Every step finds a bucket that holds it, and few buckets are enough."""

import random
from dataclasses import astuple, replace

from outrider.engine.buckets import Bucket, BucketLadder

LADDER = BucketLadder(max_tokens=512, max_sessions=48, row_len=3000, max_nodes=65, group=4)


def random_need(chance: random.Random) -> Bucket:
    tokens = chance.choice([chance.randint(1, 80), chance.randint(1, 512), chance.randint(513, 5000)])
    query_len = chance.randint(1, tokens)
    logit_rows = chance.randint(0, min(tokens, 600))
    nodes = chance.randint(1, min(query_len, logit_rows, 65)) if logit_rows and chance.random() < 0.7 else 0
    return Bucket(
        tokens=tokens,
        sessions=chance.randint(1, min(tokens, 48)),
        keys=chance.randint(1, 3000),
        query_len=query_len,
        logit_rows=logit_rows,
        nodes=nodes,
        words=chance.randint(1, 3),
    )


def test_a_bucket_holds_what_it_is_for_and_is_its_own() -> None:
    chance, found = random.Random(0), set()
    for _ in range(4000):
        need = random_need(chance)
        bucket = LADDER.bucket(need)
        assert bucket.holds(need), (need, bucket)
        assert LADDER.bucket(bucket) == bucket
        assert bool(bucket.nodes) == bool(need.nodes)
        if need.tokens <= 512:
            found.add(replace(bucket, words=1))
        else:
            assert bucket.tokens % 128 == 0
    assert len(found) < 400


def test_fewer_of_anything_do_not_hold() -> None:
    bucket = Bucket(tokens=8, sessions=4, keys=100, query_len=4, logit_rows=8, nodes=4, words=1)
    assert bucket.holds(bucket)
    for name in ("tokens", "sessions", "keys", "query_len", "logit_rows", "nodes", "words"):
        assert not bucket.holds(replace(bucket, **{name: getattr(bucket, name) + 1})), name


def test_rows_are_filled_up_by_less_than_half_and_logits_are_left_out_of_prefill() -> None:
    need = Bucket(tokens=1, sessions=1, keys=9, query_len=1, logit_rows=1, nodes=0, words=1)
    for tokens in range(9, 513):
        assert LADDER.bucket(replace(need, tokens=tokens, query_len=tokens)).tokens < max(1.5 * tokens, 17)
    prompt = LADDER.bucket(replace(need, tokens=400, query_len=400, logit_rows=0))
    assert prompt.logit_rows == 0
    assert LADDER.bucket(replace(need, tokens=400, query_len=400, logit_rows=7)).logit_rows == 72


def test_what_serving_begins_with_covers_trees_of_every_size_and_plain_steps() -> None:
    first = LADDER.first_set()
    assert len(first) == len(set(first)) < 60
    assert all(LADDER.bucket(bucket) == bucket for bucket in first)
    for nodes in range(1, 66):
        need = Bucket(tokens=nodes, sessions=1, keys=70, query_len=nodes, logit_rows=nodes, nodes=nodes,
                      words=(nodes + 63) // 64)  # fmt: skip
        assert LADDER.bucket(need) in first, nodes
    for sessions in range(1, 49):
        need = Bucket(tokens=sessions, sessions=sessions, keys=70, query_len=1, logit_rows=sessions, nodes=1, words=1)
        assert LADDER.bucket(need) in first, sessions


def test_past_the_largest_graph_a_prompt_and_mixtures_are_all_there_is_to_compile() -> None:
    chance = random.Random(1)
    kinds = {kind(bucket) for bucket in LADDER.first_set() if bucket.tokens > 512}
    for _ in range(2000):
        need = random_need(chance)
        need = replace(need, words=min(need.words, 2), nodes=need.nodes or bool(need.logit_rows))
        if need.tokens > 512 and need.query_len > 16 and need.logit_rows <= 512:
            assert kind(LADDER.bucket(need)) in kinds, need


def test_a_rehearsal_has_every_combination_of_rows_sessions_and_words_that_a_step_may_have() -> None:
    chance = random.Random(2)
    rehearsed = LADDER.rehearsal()
    assert LADDER.words == [1, 2]
    assert len(rehearsed) == len(set(rehearsed)) < 300
    assert all(LADDER.bucket(bucket) == bucket for bucket in rehearsed)
    found = {of_layers(bucket) for bucket in rehearsed}
    for _ in range(4000):
        need = random_need(chance)
        bucket = LADDER.bucket(replace(need, words=min(need.words, 2)))
        if bucket.tokens <= 512:
            assert of_layers(bucket) in found, need
    # Past the largest graph, for short sequences and long ones.
    assert {bucket.keys for bucket in rehearsed if bucket.tokens > 512} == {1024, 2048, 3000}


def of_layers(bucket: Bucket) -> Bucket:
    """What the layers of a bucket depend on."""
    return replace(bucket, logit_rows=0, nodes=0)


def kind(bucket: Bucket) -> Bucket:
    """What is left of a large bucket beside its rows and keys, which kernels take as they come."""
    return replace(bucket, tokens=0, keys=0, query_len=0)


def test_unrolled_rows_are_sessions() -> None:
    ladder = BucketLadder(max_tokens=512, max_sessions=4, row_len=9000, max_nodes=65, group=4, unrolled=True)
    need = Bucket(tokens=300, sessions=300, keys=2500, query_len=7, logit_rows=300, nodes=65, words=1)
    bucket = ladder.bucket(need)
    assert astuple(bucket)[:3] == (320, 320, 4096)
    assert bucket.paths == 64 * 320
    # Trees are as large as ever, though every session has one row.
    need = replace(need, tokens=66, sessions=66, query_len=1, logit_rows=66, nodes=65)
    assert ladder.bucket(need).holds(need)
    first = ladder.first_set()
    assert len(first) < 30 and all(ladder.bucket(bucket) == bucket for bucket in first)
    assert ladder.rehearsal() == []
