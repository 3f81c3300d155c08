"""Checks of workers' answers before anything is done with them: a worker that breaks these rules is lost.

Whoever registers as a worker is trusted with its own part: a target may choose any token, a draft may guess any. It is
not trusted with the coordinator: ids that stand for nothing, numbers that no clock gives, columns that do not fit.
"""

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.coordinator.sessions.messages import GrowthBatch
from outrider.drafting.draft_distribution import DraftDistribution, unpack_distributions
from outrider.drafting.growth_source import NUM_SOURCES, GrowthSource
from outrider.v1 import common_pb2, draft_pb2, target_pb2
from outrider.wire import MOST_NODES, floats_from_bytes, uints_from_bytes

# No step takes an hour, and no such number is to reach a mean or a counter.
_LONGEST_STEP_NS = 3_600_000_000_000
_MOST_STEPS = 1 << 10
# Of `RoundResults`, with one entry a session.
_SESSION_COLUMNS = (
    "epochs", "token_counts", "accepted_counts", "selected_counts", "finishes", "cached_tokens", "lost", "tree_ends",
)  # fmt: skip
# Bit sets of sources have eight bits.
_MOST_SOURCES = 255

# Ids, parents and lengths have 31 bits at a target.
_MOST = (1 << 31) - 1
_SOURCES = {int(source): source for source in GrowthSource}


def check_results(response: target_pb2.RoundResults, *, vocab_size: int) -> None:
    """Check what a target says of a round.

    Raises:
        ValueError: what is wrong.
    """
    check_report(response.report)
    sessions = len(response.session_ids)
    for name in _SESSION_COLUMNS:
        if len(getattr(response, name)) != sessions:
            raise ValueError(f"{name}: {len(getattr(response, name))} entries given of {sessions} sessions")
    # Slices are lists at once; whoever reads a message's column entry by entry pays three times as much for each.
    counts, accepted, selected = response.token_counts[:], response.accepted_counts[:], response.selected_counts[:]
    tokens, accepted_sources = response.tokens[:], response.accepted_sources[:]
    _check_total("tokens", counts, len(tokens))
    _check_total("accepted_sources", accepted, len(accepted_sources))
    if (highest := max(tokens, default=0)) >= vocab_size:
        raise ValueError(f"token {highest} committed, ids below {vocab_size} needed")
    if (highest := max(accepted_sources, default=0)) > _MOST_SOURCES:
        raise ValueError(f"accepted_sources: {highest} is no set of sources")
    if len(set(response.session_ids[:])) < sessions:
        raise ValueError("a session is named twice in one round")
    if any(map(operator.gt, accepted, selected)):
        raise ValueError("a session with more accepted nodes than verified ones are reported")
    if by_source := response.selected_by_source[:]:
        if len(by_source) != NUM_SOURCES * sessions:
            raise ValueError(f"selected_by_source: {len(by_source)} entries given of {sessions} sessions")
        if any(any(map(operator.gt, by_source[source::NUM_SOURCES], selected)) for source in range(NUM_SOURCES)):
            raise ValueError("a session with more verified nodes of one source than of all is reported")
    if response.grown_by_source and len(response.grown_by_source) != NUM_SOURCES * sessions:
        raise ValueError(f"grown_by_source: {len(response.grown_by_source)} entries given of {sessions} sessions")
    # Behind the last accepted node there is one token at most, and none where that node has ended the session.
    if not set(map(operator.sub, counts, accepted)) <= {0, 1}:
        raise ValueError("token_counts: each must be accepted_counts, or one more")
    for entry in response.logprobs:
        _check_logprobs(entry, sessions)


def _check_total(name: str, counts: Sequence[int], entries: int) -> None:
    if sum(counts) != entries:
        raise ValueError(f"{name}: {entries} entries given, {sum(counts)} counted")


def _check_logprobs(entry: target_pb2.Logprobs, sessions: int) -> None:
    if entry.row >= sessions:
        raise ValueError("log probabilities of a row that there is not")
    top_bytes = len(entry.token_logprobs) * entry.top_count
    columns = len(entry.top_logprobs), 4 * len(entry.top_token_ids)
    if len(entry.token_logprobs) % 4 or columns != (top_bytes, top_bytes):
        raise ValueError("log probabilities: columns of different lengths")


def check_report(report: common_pb2.StepReport) -> None:
    """A step's own account.

    Raises:
        ValueError: a time or a size that no step has.
    """
    longest = max(report.step_ns, report.forward_ns, report.plain_ns)
    if longest > _LONGEST_STEP_NS:
        raise ValueError(f"a step of {longest / 1e9:.0f} s is reported")
    if report.steps > _MOST_STEPS:
        raise ValueError(f"{report.steps} steps are reported in one message")


def check_load(load: common_pb2.WorkerLoad) -> None:
    """Check a heartbeat's load: whoever asks for the service's state is shown it.

    Raises:
        ValueError: a share that is none, or a calibration whose columns do not fit.
    """
    if not 0.0 <= load.busy < np.inf:
        raise ValueError(f"busy: {load.busy} is no share of a worker's time")
    if not load.HasField("calibration"):
        return
    edges = floats_from_bytes(load.calibration.edges)
    if not np.isfinite(edges).all():
        raise ValueError("calibration: edges that are no numbers")
    for found in load.calibration.rules:
        predicted = floats_from_bytes(found.predicted)
        if {len(found.children), len(found.hits), len(predicted)} != {len(edges) + 1}:
            raise ValueError(f"calibration: not one entry for each of {len(edges) + 1} bins")
        if not np.isfinite(predicted).all():
            raise ValueError("calibration: estimates that are no numbers")


def _usable_acceptance(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A draft's estimates, within 0 to 1.

    Raises:
        ValueError: one of them is no number.
    """
    if not len(values) or 0 <= values.min() <= values.max() <= 1:
        return values
    if not np.isfinite(values).all():
        raise ValueError("acceptance: estimates that are no numbers")
    return np.clip(values, np.float32(0), np.float32(1))


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
        acceptance=_usable_acceptance(acceptance),
        distributions=distributions,
        # What a newer worker may say counts as a model's.
        source=_SOURCES.get(message.source, GrowthSource.MODEL),
        steps=max(message.report.steps, 1),
    )
