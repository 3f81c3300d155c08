"""Growth as it comes from a draft worker: from the message to columns."""

from collections.abc import Sequence

from outrider.coordinator.sessions.messages import GrowthBatch
from outrider.coordinator.workers.answers import usable_acceptance
from outrider.drafting.draft_distribution import DraftDistribution, unpack_distributions
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import draft_pb2
from outrider.wire import MOST_NODES, floats_from_bytes, uints_from_bytes

# Ids, parents and lengths have 31 bits at a target.
_MOST = (1 << 31) - 1
_SOURCES = {int(source): source for source in GrowthSource}


def growth_batch(message: draft_pb2.DraftGrowth, vocab_size: int) -> GrowthBatch:
    """Return a message's columns, checked. Columns alias the message, so that relaying them copies blocks.

    Args:
        vocab_size: ids from here on stand for no token.

    Raises:
        ValueError: nothing can be made of it.
    """
    node_ids, parents, tokens = map(uints_from_bytes, (message.node_ids, message.parents, message.tokens))
    acceptance, counts, as_of = floats_from_bytes(message.acceptance), message.node_counts[:], message.as_of[:]
    sessions, nodes, none = len(message.session_ids), len(node_ids), [False] * len(message.session_ids)
    complete, forgot, again = message.complete[:] or none, message.forgot[:] or none, message.again[:] or none
    if {len(column) for column in (message.epochs, as_of, counts, complete, forgot, again)} != {sessions}:
        raise ValueError(f"columns of different lengths in growth of {sessions} sessions")
    if {len(column) for column in (node_ids, parents, tokens, acceptance)} != {sum(counts)}:
        raise ValueError(f"columns of different lengths in growth of {nodes} nodes")
    distributions: Sequence[DraftDistribution | None] = ()
    if message.HasField("distributions"):
        distributions = unpack_distributions(message.distributions, nodes)
        for node_id, token, distribution in zip(node_ids, tokens.tolist(), distributions, strict=True):
            if distribution is not None and (fault := distribution.fault(token, vocab_size)) is not None:
                raise ValueError(f"the distribution of node {node_id}: {fault}")
    if nodes and not 1 <= node_ids.min() <= node_ids.max() <= _MOST:
        raise ValueError(f"node ids from {node_ids.min()} to {node_ids.max()} given, 1 to {_MOST} needed")
    if parents.max(initial=0) > _MOST or max(as_of, default=0) > _MOST:
        raise ValueError(f"a parent or a committed length beyond {_MOST}")
    if min(as_of, default=1) < 1:
        raise ValueError("growth of a session without a token")
    if max(counts, default=0) > MOST_NODES:
        raise ValueError(f"{max(counts)} nodes of a session in one message, at most {MOST_NODES} needed")
    if tokens.max(initial=0) >= vocab_size:
        worst = tokens.argmax()
        raise ValueError(f"node {node_ids[worst]} has token {tokens[worst]}, ids below {vocab_size} needed")
    return GrowthBatch(
        session_ids=message.session_ids,
        epochs=message.epochs,
        as_of=message.as_of,
        node_counts=message.node_counts,
        complete=complete,
        forgot=forgot,
        again=again,
        node_ids=node_ids,
        parents=parents,
        tokens=tokens,
        acceptance=usable_acceptance(acceptance),
        distributions=distributions,
        # What a newer worker may say counts as a model's.
        source=_SOURCES.get(message.source, GrowthSource.MODEL),
        steps=max(message.report.steps, 1),
    )
