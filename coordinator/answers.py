"""What a worker's answer must be before anything is done with it: a worker that breaks these rules is lost.

Whoever registers as a worker is trusted with its own part: a target may choose any token, a draft may guess any. It is
not trusted with the coordinator: ids that stand for nothing, numbers that no clock gives, columns that do not fit.
"""

import operator
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.coordinator.answer_kernels import is_usual
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_from_bytes

# No step takes an hour, and no such number is to reach a mean or a counter.
_LONGEST_STEP_NS = 3_600_000_000_000
_MOST_ROWS = 1 << 24
_ANY_TOKEN = 1 << 32
_WITHOUT_TOKENS = {target_pb2.OUTCOME_DEFERRED, target_pb2.OUTCOME_ERROR, target_pb2.OUTCOME_ENDED}


def check_verification(
    response: target_pb2.VerifyResponse, node_counts: Mapping[int, int], *, vocab_size: int | None
) -> None:
    """A target's answer to a batch.

    Args:
        node_counts: nodes of the tree that each session of the batch sent.
        vocab_size: of the model; None where it is not known.

    Raises:
        ValueError: what is wrong.
    """
    check_report(response.report)
    if IS_COMPILED and _is_usual(response, node_counts, vocab_size):
        return
    _check_total("tokens", response.token_counts, len(response.tokens))
    _check_total("accepted_nodes", response.accepted_counts, len(response.accepted_nodes))
    if (
        vocab_size is not None
        and response.tokens
        and (highest := int(np.array(response.tokens, dtype=np.int64).max())) >= vocab_size
    ):
        raise ValueError(f"token {highest} emitted, ids below {vocab_size} needed")
    if len(set(response.session_ids)) < len(response.session_ids):
        raise ValueError("a session is answered twice in one step")
    if response.logprobs and max(entry.row for entry in response.logprobs) >= len(response.session_ids):
        raise ValueError("log probabilities of a row that there is not")
    _check_outcomes(response)
    if response.accepted_nodes:
        _check_paths(response, node_counts)


def _is_usual(response: target_pb2.VerifyResponse, node_counts: Mapping[int, int], vocab_size: int | None) -> bool:
    """Whether all that were asked for, and nobody else, have got tokens, and nothing is wrong with these."""
    if response.logprobs or list(response.session_ids) != list(node_counts):
        return False
    said = (response.outcomes, response.token_counts, response.accepted_counts)
    if {len(column) for column in said} != {len(node_counts)}:
        return False
    outcomes, token_counts, accepted_counts, tokens, accepted = (
        np.array(column, dtype=np.int64) for column in (*said, response.tokens, response.accepted_nodes)
    )
    nodes, most = np.array(list(node_counts.values()), dtype=np.int64), _ANY_TOKEN if vocab_size is None else vocab_size
    outcome = target_pb2.OUTCOME_ACCEPTED
    return is_usual(outcomes, token_counts, accepted_counts, tokens, accepted, nodes, outcome, most)


def verified_counts(response: target_pb2.VerifyResponse, sent: Mapping[int, int]) -> dict[int, int]:
    """Nodes of each session's tree in the answer to a batch that followed a step; `sent`: that it was chosen from.

    Raises:
        ValueError: not one of each session, or more than were sent.
    """
    if len(response.verified_counts) != len(response.session_ids):
        raise ValueError(
            f"verified_counts: {len(response.verified_counts)} entries given, {len(response.session_ids)} needed"
        )
    counts = dict(zip(response.session_ids, response.verified_counts, strict=True))
    for session_id, count in counts.items():
        if count > sent.get(session_id, count):
            raise ValueError(f"{count} nodes of session {session_id} verified, {sent[session_id]} were sent")
    return counts


def check_additions(response: target_pb2.VerifyResponse, sent: int) -> None:
    """Additions that the batch which follows this one is said to have got.

    Raises:
        ValueError: more than were sent.
    """
    if response.additions > sent:
        raise ValueError(f"additions: {response.additions} given, {sent} were sent")


def _check_outcomes(response: target_pb2.VerifyResponse) -> None:
    """Accepted nodes have a token each, and there is mostly one behind them.

    Where a root moves is found from both, here and for the batch that follows: they must not lead to two places.
    """
    columns = (response.outcomes, response.token_counts, response.accepted_counts)
    if {len(column) for column in columns} != {len(response.session_ids)}:
        raise ValueError(f"{len(response.session_ids)} sessions given, with {', '.join(map(str, map(len, columns)))}")
    for outcome, emitted, accepted in zip(*columns, strict=True):
        if outcome in _WITHOUT_TOKENS:
            if emitted or accepted:
                raise ValueError(
                    f"{emitted} tokens and {accepted} nodes given of a session that is deferred or given up"
                )
        elif not emitted:
            raise ValueError("a session that is neither deferred nor given up, and no token of it; one at least needed")
        elif not accepted <= emitted <= accepted + 1:
            raise ValueError(f"{emitted} tokens emitted for {accepted} accepted nodes; as many or one more needed")


def _check_paths(response: target_pb2.VerifyResponse, node_counts: Mapping[int, int]) -> None:
    nodes, before = list(response.accepted_nodes), 0
    for session_id, count in zip(response.session_ids, response.accepted_counts, strict=True):
        path, before = nodes[before : before + count], before + count
        if not path:
            continue
        # Of the sessions that were not asked for nothing is taken.
        most = node_counts.get(session_id, path[-1])
        if path[0] < 1 or path[-1] > most or any(map(operator.ge, path, path[1:])):
            raise ValueError(f"nodes {path[:8]} accepted of a tree of {most}; ascending ones from 1 needed")


def _check_total(name: str, counts: Sequence[int], entries: int) -> None:
    if sum(counts) != entries:
        raise ValueError(f"{name}: {entries} entries given, {sum(counts)} counted")


def check_report(report: common_pb2.StepReport) -> None:
    """A step's own account.

    Raises:
        ValueError: a time or a size that no step has.
    """
    longest = max(report.step_ns, report.forward_ns)
    if longest > _LONGEST_STEP_NS:
        raise ValueError(f"a step of {longest / 1e9:.0f} s is reported")
    if report.tokens > _MOST_ROWS:
        raise ValueError(f"a step of {report.tokens} rows is reported")


def check_load(load: common_pb2.WorkerLoad) -> None:
    """What a heartbeat says of a worker: whoever asks for the service's state is shown it.

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


def usable_acceptance(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """A draft's estimates, within 0 to 1.

    Raises:
        ValueError: one of them is no number.
    """
    if not np.isfinite(values).all():
        raise ValueError("acceptance: estimates that are no numbers")
    return np.clip(values.astype(np.float64), 0.0, 1.0)
