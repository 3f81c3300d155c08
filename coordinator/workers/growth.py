"""Growth as it comes from a draft worker: from the message to columns."""

from collections.abc import Sequence

import numpy as np

from outrider.coordinator.sessions.messages import GrowthBatch
from outrider.coordinator.workers.answers import usable_acceptance
from outrider.draft_distribution import DraftDistribution, unpack_distributions
from outrider.growth_source import GrowthSource
from outrider.v1 import draft_pb2
from outrider.wire import MOST_NODES, floats_from_bytes

# Ids, parents and lengths have 31 bits at a target.
_MOST = (1 << 31) - 1


def growth_batch(message: draft_pb2.DraftGrowth, vocab_size: int) -> GrowthBatch:
    """A message's columns, checked.

    Args:
        vocab_size: ids from here on stand for no token.

    Raises:
        ValueError: nothing can be made of it.
    """
    node_ids, parents, tokens = (
        np.array(column, dtype=np.int64) for column in (message.node_ids, message.parents, message.tokens)
    )
    distributions: Sequence[DraftDistribution | None] = ()
    if message.HasField("distributions"):
        distributions = unpack_distributions(message.distributions, len(node_ids))
        for node_id, token, distribution in zip(message.node_ids, message.tokens, distributions, strict=True):
            if distribution is not None and (fault := distribution.fault(token, vocab_size)) is not None:
                raise ValueError(f"the distribution of node {node_id}: {fault}")
    if len(node_ids) and not 1 <= node_ids.min() <= node_ids.max() <= _MOST:
        raise ValueError(f"node ids from {node_ids.min()} to {node_ids.max()} given, 1 to {_MOST} needed")
    if max((parents.max(initial=0), *message.as_of)) > _MOST:
        raise ValueError(f"a parent or a committed length beyond {_MOST}")
    if min(message.as_of, default=1) < 1:
        raise ValueError("growth of a session without a token")
    if max(message.node_counts, default=0) > MOST_NODES:
        raise ValueError(f"{max(message.node_counts)} nodes of a session in one message, at most {MOST_NODES} needed")
    if len(tokens) and tokens.max() >= vocab_size:
        worst = int(tokens.argmax())
        raise ValueError(f"node {node_ids[worst]} has token {tokens[worst]}, ids below {vocab_size} needed")
    none = [False] * len(message.session_ids)
    growth = GrowthBatch(
        session_ids=list(message.session_ids),
        epochs=list(message.epochs),
        as_of=list(message.as_of),
        node_counts=list(message.node_counts),
        complete=list(message.complete) or none,
        forgot=list(message.forgot) or none,
        again=list(message.again) or none,
        node_ids=node_ids,
        parents=parents,
        tokens=tokens,
        acceptance=usable_acceptance(floats_from_bytes(message.acceptance)),
        distributions=distributions,
        # What a newer worker may say counts as a model's.
        source=GrowthSource(message.source) if message.source in set(GrowthSource) else GrowthSource.MODEL,
    )
    sessions, nodes = len(growth.session_ids), sum(growth.node_counts)
    columns = (growth.epochs, growth.as_of, growth.node_counts, growth.complete, growth.forgot, growth.again)
    lengths = {len(column) for column in columns}
    if lengths != {sessions} or {len(column) for column in (node_ids, parents, tokens, growth.acceptance)} != {nodes}:
        raise ValueError(f"columns of different lengths in growth of {sessions} sessions and {nodes} nodes")
    return growth
