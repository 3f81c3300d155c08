"""The decoder's steps (staged, in buckets, on CUDA in graphs) give the tokens of transformers' code, step by step."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.models import embedded_target_path
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest, TreeResult
from outrider.target_worker.step_jobs import Batch
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier

NEW_TOKENS = 14
SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=1.0, seed=11),
    SamplingSpec(temperature=0.8, top_k=9, top_p=0.9, seed=-3),
    SamplingSpec(temperature=1.0, min_p=0.1, seed=1 << 63, choice_index=2),
    SamplingSpec(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=5, logit_bias={3: 2.0}),
    SamplingSpec(logprobs=2),
    SamplingSpec(temperature=0.7, seed=8, min_new_tokens=5, stop_token_ids=(7, 9)),
    SamplingSpec(temperature=1.0, seed=6, verification=VerificationRule.TARGET_ONLY),
]


def gemma2(folder: Path) -> Path:
    torch.manual_seed(4)
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=96,
        initializer_range=0.1,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        eos_token_id=60,
        bos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms start at constants: make every weight matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def make_verifier(folder: Path, *, decoder: bool, **options: Any) -> Verifier:
    config: dict[str, Any] = {"num_slots": 400, "max_num_seqs": 8, "max_tree_nodes": 12, "max_model_len": 96} | options
    runner = ModelRunner(EngineConfig(model_path=folder, dtype="float32", **config), decoder=decoder)
    return Verifier(runner, max_step_tokens=48)


def prompt_of(number: int, vocab_size: int) -> list[int]:
    """Some prompts are longer than what a step leaves for prefill."""
    return [random.Random(number).randrange(vocab_size) for _ in range(3 + 9 * (number % 4))]


def tree_for(chance: random.Random, expected: Sequence[int], vocab_size: int) -> tuple[list[int], list[int]]:
    """Up to 12 nodes, many of them on the path that plain decoding takes."""
    tokens: list[int] = []
    parents: list[int] = []
    depths, on_path = [0], [True]
    for _ in range(chance.choice([0, 1, 3, 8, 12])):
        parent = chance.randrange(len(depths))
        follows = on_path[parent] and depths[parent] < len(expected) and chance.random() < 0.7
        token = expected[depths[parent]] if follows else chance.randrange(vocab_size)
        if (token, parent) in zip(tokens, parents, strict=True):
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        on_path.append(follows)
    return tokens, parents


class Client:
    """Drives sessions through a verifier: trees, commits, closes and reopens, as `chance` has it."""

    def __init__(self, verifier: Verifier, specs: Sequence[SamplingSpec]) -> None:
        self.verifier, self.vocab_size = verifier, verifier.model.vocab_size
        self.specs = [replace(spec, max_new_tokens=NEW_TOKENS) for spec in specs]
        self.prompts = [prompt_of(number, self.vocab_size) for number in range(len(specs))]
        self.outputs: list[list[int]] = [[] for _ in specs]
        self.epochs = [1] * len(specs)
        self.accepted = 0
        for number in range(len(specs)):
            self.open(number)

    def open(self, number: int) -> None:
        self.verifier.open(self.open_request(number))

    def close(self, number: int) -> None:
        self.verifier.close((1, number), self.epochs[number])

    def step(self, requests: Sequence[TreeRequest]) -> Sequence[TreeResult]:
        return self.verifier.step(requests).results

    def open_request(self, number: int) -> OpenRequest:
        return OpenRequest(
            key=(1, number), epoch=self.epochs[number], prompt=self.prompts[number], output=list(self.outputs[number]),
            sampling=self.specs[number],
        )  # fmt: skip

    def request(self, number: int, tree: tuple[Sequence[int], Sequence[int]] = ((), ())) -> TreeRequest:
        length = len(self.prompts[number]) + len(self.outputs[number])
        return TreeRequest(key=(1, number), epoch=self.epochs[number], length=length, tokens=tree[0], parents=tree[1])

    def tree(self, number: int, chance: random.Random, expected: Sequence[int]) -> tuple[list[int], list[int]]:
        if self.specs[number].rule is not VerificationRule.COUPLED:
            return [], []  # what they emit depends on the tree; its law alone does not
        return tree_for(chance, expected[len(self.outputs[number]) :], self.vocab_size)

    @property
    def live(self) -> list[int]:
        return [number for number in range(len(self.specs)) if not self.is_done(number)]

    def is_done(self, number: int) -> bool:
        spec, output = self.specs[number], self.outputs[number]
        return len(output) == spec.max_new_tokens or bool(output and output[-1] in spec.stop_token_ids)

    def take(self, numbers: Sequence[int], requests: Sequence[TreeRequest]) -> None:
        results = self.step(requests)
        for number, result in zip(numbers, results, strict=True):
            assert result.outcome is not Outcome.ERROR, result.fault
            self.outputs[number] += result.token_ids
            self.accepted += len(result.accepted_nodes)
            if self.is_done(number):
                self.close(number)

    def plain(self) -> list[list[int]]:
        """Every session without trees, all of them in every step."""
        while live := self.live:
            self.take(live, [self.request(number) for number in live])
        return self.outputs

    def adventurous(self, chance: random.Random, expected: Sequence[Sequence[int]]) -> list[list[int]]:
        """Random sessions with random trees; some are closed and opened again, under a new epoch or with less."""
        while live := self.live:
            numbers = [number for number in live if chance.random() < 0.6]
            trees = [self.tree(number, chance, expected[number]) for number in numbers]
            if numbers:
                self.take(numbers, [self.request(number, tree) for number, tree in zip(numbers, trees, strict=True)])
            if (live := self.live) and chance.random() < 0.3:
                number = chance.choice(live)
                if chance.random() < 0.5:
                    self.close(number)
                else:
                    del self.outputs[number][len(self.outputs[number]) // 2 :]
                self.epochs[number] += 1
                self.open(number)
        return self.outputs


class ThreadedClient(Client):
    """The same through a step thread, under an incarnation of its own: opens and closes travel with the trees."""

    def __init__(self, thread: StepThread, specs: Sequence[SamplingSpec], incarnation: int) -> None:
        self.thread, self.incarnation = thread, incarnation
        self.opens: dict[int, OpenRequest] = {}
        self.closes: list[tuple[tuple[int, int], int]] = []
        super().__init__(thread.ready.result(), specs)

    def open(self, number: int) -> None:
        self.opens[number] = replace(self.open_request(number), key=(self.incarnation, number))

    def close(self, number: int) -> None:
        if self.opens.pop(number, None) is None or self.epochs[number] > 1:
            self.closes.append(((self.incarnation, number), self.epochs[number]))

    def step(self, requests: Sequence[TreeRequest]) -> Sequence[TreeResult]:
        trees = [replace(request, key=(self.incarnation, request.key[1])) for request in requests]
        batch = Batch(opens=list(self.opens.values()), closes=self.closes, trees=trees)
        self.opens, self.closes = {}, []
        return self.thread.submit(batch).result(60).results


def run_threads(folder: Path, expected: Sequence[Sequence[int]], **options: Any) -> StepThread:
    """Three coordinators at one thread, each with sessions of its own."""
    thread = StepThread(lambda: make_verifier(folder, decoder=True, **options))
    thread.start()
    clients = [ThreadedClient(thread, SPECS[: 3 + number], number) for number in range(3)]
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda one: one.adventurous(random.Random(one.incarnation), expected), clients))
    for client, output in zip(clients, outputs, strict=True):
        assert output == expected[: len(output)]
        thread.submit(Batch(closes=client.closes)).result(60)
    assert thread.load.sessions == 0
    thread.stop()
    thread.stopped.result(60)
    return thread


def test_coordinators_at_one_step_thread_get_the_same_tokens(checkpoint: Path) -> None:
    expected = Client(make_verifier(checkpoint, decoder=False, torch_threads=1), SPECS).plain()
    run_threads(checkpoint, expected, torch_threads=1, num_slots=150, max_num_seqs=12)


@pytest.mark.gpu
def test_coordinators_at_one_step_thread_get_the_same_tokens_on_cuda(checkpoint: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    expected = Client(make_verifier(checkpoint, decoder=False, device="cuda", enforce_eager=True), SPECS).plain()
    run_threads(checkpoint, expected, device="cuda", num_slots=150, max_num_seqs=12)


@pytest.mark.parametrize("model", ["llama", "gemma2"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_staged_steps_give_the_tokens_of_transformers_code(
    model: str, deterministic: bool, checkpoint: Path, tmp_path: Path
) -> None:
    folder = checkpoint if model == "llama" else gemma2(tmp_path)
    expected = Client(make_verifier(folder, decoder=False, torch_threads=1), SPECS).plain()
    # So few slots that sessions are preempted.
    verifier = make_verifier(folder, decoder=True, deterministic=deterministic, torch_threads=1, num_slots=120)
    client = Client(verifier, SPECS)
    assert client.adventurous(random.Random(0), expected) == expected
    assert client.accepted > 20
    assert verifier.preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["target", "llama", "gemma2"])
def test_graphs_give_the_tokens_of_eager_steps(model: str, checkpoint: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = {"target": embedded_target_path(), "llama": checkpoint}.get(model) or gemma2(tmp_path)
    eager = make_verifier(folder, decoder=False, device="cuda", enforce_eager=True)
    expected = Client(eager, SPECS).plain()
    verifier = make_verifier(folder, decoder=True, device="cuda", num_slots=120)
    steps = verifier._runner.steps
    assert steps is not None
    for seed in range(3):
        client = Client(verifier, SPECS)
        assert client.adventurous(random.Random(seed), expected) == expected
        # The first round runs without graphs, the second captures, the third replays.
        while (missing := steps.missing) is not None:
            steps.capture(missing)
    assert verifier.preemptions > 0
    assert steps.graphs > 5
