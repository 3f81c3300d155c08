"""An EAGLE head in one-graph rounds drafts what it would draft with the whole sequence before it."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.batch import BatchBuilder
from outrider.engine.config import EngineConfig
from outrider.engine.eagle_random import write_random_eagle
from outrider.engine.model_runner import ModelRunner
from outrider.engine.one_graph_shape import RoundShape
from outrider.kernels.coupled_sampling import coupled_topk
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.one_graph_setup import make_rounds
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest
from outrider.target_worker.verifier import Verifier

SPECS = [
    SamplingSpec(max_new_tokens=40),
    SamplingSpec(temperature=1.0, seed=11, max_new_tokens=40),
    SamplingSpec(temperature=0.8, top_k=9, seed=-3, max_new_tokens=40),
    SamplingSpec(
        repetition_penalty=1.4, presence_penalty=2.0, frequency_penalty=1.0, logit_bias={3: 6.0}, max_new_tokens=40
    ),
]


SHAPES = [RoundShape(), RoundShape(steps=3, candidates=2)]


@pytest.fixture(scope="module")
def head_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_eagle(tmp_path_factory.mktemp("head"), checkpoint, taps=(0, 1, 2), seed=2)


def make_runner(folder: Path, head: Path, device: str) -> ModelRunner:
    config = EngineConfig(
        model_path=folder, dtype="float32", num_slots=300, max_num_seqs=4, max_model_len=96, max_tree_nodes=12,
        torch_threads=1, device=device, enforce_eager=False,
    )  # fmt: skip
    return ModelRunner(config, decoder=True, draft_head=head)


def processed(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], spec: SamplingSpec) -> torch.Tensor:
    """[1, V] the logits after penalties and bias, token by token."""
    logits = logits.clone()
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = float(logits[0, token])
        value = value / spec.repetition_penalty if value > 0 else value * spec.repetition_penalty
        value -= spec.frequency_penalty * counts[token] + spec.presence_penalty * (counts[token] > 0)
        logits[0, token] = value
    for token, bias in spec.logit_bias.items():
        logits[0, token] += bias
    return logits


def drafted_anew(
    runner: ModelRunner,
    resident: ResidentDraft,
    tokens: Sequence[int],
    *,
    prompt_len: int,
    spec: SamplingSpec,
    shape: RoundShape,
) -> list[int]:
    """The candidates after `tokens`, from one forward of the model and one of the head over all of them."""
    slots = runner.slots
    row = slots.acquire_row()
    # One row more for each token that the head drafts on from.
    slots.extend(row, len(tokens) + shape.steps)
    builder = BatchBuilder()
    builder.add_chain(row, tokens[:-1], 0, want_last_logits=True)
    batch = builder.build()
    runner.forward(batch)
    hidden = resident.head.fuse(runner.features[: batch.num_rows])
    following, found = list(tokens[1:]), []
    record = np.array([spec.seed], dtype=np.int64)
    for step in range(shape.steps):
        builder = BatchBuilder()
        builder.add_chain(row, following, len(tokens) - 1 + step - len(following), want_last_logits=True)
        view = runner.attention_step(builder.build())
        assert view.batch.positions is not None
        hidden = resident.head.forward(
            hidden, torch.tensor(following, device=runner.device), positions=view.batch.positions,
            write_slots=view.write_slots, batch=view.batch, key_cache=resident.key_cache,
            value_cache=resident.value_cache,
        )[-1:]  # fmt: skip
        output = [*tokens[prompt_len:], *found[:: shape.candidates]]
        logits = processed(resident.head.logits(hidden).cpu(), tokens[:prompt_len], output, spec)
        numbers = (spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        place = torch.tensor([len(tokens) + step])
        ids, _ = coupled_topk(
            logits, torch.from_numpy(record), place, *(torch.tensor([each]) for each in numbers), k=shape.candidates
        )
        found += ids[0].tolist()
        following = [found[-shape.candidates]]
    slots.release_row(row)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_are_those_of_the_whole_sequence(shape: RoundShape, checkpoint: Path, head_folder: Path) -> None:
    check_candidates(shape, checkpoint, head_folder, device="cpu")


def test_rounds_keep_to_the_most_rows_of_a_step(checkpoint: Path, head_folder: Path) -> None:
    """Six rows a step: of four sessions with a candidate each at most three fit."""
    runner = make_runner(checkpoint, head_folder, "cpu")
    resident = ResidentDraft.load(ResidentConfig(head=head_folder), runner)
    rounds = make_rounds(runner, resident, RoundShape(), max_step_tokens=6)
    verifier = Verifier(runner, max_step_tokens=6, rounds=rounds, resident=resident)
    lengths = dict.fromkeys(range(4), 3)
    for number in lengths:
        verifier.open(OpenRequest(key=(1, number), epoch=1, prompt=[5, 6, 7], output=[], sampling=SamplingSpec()))
    drafted = 0
    for _ in range(12):
        pending = verifier.begin(
            [
                TreeRequest(key=(1, number), epoch=1, length=length, tokens=(), parents=(), resident=True)
                for number, length in lengths.items()
            ]
        )
        assert pending.forward.tokens <= 6
        for number, result in enumerate(verifier.finish(pending).results):
            assert result.outcome is not Outcome.ERROR, result.fault
            lengths[number] += len(result.token_ids)
            drafted += result.drafted
    assert min(lengths.values()) > 6
    assert drafted > 0


def test_a_round_of_one_session_fits_a_step() -> None:
    options: dict[str, Any] = {"resident_draft": "embedded", "one_graph": True, "one_graph_steps": 3, "max_num_seqs": 2}
    TargetWorkerConfig(**options, max_step_tokens=4)
    with pytest.raises(ValueError, match="max_step_tokens: 3 given, at least 4 needed for one_graph_steps 3"):
        TargetWorkerConfig(**options, max_step_tokens=3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_are_those_of_the_whole_sequence_on_cuda(
    shape: RoundShape, checkpoint: Path, head_folder: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_candidates(shape, checkpoint, head_folder, device="cuda")


def check_candidates(shape: RoundShape, checkpoint: Path, head_folder: Path, *, device: str) -> None:
    """Rounds of three sessions, and after each what the head says from scratch."""
    runner = make_runner(checkpoint, head_folder, device)
    resident = ResidentDraft.load(ResidentConfig(head=head_folder), runner)
    rounds = make_rounds(runner, resident, shape, max_step_tokens=40)
    rounds.runner.warm_up()
    verifier = Verifier(runner, max_step_tokens=40, max_prefill_tokens=7, rounds=rounds, resident=resident)
    other = make_runner(checkpoint, head_folder, device)
    anew = ResidentDraft.load(ResidentConfig(head=head_folder), other)
    chance = random.Random(5)
    texts = [[chance.randrange(61) for _ in range(5 + 6 * number)] for number in range(len(SPECS))]
    lengths = [len(text) for text in texts]
    for number, (text, spec) in enumerate(zip(texts, SPECS, strict=True)):
        verifier.open(OpenRequest(key=(1, number), epoch=1, prompt=list(text), output=[], sampling=spec))
    checked = 0
    for step in range(12):
        # A plain step now and then: the ordinary way has to keep the head's KV up, too.
        requests = [
            TreeRequest(key=(1, number), epoch=1, length=len(text), tokens=(), parents=(), resident=step % 5 != 3)
            for number, text in enumerate(texts)
        ]
        if step == 6:
            # What the target says decides: a session that is a few tokens back goes on from there.
            texts[0] = texts[0][:-2]
            requests[0] = replace(requests[0], length=len(texts[0]))
        for text, result in zip(texts, verifier.step(requests).results, strict=True):
            assert result.outcome is not Outcome.ERROR
            text.extend(result.token_ids)
        for number, session in enumerate(verifier._sessions.values()):
            if session.drafted_at == len(texts[number]):
                found = rounds.runner.program.known[session.row].tolist()
                assert found == drafted_anew(
                    other, anew, texts[number], prompt_len=lengths[number], spec=SPECS[number], shape=shape
                )
                checked += 1
    assert checked > 20
