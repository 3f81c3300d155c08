"""The buckets that a draft's growth begins with.

Frontiers are narrow most of the time and wide sometimes; every width up to the widest has its graph, for one session,
a few, and all of them. A root that was missed adds a row, prompts add chunks of theirs, and sync sessions add whole
levels. Masks have one width: a tree's depth takes no bucket of its own.
"""

from collections.abc import Iterator
from dataclasses import replace

from outrider.engine.buckets import Bucket, BucketLadder


def words_per_mask(max_nodes: int) -> int:
    """Words of every mask where a tree has at most `max_nodes` nodes with KV, rounded up to a power of two."""
    return 1 << ((max_nodes + 63) // 64 - 1).bit_length()


def growth_buckets(
    ladder: BucketLadder,
    *,
    step_nodes: int,
    step_tokens: int,
    level_nodes: int,
    sessions: int,
    children: int,
    words: int,
) -> list[Bucket]:
    """What is captured before growth begins.

    Args:
        ladder: which buckets there are.
        step_nodes: most nodes of a step, over all sessions.
        step_tokens: most rows of prompts and other pending tokens of a step.
        level_nodes: most nodes that a sync session's level expands.
        sessions: at a time.
        children: of a row.
        words: of a mask.
    """
    one = Bucket(tokens=1, sessions=1, keys=1, query_len=1, logit_rows=1, nodes=0, words=words, children=children)
    found: dict[Bucket, None] = {}
    # All that a step may have: nodes, and a root that was missed of every session.
    widest = min(step_nodes + sessions, ladder.max_tokens)
    for tokens in ladder.token_rungs:
        if tokens > ladder.bucket(replace(one, tokens=widest)).tokens:
            break
        for count in ladder.session_rungs:
            if count > tokens and count > 1:
                break
            need = replace(one, tokens=tokens, sessions=min(count, tokens), logit_rows=tokens)
            # One session may have most of the rows, or each a few.
            for query_len in (tokens, 1) if count > 1 else (tokens,):
                found[ladder.bucket(replace(need, query_len=query_len))] = None
    # Prompts: a chunk by itself, and one beside nodes.
    for rows in (step_tokens, step_tokens + step_nodes):
        for count in (1, sessions):
            need = replace(one, tokens=rows, sessions=count, query_len=rows)
            for logit_rows in (0, min(rows, step_nodes + sessions)):
                if rows <= ladder.max_tokens:
                    found[ladder.bucket(replace(need, logit_rows=logit_rows))] = None
    levels = _level_buckets(
        ladder, replace(one, sessions=sessions), widest, step_tokens=step_tokens, level_nodes=level_nodes
    )
    found |= dict.fromkeys(levels)
    # What looks at logits, with anything beside it.
    for rows in (1, 16, widest, step_tokens + step_nodes):
        if rows <= ladder.max_tokens:
            need = replace(one, tokens=rows, sessions=min(sessions, rows), query_len=rows, logit_rows=min(rows, widest))
            found[ladder.bucket(replace(need, children=0))] = None
    return list(found)


def _level_buckets(
    ladder: BucketLadder, one: Bucket, widest: int, *, step_tokens: int, level_nodes: int
) -> Iterator[Bucket]:
    """Those for levels of many sync sessions, by themselves and beside prompts, that are wider than `widest` rows."""
    most = ladder.bucket(replace(one, tokens=min(step_tokens + level_nodes * one.sessions, ladder.max_tokens))).tokens
    for tokens in (rung for rung in ladder.token_rungs if widest < rung <= most):
        for query_len in (tokens, level_nodes):
            yield ladder.bucket(replace(one, tokens=tokens, query_len=query_len, logit_rows=tokens))
