"""Messages of workers that keep to the protocol, which evil ones start from.

The target decodes plainly, with any tokens; the draft answers every opening and every commit with two nodes, and sends
its tree again where it is asked for it.
"""

import itertools

from benchmarks.fuzz_bench.tiny_service import MODEL_LEN, VOCAB_SIZE

from outrider.v1 import common_pb2, draft_pb2, registry_pb2, target_pb2
from outrider.wire import WIRE_VERSION, floats_to_bytes, uints_to_bytes

_SLOTS = 100


def introduction(number: int, *, address: str, is_target: bool, tokenizer_hash: str) -> registry_pb2.WorkerReport:
    """Return the introduction of a worker that has not been lost before."""
    return registry_pb2.WorkerReport(
        introduction=registry_pb2.WorkerIntroduction(
            worker_id=f"evil-{number}",
            name=f"evil-{number}",
            role=registry_pb2.WORKER_ROLE_TARGET if is_target else registry_pb2.WORKER_ROLE_DRAFT,
            address=address,
            model=common_pb2.ModelInfo(
                name="evil", vocab_size=VOCAB_SIZE, tokenizer_hash=tokenizer_hash, max_model_len=MODEL_LEN
            ),
            limits=registry_pb2.WorkerLimits(max_sessions=8),
            wire_version=WIRE_VERSION,
        )
    )


def heartbeat(number: int) -> registry_pb2.WorkerReport:
    """Return the heartbeat of a worker at work, with everything that a draft reports."""
    load = common_pb2.WorkerLoad(sessions=1, slots_used=7, slots_total=_SLOTS, steps=number, busy=0.5, step_age_ms=3)
    load.calibration.edges = floats_to_bytes([0.5])
    load.calibration.rules.add(
        rule="coupled", children=[4, 6], predicted=floats_to_bytes([1.0, 4.5]), hits=[1, number % 5]
    )
    return registry_pb2.WorkerReport(load=load)


class Decoder:
    """A target that decodes plainly, one token of every session a round."""

    def __init__(self) -> None:
        # By session id: epoch and length.
        self._sessions: dict[int, tuple[int, int]] = {}

    def take(self, commands: target_pb2.RoundCommands) -> None:
        """Open and close sessions."""
        for opening in commands.opens:
            length = (len(opening.prompt) + len(opening.output)) // 4
            self._sessions[opening.session_id] = opening.epoch, length
        for session_id, epoch in zip(commands.close_session_ids, commands.close_epochs, strict=True):
            if self._sessions.get(session_id, (0, 0))[0] == epoch:
                del self._sessions[session_id]

    def round(self) -> target_pb2.RoundResults | None:
        """Return a token of every open session and its log probability; None where none is open."""
        if not self._sessions:
            return None
        count = len(self._sessions)
        results = target_pb2.RoundResults(
            token_counts=[1] * count,
            accepted_counts=[0] * count,
            selected_counts=[0] * count,
            finishes=[target_pb2.FINISH_UNSPECIFIED] * count,
            cached_tokens=[0] * count,
            lost=[0] * count,
            report=common_pb2.StepReport(step_ns=100_000, forward_ns=50_000),
        )
        for row, (session_id, (epoch, length)) in enumerate(self._sessions.items()):
            token = (length * 7) % VOCAB_SIZE
            results.session_ids.append(session_id)
            results.epochs.append(epoch)
            results.tokens.append(token)
            logprobs = results.logprobs.add(row=row, top_count=1, top_token_ids=[token])
            logprobs.token_logprobs = logprobs.top_logprobs = floats_to_bytes([-1.0])
            self._sessions[session_id] = epoch, length + 1
        return results


class Grower:
    """Answers every open and every commit with two nodes, and sends a session's last two again when asked to."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        # By session id: epoch and length.
        self._sessions: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int, int]] = {}

    def grown(self, commands: draft_pb2.DraftCommands) -> draft_pb2.DraftGrowth | None:
        """Return the answer; None where no session is left."""
        for opening in commands.opens:
            length = (len(opening.prompt) + len(opening.output)) // 4
            self._sessions[opening.session_id] = opening.epoch, length
        batch = commands.commits
        for session_id, epoch, position, count in zip(
            batch.session_ids, batch.epochs, batch.positions, batch.token_counts, strict=True
        ):
            self._sessions[session_id] = epoch, position + count
        for session_id, epoch in zip(commands.close_session_ids, commands.close_epochs, strict=True):
            if self._sessions.get(session_id, (0, 0))[0] == epoch:
                del self._sessions[session_id]
        if not self._sessions:
            return None
        growth = draft_pb2.DraftGrowth(
            source=common_pb2.GROWTH_SOURCE_MODEL,
            report=common_pb2.StepReport(step_ns=100_000),
        )
        for session_id in set(commands.resend_session_ids) & self._sessions.keys() & self._last.keys():
            self._add(growth, session_id, *self._last[session_id], again=True)
        for session_id, (_, length) in self._sessions.items():
            self._last[session_id] = length, next(self._ids), next(self._ids)
            self._add(growth, session_id, *self._last[session_id], again=False)
        growth.acceptance = floats_to_bytes([0.9] * sum(growth.node_counts))
        return growth

    def _add(
        self, growth: draft_pb2.DraftGrowth, session_id: int, as_of: int, first: int, second: int, *, again: bool
    ) -> None:
        growth.session_ids.append(session_id)
        growth.epochs.append(self._sessions[session_id][0])
        growth.as_of.append(as_of)
        growth.node_counts.append(2)
        growth.complete.append(True)
        growth.forgot.append(False)
        growth.again.append(again)
        growth.node_ids += uints_to_bytes((first, second))
        growth.parents += uints_to_bytes((0, first))
        growth.tokens += uints_to_bytes((as_of % VOCAB_SIZE, 7))
