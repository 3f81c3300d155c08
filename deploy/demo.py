"""One streamed completion with live counters: what `outrider demo` shows."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.client import AsyncClient, GenerateOptions, GenerationOutput

PROMPT = '''import json
from pathlib import Path


class Settings:
    """Settings of an application, kept in a JSON file."""

    def __init__(self, path):
        self.path = Path(path)
        self.values = {}

    def load(self):
        """Read the values from the file, if there is one."""'''
# Sampled, so that it reads like a program and not like a proof; the seed makes it the same every time.
TEMPERATURE, SEED = 0.7, 5
COUNTER_INTERVAL_MS = 100


@dataclass(kw_only=True)
class Progress:
    """What a viewer sees of a running completion: its last `visible_lines`, so that the counters stay on screen."""

    prompt: str
    visible_lines: int | None = None
    text: str = ""
    tokens: int = 0
    verify_steps: int = 0
    acceptance_length: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None

    def add(self, *, text: str, tokens: int) -> None:
        """Takes a delta."""
        self.first_token_s = self.first_token_s or time.monotonic()
        self.text += text
        self.tokens += tokens

    def tokens_per_second(self) -> float:
        """Since the start, prefill included."""
        return self.tokens / (time.monotonic() - self.started_s)

    def __rich__(self) -> Group:
        counters = Table.grid(padding=(0, 3))
        counters.add_row(
            f"[bold]{self.tokens}[/] tokens",
            f"[bold]{self.tokens_per_second():.1f}[/] tokens/s",
            f"[bold]{self.acceptance_length:.2f}[/] tokens a round",
            f"[bold]{self.verify_steps}[/] rounds",
        )
        lines = Text.assemble((self.prompt, "dim"), self.text).split("\n", allow_blank=True)
        return Group(Text("\n").join(lines[-self.visible_lines :] if self.visible_lines else lines), Text(), counters)


async def stream_completion(
    endpoint: str, *, prompt: str = PROMPT, max_new_tokens: int = 128, console: Console
) -> GenerationOutput:
    """Streams a completion of `prompt` to the console: redrawn in place on a terminal, appended elsewhere.

    Raises:
        OutriderError: as the server says.
    """
    progress = Progress(prompt=prompt, visible_lines=max(1, console.height - 4))
    live = Live(progress, console=console, refresh_per_second=10) if console.is_terminal else contextlib.nullcontext()
    async with AsyncClient(endpoint) as client:
        counting = asyncio.create_task(_count(client, progress))
        try:
            with live:
                if not console.is_terminal:
                    console.out(prompt, end="", highlight=False)
                options: GenerateOptions = {"max_new_tokens": max_new_tokens, "temperature": TEMPERATURE, "seed": SEED}
                async with client.stream(prompt, **options) as stream:
                    async for delta in stream:
                        progress.add(text=delta.text, tokens=len(delta.token_ids))
                        if not console.is_terminal:
                            console.out(delta.text, end="", highlight=False)
                result = stream.result
                progress.verify_steps = result.speculation.verify_steps
                progress.acceptance_length = result.speculation.acceptance_length
                progress.visible_lines = None
        finally:
            counting.cancel()
            # The counters decorate: what goes wrong with the server, the stream says.
            await asyncio.gather(counting, return_exceptions=True)
    return result


def summary(result: GenerationOutput) -> Table:
    """What the completion cost, as a table."""
    table = Table.grid(padding=(0, 2))
    speculation, timings = result.speculation, result.timings
    table.add_row("tokens", f"{result.usage.completion_tokens} (prompt {result.usage.prompt_tokens})")
    table.add_row("rounds", str(speculation.verify_steps))
    table.add_row("acceptance length", f"{speculation.acceptance_length:.2f} tokens a round")
    table.add_row("drafted", f"{speculation.drafted_tokens} nodes verified, {speculation.accepted_tokens} accepted")
    table.add_row("time to first token", f"{timings.ttft_ms:.0f} ms")
    table.add_row("time per token after it", f"{timings.tpot_ms:.2f} ms")
    table.add_row("tokens per second", f"{1000 * result.usage.completion_tokens / timings.total_ms:.1f}")
    return table


async def _count(client: AsyncClient, progress: Progress) -> None:
    """Keeps the speculation counters fresh; the server serves nobody else, so its totals are this completion's."""
    async for info in client.watch(interval_ms=COUNTER_INTERVAL_MS):
        progress.verify_steps = info.speculation.verify_steps
        progress.acceptance_length = info.speculation.acceptance_length
