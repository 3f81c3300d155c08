"""Worth of a drafter on the prompts of `outrider bench`: tokens that a verification commits, by category.

The service itself measures it, in sync mode: every tree is grown to its size before it is verified, so that figures do
not depend on how fast draft and target are.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat import ChatPrompt

from outrider.client import Client
from outrider.client.outputs import GenerationOutput
from outrider.local import LocalService

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class TreeSize:
    """Size of the trees that are verified.

    Attributes:
        nodes: of a tree.
        depth: of its deepest node.
        branching: children of a node, at most.
    """

    nodes: int
    depth: int
    branching: int


SIZES = {
    "chain of 8": TreeSize(nodes=8, depth=8, branching=1),
    "tree of 32": TreeSize(nodes=32, depth=12, branching=4),
}


def measure_acceptance(
    target: Path,
    draft: Path,
    prompts: Sequence[ChatPrompt],
    *,
    new_tokens: int,
    worker_args: Sequence[str],
    concurrency: int = 8,
) -> list[dict[str, Any]]:
    """Return one row for each size of tree, temperature and category, and one for all categories.

    Args:
        target: checkpoint folder.
        draft: checkpoint folder of a model with its tokenizer.
        prompts: to answer.
        new_tokens: of each answer, at most.
        worker_args: further options of both workers.
        concurrency: requests under way.
    """
    rows = []
    for name, size in SIZES.items():
        own = ["--branching", str(size.branching), *worker_args]
        with (
            LocalService(target_model=target, draft_model=draft, target_args=worker_args, draft_args=own,
                         start_timeout_s=300.0) as service,
            Client(service.endpoint) as client,
        ):  # fmt: skip
            for temperature in TEMPERATURES:
                outputs = _answer(
                    client, prompts, size, temperature=temperature, new_tokens=new_tokens, concurrency=concurrency
                )
                found = list(zip(prompts, outputs, strict=True))
                for category in (*dict.fromkeys(prompt.category for prompt in prompts), "all"):
                    group = [output for prompt, output in found if category in (prompt.category, "all")]
                    rows.append({"drafts": name, "temperature": temperature, "category": category, **_lengths(group)})
    return rows


def _answer(
    client: Client,
    prompts: Sequence[ChatPrompt],
    size: TreeSize,
    *,
    temperature: float,
    new_tokens: int,
    concurrency: int,
) -> list[GenerationOutput]:
    def one(numbered: tuple[int, ChatPrompt]) -> GenerationOutput:
        seed, prompt = numbered
        return client.generate(
            prompt.token_ids, temperature=temperature, seed=seed, max_new_tokens=new_tokens, speculation="sync",
            max_nodes=size.nodes, max_depth=size.depth,
        )  # fmt: skip

    with ThreadPoolExecutor(concurrency) as requests:
        return list(requests.map(one, enumerate(prompts)))


def _lengths(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Tokens, verifications and tokens that a verification committed, over all outputs together."""
    steps = sum(output.speculation.verify_steps for output in outputs)
    accepted = sum(output.speculation.accepted_tokens for output in outputs)
    return {
        "tokens": sum(output.usage.completion_tokens for output in outputs),
        "verifications": steps,
        "acceptance_length": round(1 + accepted / steps, 3) if steps else 1.0,
    }
