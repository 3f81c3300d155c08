"""The sceptic's bench: real processes on one side, a plain loop over transformers' own forward on the other."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from outrider.client import AsyncClient, Client, GenerationOutput
from outrider.local import LocalService
from outrider.models import embedded_target_path, held_out_prompts
from outrider.sampling import SamplingSpec

# Two choices whose scores lie this near may swap with the shape of a batch (float32 rows differ by about 1e-5).
NEAR_TIE = 1e-4

RULES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 2**63 + 11}}

_MASK = np.uint64(0xFFFFFFFF)


def _philox(seed: int, position: int, choice_index: int, vocab_size: int) -> np.ndarray:
    """uint32 [V]: Philox4x32-10 written out once more, from its paper, so that a fault in ours cannot hide."""
    lanes = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    counter = [lanes, np.full_like(lanes, position), np.zeros_like(lanes), np.full_like(lanes, choice_index)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        low, high = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (high >> np.uint64(32)) ^ counter[1] ^ key[0],
            high & _MASK,
            (low >> np.uint64(32)) ^ counter[3] ^ key[1],
            low & _MASK,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & _MASK, (key[1] + np.uint64(0xBB67AE85)) & _MASK]
    return np.stack(counter, axis=1).reshape(-1)[:vocab_size].astype(np.uint32)


def gumbel_noise(seed: int, position: int, choice_index: int, vocab_size: int) -> np.ndarray:
    """float64 [V], from the definition: G = -log E, E = -log(1 - w)."""
    word = _philox(seed, position, choice_index, vocab_size).astype(np.float32)
    uniform = np.minimum((word + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24)).astype(np.float64)
    return -np.log(-np.log1p(-uniform))


@dataclass(frozen=True, kw_only=True)
class ReferenceOutput:
    """Output of the plain loop; `margins` are the gaps between best and second score of every choice."""

    token_ids: Sequence[int]
    margins: Sequence[float]
    logprobs: Sequence[float]
    finish_reason: str


class Reference:
    """One token at a time through transformers, the choice rule written out plainly in numpy.

    What it has generated once it remembers: no mode and no number of drafts is part of the question.
    """

    def __init__(self) -> None:
        path = embedded_target_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.eos = self.model.generation_config.eos_token_id
        self._known: dict[str, ReferenceOutput] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(self, prompt: Sequence[int], spec: SamplingSpec) -> ReferenceOutput:
        return self.generate_each([prompt], spec)[0]

    def generate_each(self, prompts: Sequence[Sequence[int]], spec: SamplingSpec) -> list[ReferenceOutput]:
        """The outputs of several prompts."""
        questions = {repr((list(prompt), spec)): prompt for prompt in prompts}
        if new := {question: prompt for question, prompt in questions.items() if question not in self._known}:
            self._known.update(zip(new, self.generate_all(list(new.values()), [spec] * len(new)), strict=True))
        return [self._known[question] for question in questions]

    def generate_numbered(self, prompts: Sequence[Sequence[int]], spec: SamplingSpec) -> list[ReferenceOutput]:
        """The outputs of several prompts, the prompt's number added to the seed."""
        specs = [replace(spec, seed=(spec.seed + number) % 2**64) for number in range(len(prompts))]
        return self.generate_all(prompts, specs)

    def generate_by_rule(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, list[ReferenceOutput]]:
        """`generate_numbered` by each of `RULES`."""
        stop = (self.eos,)
        return {
            name: self.generate_numbered(prompts, SamplingSpec(max_new_tokens=new_tokens, stop_token_ids=stop, **rule))
            for name, rule in RULES.items()
        }

    @torch.inference_mode()
    def generate_all(self, prompts: Sequence[Sequence[int]], specs: Sequence[SamplingSpec]) -> list[ReferenceOutput]:
        """Many prompts as rows of one batch, shorter ones padded on the left, where nobody sees it."""
        most = max(map(len, prompts))
        new = torch.tensor([[0] * (most - len(prompt)) + list(prompt) for prompt in prompts])
        seen = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows, cache = [ReferenceRow(prompt, spec) for prompt, spec in zip(prompts, specs, strict=True)], DynamicCache()
        while not all(row.finish_reason for row in rows):
            positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
            output = self.model(
                input_ids=new, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
            )
            # Rows that have ended stay in the batch, and what comes after their end is no part of them.
            new = torch.tensor([[row.take(raw)] for row, raw in zip(rows, output.logits[:, -1].double(), strict=True)])
            seen = torch.cat([seen, torch.ones_like(new)], dim=1)
        return [row.output for row in rows]


class ReferenceRow:
    """One prompt and what comes after it."""

    def __init__(self, prompt: Sequence[int], spec: SamplingSpec) -> None:
        self._token_ids, self._prompt_length, self._spec = list(prompt), len(prompt), spec
        self._margins: list[float] = []
        self._logprobs: list[float] = []
        self.finish_reason = ""

    def take(self, logits: torch.Tensor) -> int:
        """The next token, or the last one again after the end."""
        if not self.finish_reason:
            raw = logits.numpy()
            token, margin = choose(raw, self._token_ids, self._prompt_length, self._spec)
            self._token_ids.append(token)
            self._margins.append(margin)
            self._logprobs.append(float(raw[token] - np.logaddexp.reduce(raw)))
            if token in self._spec.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self._margins) == self._spec.max_new_tokens:
                self.finish_reason = "length"
        return self._token_ids[-1]

    @property
    def output(self) -> ReferenceOutput:
        return ReferenceOutput(
            token_ids=self._token_ids[self._prompt_length :],
            margins=self._margins,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
        )


def choose(raw: np.ndarray, token_ids: Sequence[int], prompt_length: int, spec: SamplingSpec) -> tuple[int, float]:
    """The token after `token_ids`, and how far its score is ahead of the next best."""
    logits = raw.copy()
    output = token_ids[prompt_length:]
    for token in set(token_ids):
        scale = spec.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token in set(output):
        logits[token] -= spec.frequency_penalty * output.count(token) + spec.presence_penalty
    for token, bias in spec.logit_bias.items():
        logits[token] += bias
    allowed = np.ones(len(logits), dtype=bool)
    if spec.allowed_token_ids:
        allowed[:] = False
        allowed[list(spec.allowed_token_ids)] = True
    if len(output) < spec.min_new_tokens:
        allowed[list(spec.stop_token_ids)] = False
    logits[~allowed] = -np.inf
    if spec.temperature == 0:
        scores = logits
    else:
        scores = filtered(logits / spec.temperature, spec)
        scores = scores + gumbel_noise(spec.seed, len(token_ids), spec.choice_index, len(logits))
    best = int(np.argmax(scores))
    return best, float(scores[best] - np.partition(scores, -2)[-2])


def filtered(scaled: np.ndarray, spec: SamplingSpec) -> np.ndarray:
    if spec.top_k > 0:
        scaled = np.where(scaled >= np.sort(scaled)[-min(spec.top_k, len(scaled))], scaled, -np.inf)
    if spec.top_p < 1:
        probabilities = np.exp(scaled - np.logaddexp.reduce(scaled))
        ranked = np.sort(probabilities)[::-1]
        last = int(np.searchsorted(np.cumsum(ranked), spec.top_p))
        scaled = np.where(probabilities >= ranked[min(last, len(ranked) - 1)], scaled, -np.inf)
    if spec.min_p > 0:
        scaled = np.where(scaled >= scaled.max() + np.log(spec.min_p), scaled, -np.inf)
    return scaled


def first_true_difference(got: Sequence[int], wanted: ReferenceOutput) -> int | None:
    """Where two outputs part, unless it is at a near tie; None if nowhere."""
    for place, token in enumerate(wanted.token_ids):
        if place >= len(got) or got[place] != token:
            return None if wanted.margins[place] < NEAR_TIE else place
    return None if len(got) == len(wanted.token_ids) else len(wanted.token_ids)


async def generate_all(
    endpoint: str, prompts: Sequence[Sequence[int]], *, at_once: int = 64, **options: Any
) -> list[GenerationOutput]:
    """The service's outputs of prompts; a prompt's number is added to the seed."""
    gate = asyncio.Semaphore(at_once)
    async with AsyncClient(endpoint) as client:

        async def one(number: int, prompt: Sequence[int]) -> GenerationOutput:
            seed = {"seed": (options["seed"] + number) % 2**64} if "seed" in options else {}
            async with gate:
                return await client.generate(prompt, **options | seed)

        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


@pytest.fixture(scope="session")
def reference() -> Reference:
    # More would wait for cores that the services hold.
    torch.set_num_threads(1)
    return Reference()


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    """Fifty held-out prompts as token ids."""
    texts = held_out_prompts()
    assert len(texts) >= 50
    return [reference.encode(text) for text in texts[:50]]


@pytest.fixture(scope="session")
def differs() -> Callable[[Sequence[int], ReferenceOutput], int | None]:
    return first_true_difference


# What a loaded machine takes for a second is no fault of anybody here: faults have tests of their own.
PATIENT_WITH_WORKERS = ("--lease-ms", "30000", "--step-timeout-s", "60")
PATIENT = (*PATIENT_WITH_WORKERS, "--sync-wait-cap-ms", "60000", "--target-wait-s", "60")


@pytest.fixture(scope="session")
def one_draft() -> Iterator[LocalService]:
    with LocalService(drafts=1, coordinator_args=("--http-port", "0", *PATIENT)) as service:
        yield service


@pytest.fixture(scope="session")
def two_drafts() -> Iterator[LocalService]:
    with LocalService(drafts=2, coordinator_args=PATIENT) as service:
        yield service


@pytest.fixture(scope="module")
def client(one_draft: LocalService) -> Iterator[Client]:
    with Client(one_draft.endpoint) as client:
        yield client
