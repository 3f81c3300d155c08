"""A verifier with a draft head, driven by what that head grows: for the tests of resident drafts."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.engine.batch import BatchBuilder
from outrider.engine.eagle_random import write_random_eagle
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.sampling import SamplingSpec
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.resident_growth import DraftLimits, GrownNodes
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

PROMPT = [5, 9, 33, 2, 17, 40, 8]
SPECS = {
    "greedy": SamplingSpec(max_new_tokens=20),
    "coupled": SamplingSpec(temperature=1.0, seed=2**63 + 11, max_new_tokens=20),
    "filters": SamplingSpec(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5, choice_index=2, max_new_tokens=20
    ),
    "penalties": SamplingSpec(
        temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=3, max_new_tokens=20
    ),
    "stop": SamplingSpec(temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 9)), max_new_tokens=40),
    "min-new": SamplingSpec(
        temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 3)), min_new_tokens=9, max_new_tokens=40
    ),
    "allowed": SamplingSpec(allowed_token_ids=(4, 8, 15), temperature=1.0, seed=1, max_new_tokens=24),
    "short": SamplingSpec(max_new_tokens=3),
    "one": SamplingSpec(max_new_tokens=1, temperature=1.0, seed=2),
}


@dataclass
class Rig:
    """One target with its draft; `folder` is the head's."""

    runner: ModelRunner
    resident: ResidentDraft
    verifier: Verifier
    folder: Path
    outputs: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    growth: dict[int, GrownNodes | None] = field(default_factory=dict)
    results: list[TreeResult] = field(default_factory=list)

    def open(
        self,
        number: int,
        spec: SamplingSpec,
        *,
        prompt: Sequence[int] = PROMPT,
        output: Sequence[int] = (),
        epoch: int = 1,
        draft: DraftLimits | None = DraftLimits(),  # noqa: B008 - frozen
    ) -> None:
        self.verifier.open(
            OpenRequest(key=(7, number), epoch=epoch, prompt=prompt, output=output, sampling=spec, draft=draft)
        )
        self.outputs[number], self.prompts[number], self.growth[number] = list(output), prompt, None

    def step(self, numbers: Sequence[int], *, epoch: int = 1) -> list[TreeResult]:
        """Verifies what was grown for each of these."""
        requests = []
        for number in numbers:
            length = len(self.prompts[number]) + len(self.outputs[number])
            grown = self.growth[number]
            tokens, parents = tree_of(grown) if grown is not None and grown.as_of == length else ([], [])
            requests.append(TreeRequest(key=(7, number), epoch=epoch, length=length, tokens=tokens, parents=parents))
        results = self.verifier.step(requests).results
        for number, result in zip(numbers, results, strict=True):
            assert result.outcome is not Outcome.ERROR, result.fault
            if result.outcome is Outcome.ACCEPTED:
                self.outputs[number] += result.token_ids
                self.growth[number] = result.growth
                self.results.append(result)
        return results

    def decode(self, number: int, spec: SamplingSpec) -> list[int]:
        """All of a session's output."""
        out = self.outputs[number]
        while len(out) < spec.max_new_tokens and not (out and out[-1] in spec.stop_token_ids):
            self.step([number])
        return out


def tree_of(grown: GrownNodes) -> tuple[list[int], list[int]]:
    """Growth as a tree to verify: ids become node numbers."""
    numbers = {0: 0} | {node: number for number, node in enumerate(grown.node_ids, start=1)}
    return list(grown.tokens), [numbers[parent] for parent in grown.parents]


def make_rig(checkpoint: Path, head: Path, *, trees: dict[str, Any] | None = None, **overrides: Any) -> Rig:
    """A rig on the CPU; `overrides` are the engine's and the verifier's."""
    steps: dict[str, Any] = {"max_step_tokens": overrides.pop("max_step_tokens", 64)}
    decoder = overrides.pop("decoder", None)
    config: dict[str, Any] = {"num_slots": 512, "max_num_seqs": 8, "max_tree_nodes": 16, "torch_threads": 1} | overrides
    runner = ModelRunner(EngineConfig(model_path=checkpoint, **config), decoder=decoder, draft_head=head)
    shape = {"depth": 3, "top_k": 3, "nodes": 8, "min_value": 0.0} | (trees or {})
    resident = ResidentDraft.load(ResidentConfig(head=head, **shape), runner)
    return Rig(runner, resident, Verifier(runner, resident=resident, **steps), head)


def random_head(folder: Path, checkpoint: Path, **options: Any) -> Path:
    """A head of random weights for a checkpoint."""
    return write_random_eagle(folder, checkpoint, **options)


class FreshHead:
    """The head over one sequence, computed in one go elsewhere: no trees, no steps, no shared slots.

    Args:
        rig: whose head and target.
        tokens: the sequence; the last one has no entry of its own.
    """

    @torch.inference_mode()
    def __init__(self, rig: Rig, tokens: Sequence[int]) -> None:
        config = dataclasses.replace(rig.runner.config, num_slots=128, max_num_seqs=1)
        self._runner = runner = ModelRunner(config, decoder=rig.runner.steps is not None, draft_head=rig.folder)
        self._head = rig.resident.head
        runner.tap(self._head.taps)
        self._caches = [torch.zeros_like(rig.resident.key_cache[:128]) for _ in range(2)]
        self._row, count = runner.slots.acquire_row(), len(tokens) - 1
        runner.slots.extend(self._row, count)
        builder = BatchBuilder()
        builder.add_chain(self._row, tokens[:-1], 0, want_last_logits=False)
        runner.forward(builder.build())
        hidden = self._forward(self._head.fuse(runner.features[:count]), tokens[1:], 0)
        self.last = hidden[-1:]
        """[1, N] what the next token is drafted from."""

    @torch.inference_mode()
    def draft(self, hidden: torch.Tensor, token: int) -> torch.Tensor:
        """[1, N] behind one more token, drafted from `hidden`."""
        length = self._runner.slots.length(self._row)
        self._runner.slots.extend(self._row, 1)
        return self._forward(hidden, [token], length)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, V]."""
        return self._head.logits(hidden)

    def take_back(self, length: int) -> None:
        """Only the first entries stay."""
        self._runner.slots.truncate(self._row, length)

    def entries(self) -> torch.Tensor:
        """[n, 2, Hkv D] keys and values."""
        slots = self._runner.slots
        return _entries(self._caches, slots.table[self._row, : slots.length(self._row)])

    def _forward(self, hidden: torch.Tensor, next_tokens: Sequence[int], first: int) -> torch.Tensor:
        builder = BatchBuilder()
        builder.add_chain(self._row, next_tokens, first, want_last_logits=False)
        step = self._runner.attention_step(builder.build())
        assert step.batch.positions is not None
        return self._head.forward(
            hidden,
            torch.tensor(next_tokens, device=self._runner.device),
            positions=step.batch.positions,
            write_slots=step.write_slots,
            batch=step.batch,
            key_cache=self._caches[0],
            value_cache=self._caches[1],
        )


def held_entries(rig: Rig, number: int) -> tuple[list[int], torch.Tensor]:
    """The tokens that a session's slots stand for, with the one behind them, and what the head has in these slots."""
    session = rig.verifier._sessions[7, number]  # pyright: ignore[reportPrivateUsage]
    count = rig.runner.slots.length(session.row)
    caches = [rig.resident.key_cache, rig.resident.value_cache]
    return session.tokens[: count + 1], _entries(caches, rig.runner.slots.table[session.row, :count])


def check_head(rig: Rig, number: int) -> None:
    """What the head has in a session's slots is what it would have computed of the session's tokens alone."""
    tokens, entries = held_entries(rig, number)
    if not len(entries):
        return
    near = 1e-4 if rig.runner.device.type == "cpu" else 1e-3
    torch.testing.assert_close(entries, FreshHead(rig, tokens).entries(), rtol=near, atol=near)


def _entries(caches: Sequence[torch.Tensor], slots: np.ndarray) -> torch.Tensor:
    chosen = torch.from_numpy(slots.astype(np.int64)).to(caches[0].device)
    return torch.stack([cache[chosen].flatten(1) for cache in caches], dim=1)


@contextmanager
def no_growth(rig: Rig) -> Iterator[None]:
    """Inside, no trees are grown."""
    rig.resident.grows = False
    yield
    rig.resident.grows = True
