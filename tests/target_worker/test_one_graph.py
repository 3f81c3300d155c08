"""One-graph rounds: the tokens of plain decoding, whatever the head drafts, and more of them where it is right."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.engine.one_graph_buckets import RoundLadder
from outrider.engine.one_graph_program import HeadCaches, RoundProgram
from outrider.engine.one_graph_runner import RoundRunner
from outrider.engine.one_graph_shape import RoundShape
from outrider.errors import InvalidRequest
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.one_graph import RoundDraft
from outrider.target_worker.service import pack
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest, TreeResult
from outrider.target_worker.step_jobs import BatchResult
from outrider.target_worker.step_thread import Load
from outrider.target_worker.unpacking import unpack
from outrider.target_worker.verifier import PendingStep, Verifier
from outrider.v1 import target_pb2

NEW_TOKENS = 16
SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=1.0, seed=11),
    SamplingSpec(temperature=0.8, top_k=9, top_p=0.9, seed=-3),
    SamplingSpec(temperature=1.0, min_p=0.1, seed=1 << 63, choice_index=2),
    SamplingSpec(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=5, logit_bias={3: 2.0}),
    SamplingSpec(frequency_penalty=0.8, presence_penalty=0.3, logprobs=0),
    SamplingSpec(logprobs=2),
    SamplingSpec(temperature=0.7, seed=8, min_new_tokens=5, stop_token_ids=(7, 9), logprobs=5),
    SamplingSpec(temperature=1.0, seed=2, allowed_token_ids=(4, 8, 15, 16, 23, 42)),
    SamplingSpec(max_new_tokens=1),
    SamplingSpec(temperature=1.0, seed=6, max_new_tokens=2, logprobs=30),
]
SHAPES = [RoundShape(), RoundShape(steps=3), RoundShape(steps=2, candidates=3)]


class PairHead:
    """Drafts the tokens that followed the last one most often in a text: right now and then, and easily followed."""

    taps = (1, -1)
    feature_size = 64

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        counts = torch.rand((vocab_size, vocab_size), generator=torch.Generator().manual_seed(1)) / 2
        for text in texts:
            for first, second in itertools.pairwise(text):
                counts[first, second] += 1
        self.counts = counts

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        batch: TreeAttentionBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        assert len(hidden) == len(token_ids) == len(positions) == len(write_slots) == len(batch.prefix_len)
        assert len(key_cache) == len(value_cache)
        return self.counts[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 20 * hidden


def make_verifier(
    folder: Path, head: PairHead | None = None, shape: RoundShape | None = None, **options: Any
) -> Verifier:
    config: dict[str, Any] = {"num_slots": 600, "max_num_seqs": 12, "max_tree_nodes": 12}
    config |= {"max_model_len": 96, "torch_threads": 1} | options
    engine = EngineConfig(model_path=folder, dtype="float32", **config)
    runner = ModelRunner(engine, decoder=True)
    rounds = None if head is None or shape is None else RoundDraft(round_runner(runner, head, shape), runner.slots)
    return Verifier(runner, max_step_tokens=128, rounds=rounds)


def round_runner(runner: ModelRunner, head: PairHead, shape: RoundShape) -> RoundRunner:
    assert runner.steps is not None
    head.counts = head.counts.to(runner.device)
    caches = HeadCaches(keys=torch.zeros(1, 1, 1), values=torch.zeros(1, 1, 1))
    rows, row_len = runner.slots.table.shape
    program = RoundProgram(runner.steps.program, head, caches, shape=shape, max_rows=rows)
    ladder = RoundLadder(shape, max_tokens=512, max_sessions=rows, row_len=row_len)
    return RoundRunner(program, shape, ladder, runner.slots, graphs=not runner.config.enforce_eager)


class Client:
    """Sessions of a verifier: resident rounds, plain steps, trees, closes and reopens."""

    def __init__(self, verifier: Verifier, specs: Sequence[SamplingSpec] = SPECS) -> None:
        self.verifier = verifier
        self.specs = [replace(spec, max_new_tokens=min(spec.max_new_tokens, NEW_TOKENS)) for spec in specs]
        chance = random.Random(3)
        self.prompts = [[chance.randrange(61) for _ in range(3 + 7 * (number % 4))] for number in range(len(specs))]
        self.outputs: list[list[int]] = [[] for _ in specs]
        self.results: list[list[TreeResult]] = [[] for _ in specs]
        self.epochs = [1] * len(specs)
        for number in range(len(specs)):
            self.open(number)

    def open(self, number: int) -> None:
        self.verifier.open(
            OpenRequest(
                key=(1, number),
                epoch=self.epochs[number],
                prompt=self.prompts[number],
                output=list(self.outputs[number]),
                sampling=self.specs[number],
            )
        )

    def request(self, number: int, *, resident: bool = False, tokens: Sequence[int] = ()) -> TreeRequest:
        return TreeRequest(
            key=(1, number),
            epoch=self.epochs[number],
            length=len(self.prompts[number]) + len(self.outputs[number]),
            tokens=tokens,
            parents=range(len(tokens)),
            resident=resident,
        )

    @property
    def live(self) -> list[int]:
        return [number for number in range(len(self.specs)) if not self.is_done(number)]

    def is_done(self, number: int) -> bool:
        spec, output = self.specs[number], self.outputs[number]
        return len(output) == spec.max_new_tokens or bool(output and output[-1] in spec.stop_token_ids)

    def step(self, requests: Sequence[TreeRequest]) -> None:
        for request, result in zip(requests, self.verifier.step(requests).results, strict=True):
            assert result.outcome is not Outcome.ERROR, result.fault
            number = request.key[1]
            self.outputs[number] += result.token_ids
            self.results[number].append(result)
            if self.is_done(number):
                self.verifier.close(request.key, request.epoch)

    def all(self, *, resident: bool) -> list[list[int]]:
        while live := self.live:
            self.step([self.request(number, resident=resident) for number in live])
        return self.outputs

    def adventurous(self, chance: random.Random, expected: Sequence[Sequence[int]]) -> list[list[int]]:
        """Some in each step, resident or not, with chains or not; some are closed, or cut, and opened again."""
        while live := self.live:
            requests = []
            for number in live:
                way = chance.choice(["absent", "resident", "resident", "plain", "chain"])
                rest = expected[number][len(self.outputs[number]) :][: chance.randrange(4)]
                if way != "absent":
                    chain = rest if way == "chain" else ()
                    requests.append(self.request(number, resident=way == "resident", tokens=chain))
            if requests:
                self.step(requests)
            if (live := self.live) and chance.random() < 0.3:
                number = chance.choice(live)
                if chance.random() < 0.5:
                    self.verifier.close((1, number), self.epochs[number])
                else:
                    del self.outputs[number][len(self.outputs[number]) // 2 :]
                self.epochs[number] += 1
                self.open(number)
        return self.outputs

    def logprobs(self, number: int) -> list[np.ndarray]:
        found = [result.logprobs for result in self.results[number]]
        kept = [each for each in found if each is not None]
        return [
            np.concatenate(parts)
            for parts in (
                [each.token_logprobs for each in kept],
                [each.top_token_ids for each in kept],
                [each.top_logprobs for each in kept],
            )
        ]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Client:
    client = Client(make_verifier(checkpoint))
    client.all(resident=False)
    return client


def head_of(plain: Client) -> PairHead:
    return PairHead([[*p, *o] for p, o in zip(plain.prompts, plain.outputs, strict=True)], 61)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounds_give_the_tokens_and_log_probabilities_of_plain_steps(
    shape: RoundShape, checkpoint: Path, plain: Client
) -> None:
    client = Client(make_verifier(checkpoint, head_of(plain), shape))
    assert client.all(resident=True) == plain.outputs
    for number, spec in enumerate(client.specs):
        rounds = [result for result in client.results[number] if result.token_ids]
        # The first comes with the prompt, the second has no candidates yet; so many alternatives no round can tell.
        fits = (spec.logprobs or 0) <= 20
        assert [result.drafted for result in rounds] == [0, 0, *(shape.nodes * fits for _ in rounds[2:])][: len(rounds)]
        if spec.logprobs is not None:
            for ours, theirs in zip(client.logprobs(number), plain.logprobs(number), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert sum(len(result.accepted_nodes) for result in rounds) >= len(client.outputs[number]) - len(rounds)
    # The head has seen the texts: many of its candidates are right.
    accepted = sum(len(result.accepted_nodes) for results in client.results for result in results)
    assert accepted > len(client.specs)
    # Nothing is left of the slots that rounds reserve.
    assert client.verifier.slots_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_sessions_come_and_go_between_rounds(seed: int, checkpoint: Path, plain: Client) -> None:
    # So few slots that sessions are preempted.
    shape = SHAPES[seed]
    verifier = make_verifier(checkpoint, head_of(plain), shape, num_slots=150)
    specs = [*SPECS, SamplingSpec(temperature=1.0, seed=6, verification=VerificationRule.TARGET_ONLY)]
    expected = Client(make_verifier(checkpoint), specs).all(resident=False)
    client = Client(verifier, specs)
    expected_chains = [*expected[:-1], []]  # what a rule with coins emits depends on the tree
    assert client.adventurous(random.Random(seed), expected_chains) == expected
    assert verifier.preemptions > 0
    assert verifier.slots_used == 0


def test_rounds_overlap_and_sessions_may_be_closed_within_them(checkpoint: Path, plain: Client) -> None:
    specs = SPECS[:6]
    client = Client(make_verifier(checkpoint, head_of(plain), SHAPES[1]), specs)
    verifier = client.verifier
    client.step([client.request(number, resident=True) for number in client.live])
    groups = [[0, 1, 2], [3, 4, 5]]
    pending: dict[int, tuple[list[int], PendingStep]] = {}
    closed: set[int] = set()
    for turn in range(8):
        group = groups[turn % 2]
        # The other group's round is still in flight when this one's begins.
        numbers = [number for number in group if number in client.live and number not in closed]
        pending[turn] = numbers, verifier.begin([client.request(number, resident=True) for number in numbers])
        if turn == 4:
            verifier.close((1, 1), 1)
            closed.add(1)
        if turn:
            before, step = pending.pop(turn - 1)
            for number, result in zip(before, verifier.finish(step).results, strict=True):
                assert result.outcome is Outcome.ACCEPTED
                client.outputs[number] += result.token_ids
                if client.is_done(number):
                    verifier.close((1, number), 1)
    numbers, step = pending.pop(7)
    for number, result in zip(numbers, verifier.finish(step).results, strict=True):
        client.outputs[number] += result.token_ids
    for number, output in enumerate(client.outputs):
        assert output == plain.outputs[number][: len(output)]
        assert len(output) > 4
        verifier.close((1, number), 1)
    assert verifier.slots_used == 0
    assert verifier.session_count == 0


def test_the_wire_says_who_is_resident_and_what_was_drafted() -> None:
    trees = target_pb2.TreeBatch(
        session_ids=[1, 2], epochs=[1, 1], lengths=[5, 6], node_counts=[0, 1], tokens=[7], parents=[0],
        resident=[True, False],
    )  # fmt: skip
    request = target_pb2.VerifyRequest(step=3, incarnation=4, trees=trees)
    batch, _ = unpack(request)
    assert [tree.resident for tree in batch.trees] == [True, False]
    results = [
        TreeResult(outcome=Outcome.ACCEPTED, accepted_nodes=[1], token_ids=[8, 9], drafted=3),
        TreeResult(outcome=Outcome.ACCEPTED, token_ids=[8]),
    ]
    response = pack(request, BatchResult(results=results, faults=[], step=None), Load())
    assert list(response.drafted_counts) == [3, 0]
    assert list(response.accepted_counts) == [1, 0]
    del trees.resident[1:]
    with pytest.raises(InvalidRequest, match=r"trees\.resident"):
        unpack(target_pb2.VerifyRequest(step=3, trees=trees))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "enforce_eager"), [*((shape, False) for shape in SHAPES), (SHAPES[2], True)], ids=str
)
def test_captured_rounds_give_the_tokens_of_plain_steps(
    shape: RoundShape, enforce_eager: bool, checkpoint: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    plain = Client(make_verifier(checkpoint, device="cuda", enforce_eager=True))
    plain.all(resident=False)
    verifier = make_verifier(checkpoint, head_of(plain), shape, device="cuda", enforce_eager=enforce_eager)
    assert verifier._rounds is not None
    rounds = verifier._rounds.runner
    rounds.warm_up()
    assert (rounds.graphs > 0) is not enforce_eager
    for _ in range(2):
        client = Client(verifier)
        assert client.all(resident=True) == plain.outputs
        for number, spec in enumerate(client.specs):
            if spec.logprobs is not None:
                for ours, theirs in zip(client.logprobs(number), plain.logprobs(number), strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert sum(len(result.accepted_nodes) for results in client.results for result in results) > len(SPECS)
        # Rounds with lists and log probabilities have graphs of their own.
        while (missing := rounds.missing) is not None:
            rounds.capture(missing)
    client = Client(verifier)
    assert client.adventurous(random.Random(1), plain.outputs) == plain.outputs
    assert verifier.slots_used == 0


@pytest.mark.gpu
# torch says once a process that a profile has the events of its own cycle alone, which is what is counted.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_a_round_is_one_graph_and_waits_for_nothing(checkpoint: Path, plain: Client) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    verifier = make_verifier(checkpoint, head_of(plain), SHAPES[1], device="cuda")
    assert verifier._rounds is not None
    verifier._rounds.runner.warm_up()
    specs = [replace(spec, stop_token_ids=()) for spec in SPECS if not spec.reads_logits and spec.max_new_tokens > 8]
    client = Client(verifier, specs)
    while any(len(results) < 4 for results in client.results):
        client.step([client.request(number, resident=True) for number in client.live])
    calls = Counter()
    rounds = 3
    for _ in range(rounds):
        requests = [client.request(number, resident=True) for number in client.live]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            pending = verifier.begin(requests)
            while not pending.forward.is_done:
                pass
            result = verifier.finish(pending)
        calls.update(event.name for event in trace.events() or () if event.name.startswith("cu"))
        for request, one in zip(requests, result.results, strict=True):
            client.outputs[request.key[1]] += one.token_ids
    assert sum(count for name, count in calls.items() if "GraphLaunch" in name) == rounds
    # The profiler itself waits for the device when it ends.
    waits = sum(count for name, count in calls.items() if "Synchronize" in name and "Device" not in name)
    assert waits == 0, calls
