"""Runs structured generations in one mode, and judges them."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from benchmarks.structured_bench.schemas import SCHEMAS

from outrider.client import AsyncClient, GenerationOutput

Mode = Literal["async", "sync", "off"]
NEW_TOKENS = 384


@dataclass(frozen=True, kw_only=True)
class Question:
    """One generation that is asked for, in every mode."""

    schema: str
    prompt: str
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """What one mode gave.

    Attributes:
        outputs: one a question.
        total_s: of all.
        faults: why outputs are not what their schema asks for, by number of the question.
    """

    mode: Mode
    outputs: Sequence[GenerationOutput]
    total_s: float
    faults: dict[int, str]

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(output.usage.completion_tokens for output in self.outputs)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification."""
        steps = sum(output.speculation.verify_steps for output in self.outputs)
        return 1 + sum(output.speculation.accepted_tokens for output in self.outputs) / max(steps, 1)


def questions(count: int, prompts: Sequence[str]) -> list[Question]:
    """Schemas in turn, greedy and seeded in turn."""
    names = list(SCHEMAS)
    return [
        Question(
            schema=names[number % len(names)],
            prompt=prompts[number % len(prompts)],
            temperature=(0.0, 1.0)[number // len(names) % 2],
            seed=number,
        )
        for number in range(count)
    ]


async def run_mode(endpoint: str, mode: Mode, asked: Sequence[Question], *, concurrency: int) -> ModeResult:
    """All questions in one mode, so many at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(endpoint) as client:

        async def one(question: Question) -> GenerationOutput:
            async with gate:
                return await client.generate(
                    question.prompt,
                    json_schema=SCHEMAS[question.schema],
                    disable_any_whitespace=True,
                    temperature=question.temperature,
                    seed=question.seed,
                    max_new_tokens=NEW_TOKENS,
                    speculation=mode,
                )

        begin = time.perf_counter()
        outputs = await asyncio.gather(*(one(question) for question in asked))
        total_s = time.perf_counter() - begin
    found = [fault_of(output, SCHEMAS[question.schema]) for output, question in zip(outputs, asked, strict=True)]
    faults = {number: fault for number, fault in enumerate(found) if fault is not None}
    return ModeResult(mode=mode, outputs=outputs, total_s=total_s, faults=faults)


def fault_of(output: GenerationOutput, schema: dict[str, Any]) -> str | None:
    """Why an output is not what the schema asks for; None where it is."""
    if output.finish_reason != "stop":
        return f"cut off: {output.finish_reason}"
    try:
        jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{output.text!r}: {error}"
    return None


def differing(one: ModeResult, other: ModeResult) -> list[int]:
    """Numbers of the questions whose tokens differ."""
    pairs = enumerate(zip(one.outputs, other.outputs, strict=True))
    return [number for number, (a, b) in pairs if list(a.token_ids) != list(b.token_ids)]
