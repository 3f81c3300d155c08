"""What workers answer that play by the rules: the messages that evil ones begin with.

The target accepts the first node of a tree and goes on with any token; the draft answers every opening and every commit
with two nodes.
"""

import itertools

from benchmarks.fuzz_bench.tiny_service import MODEL_LEN, VOCAB_SIZE

from outrider.v1 import common_pb2, draft_pb2, registry_pb2, target_pb2
from outrider.wire import floats_to_bytes

_SLOTS = 100


def introduction(number: int, *, address: str, is_target: bool, tokenizer_hash: str) -> registry_pb2.WorkerReport:
    """Of a worker that has not been lost before."""
    return registry_pb2.WorkerReport(
        introduction=registry_pb2.WorkerIntroduction(
            worker_id=f"evil-{number}",
            name=f"evil-{number}",
            role=registry_pb2.WORKER_ROLE_TARGET if is_target else registry_pb2.WORKER_ROLE_DRAFT,
            address=address,
            model=common_pb2.ModelInfo(
                name="evil", vocab_size=VOCAB_SIZE, tokenizer_hash=tokenizer_hash, max_model_len=MODEL_LEN
            ),
            limits=registry_pb2.WorkerLimits(max_sessions=8, max_tree_nodes=16, max_step_tokens=64),
        )
    )


def heartbeat(number: int) -> registry_pb2.WorkerReport:
    """Of a worker at work, with everything that a draft reports."""
    load = common_pb2.WorkerLoad(sessions=1, slots_used=7, slots_total=_SLOTS, steps=number, busy=0.5, step_age_ms=3)
    load.calibration.edges = floats_to_bytes([0.5])
    load.calibration.rules.add(
        rule="coupled", children=[4, 6], predicted=floats_to_bytes([1.0, 4.5]), hits=[1, number % 5]
    )
    return registry_pb2.WorkerReport(load=load)


def verified(request: target_pb2.VerifyRequest) -> target_pb2.VerifyResponse:
    """Accepts the first node if it has no other parent than the root, and goes on with any token."""
    trees, places = request.trees, itertools.accumulate((0, *request.trees.node_counts))
    response = target_pb2.VerifyResponse(
        step=request.step,
        session_ids=trees.session_ids,
        epochs=trees.epochs,
        outcomes=[target_pb2.OUTCOME_ACCEPTED] * len(trees.session_ids),
        cached_tokens=[0] * len(trees.session_ids),
        report=common_pb2.StepReport(step_ns=100_000, forward_ns=50_000, tokens=1 + len(trees.tokens), sessions=1),
        load=common_pb2.WorkerLoad(sessions=1, slots_total=_SLOTS),
    )
    for row, (length, count, place) in enumerate(zip(trees.lengths, trees.node_counts, places, strict=False)):
        accepted = min(count, 1)
        response.accepted_counts.append(accepted)
        response.accepted_nodes.extend([1] * accepted)
        tokens = [*trees.tokens[place : place + accepted], (length * 7) % VOCAB_SIZE]
        response.token_counts.append(len(tokens))
        response.tokens.extend(tokens)
        logprobs = response.logprobs.add(row=row, top_count=1, top_token_ids=tokens)
        logprobs.token_logprobs = logprobs.top_logprobs = floats_to_bytes([-1.0] * len(tokens))
    return response


class Grower:
    """Answers every open and every commit with two nodes."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lengths: dict[tuple[int, int], int] = {}

    def grown(self, commands: draft_pb2.DraftCommands) -> draft_pb2.DraftGrowth | None:
        """The answer; None where no session is left."""
        for opening in commands.opens:
            length = (len(opening.prompt) + len(opening.output)) // 4
            self._lengths[opening.session_id, opening.epoch] = length
        batch = commands.commits
        for session_id, epoch, position, count in zip(
            batch.session_ids, batch.epochs, batch.positions, batch.token_counts, strict=True
        ):
            self._lengths[session_id, epoch] = position + count
        for key in zip(commands.close_session_ids, commands.close_epochs, strict=True):
            self._lengths.pop(key, None)
        if not self._lengths:
            return None
        growth = draft_pb2.DraftGrowth(
            report=common_pb2.StepReport(step_ns=100_000), load=common_pb2.WorkerLoad(sessions=len(self._lengths))
        )
        for (session_id, epoch), length in self._lengths.items():
            first, second = next(self._ids), next(self._ids)
            growth.session_ids.append(session_id)
            growth.epochs.append(epoch)
            growth.as_of.append(length)
            growth.node_counts.append(2)
            growth.complete.append(True)
            growth.node_ids.extend((first, second))
            growth.parents.extend((0, first))
            growth.tokens.extend((length % VOCAB_SIZE, 7))
        growth.acceptance = floats_to_bytes([0.9] * len(growth.tokens))
        return growth
