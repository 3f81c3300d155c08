"""The methods of all services, with examples that they would take, and what must hold of their answers."""

from collections.abc import Sequence
from typing import Any

import grpc
from benchmarks.fuzz_bench.calls import Answer, Target
from benchmarks.fuzz_bench.tiny_service import MODEL_LEN, PROMPT, VOCAB_SIZE
from google.protobuf.message import Message

from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, registry_pb2, target_pb2
from outrider.wire import WIRE_VERSION, floats_to_bytes, uints_from_bytes, uints_to_bytes

Status = grpc.StatusCode
_ANSWERED = frozenset({Status.OK, Status.INVALID_ARGUMENT})
# Of workers that cannot be dialled, or hang up; of those that do not fit.
_LEASE_CODES = _ANSWERED | {Status.UNAVAILABLE, Status.FAILED_PRECONDITION}
# Of folders that hold no such weights.
_RELOAD_CODES = _ANSWERED | {Status.NOT_FOUND, Status.FAILED_PRECONDITION}
# A worker sends without being asked: streams stay for some of its steps.
_LINGER_S = 0.02

_RULES = (
    common_pb2.VERIFICATION_RULE_COUPLED,
    common_pb2.VERIFICATION_RULE_TARGET_ONLY,
    common_pb2.VERIFICATION_RULE_SYNTHETIC,
    common_pb2.VERIFICATION_RULE_REJECTION,
)

SERVICES = ("GenerationService", "RegistryService", "TargetService", "DraftService")


def targets_of(service: str, *, tokenizer_hash: str) -> list[Target]:
    """The methods of one service."""
    if service == "GenerationService":
        return _generation()
    if service == "RegistryService":
        return _registry(tokenizer_hash)
    methods = (
        (target_pb2 if service == "TargetService" else draft_pb2).DESCRIPTOR.services_by_name[service].methods_by_name
    )
    if service == "DraftService":
        return [
            Target(
                method=methods["Speculate"],
                examples=_speculations,
                codes=_ANSWERED,
                judge=_judge_growth,
                linger_s=_LINGER_S,
            )
        ]
    verify = Target(
        method=methods["Verify"], examples=_verifications, codes=_ANSWERED, judge=_judge_results, linger_s=_LINGER_S
    )
    message = target_pb2.ReloadRequest(path="/nowhere")
    reload = Target(method=methods["Reload"], examples=lambda number: [[message]], codes=_RELOAD_CODES)
    return [*[verify] * 12, reload]


# ---------------------------------------------------------------------------------------------------------- generation


def _generation() -> list[Target]:
    methods = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    generate = Target(
        method=methods["Generate"], examples=_requests, codes=_ANSWERED | {Status.ABORTED}, judge=_judge_generation
    )
    others = [
        Target(
            method=methods[name],
            examples=lambda number, message=message: [[message]],
            codes=_ANSWERED,
            most_responses=1 if name == "Watch" else None,
        )
        for name, message in (
            ("Abort", generation_pb2.AbortRequest(request_ids=["a", "b"])),
            ("GetModelInfo", generation_pb2.GetModelInfoRequest()),
            ("GetServerInfo", generation_pb2.GetServerInfoRequest()),
            ("Watch", generation_pb2.WatchRequest(interval_ms=100)),
        )
    ]
    return [generate] * 12 + others


def _requests(number: int) -> Sequence[Sequence[Message]]:
    sampling = generation_pb2.SamplingParams(max_new_tokens=4, temperature=0.7, seed=number, stop=["zz"], n=1)
    everything = generation_pb2.SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={3: 1.0, 9: -2.0},
        allowed_token_ids=range(200),
        seed=1,
        max_new_tokens=3,
        min_new_tokens=1,
        stop_token_ids=[7],
        n=2,
        logprobs=3,
    )
    speculation = generation_pb2.SpeculationParams(
        mode=common_pb2.SPECULATION_MODE_SYNC, max_nodes=4, max_depth=2, verification=_RULES[number % 2]
    )
    prompt = generation_pb2.TokenIds(ids=PROMPT)
    resumed = generation_pb2.Received(index=0, token_ids=[1, 2], text_bytes=2)
    return [
        [generation_pb2.GenerateRequest(text="def f(", sampling_params=sampling)],
        [generation_pb2.GenerateRequest(token_ids=prompt, sampling_params=everything, speculation=speculation)],
        [generation_pb2.GenerateRequest(token_ids=prompt, sampling_params=sampling, received=[resumed], trace=True)],
    ]


def _judge_generation(payloads: Sequence[bytes], answer: Answer) -> None:
    if answer.code is not Status.OK:
        return
    events = [generation_pb2.GenerateResponse.FromString(data) for data in answer.responses]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started", kinds
    assert kinds[-1] == "finished", kinds
    assert set(kinds[1:-1]) <= {"delta", "round", "tree"}, kinds
    request = generation_pb2.GenerateRequest.FromString(payloads[0])
    lengths = {entry.index: len(entry.token_ids) for entry in request.received}
    for event in events:
        if event.WhichOneof("event") == "delta":
            delta = event.delta
            assert delta.offset == lengths.get(delta.index, 0), "offsets are not contiguous"
            lengths[delta.index] = delta.offset + len(delta.token_ids)
            assert all(token < VOCAB_SIZE for token in delta.token_ids)
    assert len(events[-1].finished.choices) == (request.sampling_params.n or 1)


# ------------------------------------------------------------------------------------------------------------ registry


def _registry(tokenizer_hash: str) -> list[Target]:
    methods = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].methods_by_name

    def reports(number: int) -> Sequence[Sequence[Message]]:
        introduction = registry_pb2.WorkerIntroduction(
            worker_id=f"fuzzed-{number}",
            role=(registry_pb2.WORKER_ROLE_DRAFT, registry_pb2.WORKER_ROLE_TARGET)[number % 2],
            # Nobody listens there.
            address="127.0.0.1:1",
            model=common_pb2.ModelInfo(
                name="fuzzed", vocab_size=VOCAB_SIZE, tokenizer_hash=tokenizer_hash, max_model_len=MODEL_LEN
            ),
            limits=registry_pb2.WorkerLimits(max_sessions=4),
            wire_version=WIRE_VERSION,
        )
        load = common_pb2.WorkerLoad(sessions=1, slots_used=2, slots_total=100, steps=7, busy=0.5)
        hello = registry_pb2.WorkerReport(introduction=introduction)
        return [[hello, registry_pb2.WorkerReport(load=load)], [hello]]

    return [Target(method=methods["Register"], examples=reports, codes=_LEASE_CODES)]


# ------------------------------------------------------------------------------------------------------------- workers


def _open(number: int) -> common_pb2.SessionOpen:
    sampling = SamplingSpec(
        max_new_tokens=12, temperature=(0.0, 0.8)[number % 2], seed=number, logprobs=(None, 2)[number % 2]
    )
    state = sampling.to_proto()
    state.verification = _RULES[number % 4]
    state.threshold_single = state.threshold_acc = 1.0
    if number % 4 == 2:
        state.synthetic_rates.append(0.5)
    limits = common_pb2.SpeculationLimits(
        mode=(common_pb2.SPECULATION_MODE_ASYNC, common_pb2.SPECULATION_MODE_SYNC)[number % 3 == 0],
        max_live_nodes=12,
        max_depth=4,
        max_nodes=6,
    )
    return common_pb2.SessionOpen(
        session_id=5, epoch=1, prompt=uints_to_bytes(PROMPT), output=b"", sampling=state, limits=limits
    )


def _distributions(number: int, nodes: Sequence[int]) -> common_pb2.DraftDistributions | None:
    if number % 4 != 3:
        return None
    return common_pb2.DraftDistributions(
        counts=[1] * len(nodes), token_ids=uints_to_bytes(nodes), weights=uints_to_bytes([1 << 24] * len(nodes))
    )


def _verifications(number: int) -> Sequence[Sequence[Message]]:
    """A session from its opening over growth, places and bounds to its close."""
    length, chain = len(PROMPT), (3, 4)

    def commands(**parts: Any) -> target_pb2.RoundCommands:
        return target_pb2.RoundCommands(incarnation=number + 1, **parts)

    def changed(change: target_pb2.PlaceChange) -> target_pb2.PlaceChanges:
        return target_pb2.PlaceChanges(session_ids=[5], epochs=[1], places=[0], changes=[change])

    growth = target_pb2.RelayedGrowth(
        session_ids=[5],
        epochs=[1],
        places=[0],
        as_of=[length],
        node_counts=[2],
        node_ids=uints_to_bytes([1, 2]),
        parents=uints_to_bytes([0, 1]),
        tokens=uints_to_bytes(chain),
        acceptance=floats_to_bytes([0.9, 0.8]),
        sources=[common_pb2.GROWTH_SOURCE_MODEL] * 2,
        distributions=_distributions(number, chain),
        complete=[True],
    )
    opening = commands(opens=[_open(number)], places=changed(target_pb2.PLACE_CHANGE_TAKEN))
    grown = commands(growth=growth)
    again = commands(places=changed(target_pb2.PLACE_CHANGE_RESENT), growth=growth)
    left = commands(places=changed(target_pb2.PLACE_CHANGE_LEFT))
    bounds = {"session_ids": [5], "epochs": [1]}
    held = commands(bounds=target_pb2.SessionBounds(allow=[0], alone=[False], **bounds))
    alone = commands(bounds=target_pb2.SessionBounds(allow=[(1 << 31) - 1], alone=[True], **bounds))
    close = commands(close_session_ids=[5], close_epochs=[1])
    return [[opening, grown, close], [opening], [opening, grown, again, left], [opening, held, grown, alone]]


def _judge_results(payloads: Sequence[bytes], answer: Answer) -> None:
    for data in answer.responses:
        results = target_pb2.RoundResults.FromString(data)
        rows = len(results.session_ids)
        for name in (
            "epochs", "token_counts", "accepted_counts", "selected_counts", "finishes", "cached_tokens", "lost"
        ):  # fmt: skip
            assert len(getattr(results, name)) == rows, f"{name}: not one for each of {rows} sessions"
        assert sum(results.accepted_counts) == len(results.accepted_sources)
        assert sum(results.token_counts) == len(results.tokens)
        assert all(token < VOCAB_SIZE for token in results.tokens)
        for accepted, selected in zip(results.accepted_counts, results.selected_counts, strict=True):
            assert accepted <= selected, "more nodes were accepted than verified"
        assert all(error.message for error in results.errors), "an error without a reason"


def _speculations(number: int) -> Sequence[Sequence[Message]]:
    opening = draft_pb2.DraftCommands(incarnation=number + 1, opens=[_open(number)])
    commits = draft_pb2.CommitBatch(
        session_ids=[5], epochs=[1], positions=[len(PROMPT)], token_counts=[2], tokens=[3, 4]
    )
    commit = draft_pb2.DraftCommands(incarnation=number + 1, commits=commits)
    resend = draft_pb2.DraftCommands(incarnation=number + 1, resend_session_ids=[5], resend_epochs=[1])
    close = draft_pb2.DraftCommands(incarnation=number + 1, close_session_ids=[5], close_epochs=[1])
    return [[opening, commit, close], [opening], [opening, commit, resend], [opening, resend, commit, close]]


def _judge_growth(payloads: Sequence[bytes], answer: Answer) -> None:
    for data in answer.responses:
        growth = draft_pb2.DraftGrowth.FromString(data)
        tokens = uints_from_bytes(growth.tokens)
        assert 4 * sum(growth.node_counts) == 4 * len(tokens) == len(growth.parents) == len(growth.node_ids)
        for name in ("forgot", "again"):
            assert len(getattr(growth, name)) in (0, len(growth.session_ids)), f"{name}: not one for each session"
        assert all(token < VOCAB_SIZE for token in tokens)
