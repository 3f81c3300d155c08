"""Tokens that a verification commits with each drafter, by category, on the prompts of `outrider bench`.

    python recipes/smollm2/acceptance.py --target TARGET --draft DRAFT --head HEAD --block BLOCK --ngram \\
        --output-json FILE

measures every drafter that is given, and all pairs that one target can have. The service itself measures it, in sync
mode: every tree is grown to its size before it is verified, so that figures do not depend on how fast drafter and
target are. A head and a block drafter grow inside the target worker, by eight steps a round; a draft model and n-grams
in a draft worker.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from chat import ChatPrompt, read_chat_prompts

from outrider.client import Client
from outrider.client.outputs import GenerationOutput
from outrider.local import LocalService

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import results

logger = logging.getLogger("acceptance")

TEMPERATURES = (0.0, 1.0)
# Services that run at the same time, and sessions of each. Starting is most of the time on a GPU; on a CPU a resident
# drafter's step expands so few nodes that sessions would take them from each other.
_ON_GPU, _ON_CPU = (6, 8), (1, 1)
# What n-grams remember, in nodes a prompt: prompts and answers of a third of the sessions, so none of the temperature
# before.
_NGRAM_NODES = 900


@dataclass(frozen=True, kw_only=True)
class TreeSize:
    """Size of the trees that are verified.

    Attributes:
        name: in the figures.
        nodes: of a tree.
        depth: of its deepest node.
        branching: children of a node, at most.
    """

    name: str
    nodes: int
    depth: int
    branching: int


SIZES = (
    TreeSize(name="chain of 8", nodes=8, depth=8, branching=1),
    TreeSize(name="tree of 32", nodes=32, depth=12, branching=4),
)


@dataclass(frozen=True, kw_only=True)
class Drafters:
    """The drafters of a session's trees.

    Attributes:
        name: in the figures.
        sources: of a draft worker: model, ngram; none without one.
        draft: checkpoint folder of the draft worker's model.
        resident: checkpoint folder of the head or block drafter inside the target worker.
    """

    name: str
    sources: tuple[str, ...] = ()
    draft: Path | None = None
    resident: Path | None = None

    def beside(self, other: "Drafters") -> "Drafters":
        """Return both together."""
        return Drafters(
            name=f"{self.name}+{other.name}",
            sources=self.sources + other.sources,
            draft=self.draft or other.draft,
            resident=self.resident or other.resident,
        )


def with_pairs(drafters: Sequence[Drafters]) -> Iterator[Drafters]:
    """Yield drafters, then all pairs of them; a target has room for one resident drafter."""
    yield from drafters
    for one, other in combinations(drafters, 2):
        if one.resident is None or other.resident is None:
            yield one.beside(other)


def measure_acceptance(
    target: Path, drafters: Drafters, size: TreeSize, prompts: Sequence[ChatPrompt], *, new_tokens: int, device: str
) -> list[dict[str, Any]]:
    """Return a row for each temperature: tokens that a verification commits, by category, and the mean of categories.

    Args:
        target: checkpoint folder.
        drafters: that grow the trees.
        size: of the trees.
        prompts: to answer.
        new_tokens: of each answer, at most.
        device: of both workers.
    """
    # Workers share a GPU: none may take most of what is free.
    arguments = ["--device", device, *(["--kv-bytes", "2000000000"] if device != "cpu" else [])]
    target_args, draft_args = list(arguments), list(arguments)
    if drafters.resident is not None:
        target_args += ["--draft-model", str(drafters.resident), "--draft-branching", str(size.branching)]
    if drafters.sources:
        draft_args += ["--source", "+".join(drafters.sources), "--branching", str(size.branching)]
    if "ngram" in drafters.sources:
        draft_args += ["--ngram-capacity", str(_NGRAM_NODES * len(prompts)), "--ngram-draft-tokens", str(size.nodes)]
        draft_args += ["--ngram-max-breadth", "1"] if size.branching == 1 else []
    rows = []
    with (
        LocalService(
            target_model=target,
            drafts=int(bool(drafters.sources)),
            # N-grams read the tokenizer.
            draft_model=drafters.draft or target,
            # However busy the machine is, a tree is waited for.
            coordinator_args=["--sync-wait-cap-ms", "60000"],
            target_args=target_args,
            draft_args=draft_args,
            start_timeout_s=600.0,
        ) as service,
        Client(service.endpoint) as client,
    ):
        for temperature in TEMPERATURES:
            outputs = _answer(client, prompts, size, temperature=temperature, new_tokens=new_tokens, device=device)
            found = list(zip(prompts, outputs, strict=True))
            lengths = {
                category: _length([output for prompt, output in found if prompt.category == category])
                for category in dict.fromkeys(prompt.category for prompt in prompts)
            }
            row = {"drafters": drafters.name, "trees": size.name, "temperature": temperature}
            rows.append(row | {"mean": round(fmean(lengths.values()), 3)} | lengths)
            logger.info("%s", rows[-1])
    return rows


def _answer(
    client: Client,
    prompts: Sequence[ChatPrompt],
    size: TreeSize,
    *,
    temperature: float,
    new_tokens: int,
    device: str,
) -> list[GenerationOutput]:
    def one(numbered: tuple[int, ChatPrompt]) -> GenerationOutput:
        seed, prompt = numbered
        return client.generate(
            prompt.token_ids, temperature=temperature, seed=seed, max_new_tokens=new_tokens, speculation="sync",
            max_nodes=size.nodes, max_depth=size.depth,
        )  # fmt: skip

    _, sessions = _ON_CPU if device == "cpu" else _ON_GPU
    with ThreadPoolExecutor(sessions) as requests:
        return list(requests.map(one, enumerate(prompts)))


def _length(outputs: Sequence[GenerationOutput]) -> float:
    """Tokens that a verification committed, over all outputs together."""
    steps = sum(output.speculation.verify_steps for output in outputs)
    accepted = sum(output.speculation.accepted_tokens for output in outputs)
    return round(1 + accepted / steps, 3) if steps else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the drafters that are given, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--draft", type=Path, help="checkpoint folder of a draft model")
    parser.add_argument("--head", type=Path, help="checkpoint folder of an EAGLE head of the target")
    parser.add_argument("--block", type=Path, help="checkpoint folder of a block drafter of the target")
    parser.add_argument("--ngram", action="store_true", help="also n-grams")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--prompts", type=int, help="only so many, spread over the file; default: all")
    parser.add_argument("--output-json", type=Path, metavar="FILE", required=True, help="written after each service")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    given = (
        options.draft and Drafters(name="model", sources=("model",), draft=options.draft),
        options.head and Drafters(name="head", resident=options.head),
        options.block and Drafters(name="block", resident=options.block),
        options.ngram and Drafters(name="ngram", sources=("ngram",)),
    )
    drafters = [one for one in given if one]
    if not drafters:
        parser.error("no drafter: --draft, --head, --block or --ngram needed")
    prompts = read_chat_prompts(options.target)
    prompts = prompts[:: max(1, len(prompts) // (options.prompts or len(prompts)))][: options.prompts]
    document = {
        "command": shlex.join(["python", "recipes/smollm2/acceptance.py", *(arguments or sys.argv[1:])]),
        "commit": results.commit(),
        "machine": results.machine(options.device),
        "versions": {"torch": torch.__version__},
    }
    services, _ = _ON_CPU if options.device == "cpu" else _ON_GPU

    def measure(case: tuple[Drafters, TreeSize]) -> list[dict[str, Any]]:
        return measure_acceptance(options.target, *case, prompts, new_tokens=options.new_tokens, device=options.device)

    rows: list[dict[str, Any]] = []
    first, *others = product(with_pairs(drafters), SIZES)
    with ThreadPoolExecutor(services) as pool:
        # The first one compiles for the others.
        for found in chain([measure(first)], pool.map(measure, others)):
            rows = sorted(rows + found, key=lambda row: (row["trees"], row["temperature"]))
            results.write(document | {"acceptance_length": rows}, options.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
