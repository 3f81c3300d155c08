"""Acceptance by rank: what `benchmarks/eagle_acceptance.py` runs.

A round takes the tokens that the tree holds and one more of the target's, and the next round begins there. What a
source would draft off the text's path never counts, so only the path is computed: the rank of the text's next token
among what the source ranks, for the draft model after the true tokens, for the head after as many of its own hidden
states as it is deep.

A shape says which nodes there are: those whose ranks along the path add up to at most so much, to a depth. Arithmetic
is float32 on the CPU.

Shapes: L tokens of a text, T rows, F features, N hidden.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.eagle_bench.texts import Rows, load_decoder, new_caches, run_decoder, sampling, write_texts
from rich.console import Console
from tokenizers import Tokenizer

from outrider.engine.batch import BatchBuilder, ForwardBatch
from outrider.engine.decoder import Decoder
from outrider.engine.eagle import EagleHead, load_eagle_head_of
from outrider.kernels.coupled_sampling import coupled_topk
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.models import embedded_draft_path, embedded_eagle_path, embedded_target_path, held_out_prompts

DEPTH = 6
_RANKS = 4


@dataclass(frozen=True)
class TreeShape:
    """A path is in the tree to `depth` tokens, as long as its ranks add up to at most `rank_sum`."""

    name: str
    rank_sum: int
    depth: int

    @property
    def nodes(self) -> int:
        """Without the root."""
        counts = {0: 1}
        total = 0
        for _ in range(self.depth):
            counts = {
                spent: sum(count for before, count in counts.items() if before <= spent)
                for spent in range(self.rank_sum + 1)
            }
            total += sum(counts.values())
        return total

    def accepted(self, ranks: np.ndarray) -> int:
        """Tokens of a path with these ranks, [DEPTH], that the tree holds."""
        held = np.cumsum(ranks[: self.depth]) <= self.rank_sum
        return int(np.argmin(held)) if not held.all() else self.depth


SHAPES = (TreeShape("chain", 0, 4), TreeShape("chain", 0, 6), TreeShape("tree", 1, 6), TreeShape("tree", 2, 5))


def chain_of(text: list[int]) -> tuple[Rows, int, ForwardBatch]:
    """A text's rows in slots that have room for drafting from every place of it."""
    rows = Rows(num_slots=(DEPTH + 1) * len(text), row_len=2 * len(text) + DEPTH)
    row = rows.slots.acquire_row()
    rows.slots.extend(row, len(text))
    builder = BatchBuilder()
    builder.add_chain(row, text, 0, False)
    return rows, row, builder.build()


def ranks_in(logits: torch.Tensor, text: list[int], places: torch.Tensor, temperature: float) -> np.ndarray:
    """[T] rank of the text's tokens at `places` [T] among the first `_RANKS` that the rows rank, or a large number."""
    ranked, _ = coupled_topk(logits, *sampling(places, temperature), k=_RANKS)
    found = ranked == torch.tensor(text)[places][:, None]
    return torch.where(found.any(1), found.int().argmax(1), 1 << 20).numpy()


def draft_ranks(draft: Decoder, text: list[int], temperature: float) -> np.ndarray:
    """[L, DEPTH]: of the token d + 1 after place n, as the draft model ranks it."""
    rows, _, batch = chain_of(text)
    hidden, _ = run_decoder(draft, rows, batch, new_caches(draft, len(text)))
    logits = draft.logits(hidden, torch.arange(len(text) - 1))
    single = ranks_in(logits, text, torch.arange(1, len(text)), temperature)
    ranks = np.full((len(text), DEPTH), 1 << 20)
    for depth in range(DEPTH):
        ranks[: len(single) - depth, depth] = single[depth:]
    return ranks


def head_ranks(head: EagleHead, target: Decoder, text: list[int], temperature: float) -> np.ndarray:
    """[L, DEPTH]: the same of the head, whose rows past the first read its own hidden states."""
    rows, row, batch = chain_of(text)
    _, features = run_decoder(target, rows, batch, new_caches(target, len(text)), head.taps)
    assert features is not None
    shape = (len(rows.slots.table) * 8, head.kv_heads, head.head_dim)
    caches: dict[str, Any] = {"key_cache": torch.zeros(shape), "value_cache": torch.zeros(shape)}
    # Row i reads the features of place i and the token after it: the last place has none.
    builder = BatchBuilder()
    builder.add_chain(row, text[1:], 0, False)
    hidden = head.forward(head.fuse(features[:-1]), **rows.arrays(builder.build()), **caches)
    ranks = np.full((len(text), DEPTH), 1 << 20)
    # Row i stands for the root at place i + 1.
    roots = np.arange(1, len(text))
    for depth in range(DEPTH):
        kept = roots + depth + 1 < len(text)
        hidden, roots = hidden[torch.from_numpy(kept)], roots[kept]
        places = torch.from_numpy(roots + depth + 1)
        ranks[roots, depth] = ranks_in(head.logits(hidden), text, places, temperature)
        if depth + 1 < DEPTH:
            hidden = head.forward(hidden, **_chain_step(rows, row, text, roots, depth), **caches)
    return ranks


def _chain_step(rows: Rows, text_row: int, text: list[int], roots: np.ndarray, depth: int) -> dict[str, Any]:
    """Of every root at once: the row of the true token at depth `depth` + 1, behind those before it.

    A root's own rows stand in slots past the text's: of depth d at d L + root.
    """
    length, count = len(text), len(roots)
    table = np.zeros((count, length + DEPTH), dtype=np.int32)
    table[:, :length] = rows.slots.table[text_row, :length]
    for before in range(depth + 1):
        table[np.arange(count), roots + before] = (before + 1) * length + roots
    tokens = np.array(text)[roots + depth + 1]
    return {
        "token_ids": torch.from_numpy(tokens),
        "positions": torch.from_numpy((roots + depth).astype(np.int32)),
        "write_slots": torch.from_numpy(((depth + 1) * length + roots).astype(np.int64)),
        "batch": TreeAttentionBatch(
            slot_table=torch.from_numpy(table),
            query_start=torch.arange(count + 1, dtype=torch.int32),
            tree_start=torch.from_numpy((roots + depth + 1).astype(np.int32)),
            prefix_len=torch.from_numpy((roots + depth + 1).astype(np.int32)),
            key_len=torch.from_numpy((roots + depth + 1).astype(np.int32)),
            tree_mask=torch.zeros((count, 1), dtype=torch.int64),
            max_query_len=1,
            max_key_len=table.shape[1],
        ),
    }


def acceptance_length(ranks: list[np.ndarray], prompts: list[int], shape: TreeShape) -> float:
    """Tokens of a round, the target's own included, over all texts; a round begins behind the last token."""
    tokens = rounds = 0
    for ours, prompt in zip(ranks, prompts, strict=True):
        place = prompt  # the first token of the output is the target's: the root
        while place + DEPTH + 1 < len(ours):
            gained = shape.accepted(ours[place]) + 1
            tokens, rounds, place = tokens + gained, rounds + 1, place + gained
    return tokens / rounds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Acceptance lengths by temperature, shape and source, and how often the first of each depth is right."""
    tokenizer = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in held_out_prompts()[: options.prompts]]
    target, draft = load_decoder(embedded_target_path()), load_decoder(embedded_draft_path())
    head = load_eagle_head_of(options.eagle, target)
    report: dict[str, Any] = {"prompts": len(prompts), "tokens": options.tokens, "temperatures": {}}
    for temperature in (0.0, 1.0):
        texts = write_texts(target, prompts, tokens=options.tokens, temperature=temperature)
        lengths = [len(prompt) for prompt in prompts]
        by_source = {
            "draft model": [draft_ranks(draft, text, temperature) for text in texts],
            "eagle": [head_ranks(head, target, text, temperature) for text in texts],
        }
        report["temperatures"][temperature] = {
            source: {
                "acceptance": {
                    f"{shape.name} of {shape.nodes}, depth {shape.depth}": round(
                        acceptance_length(ranks, lengths, shape), 3
                    )
                    for shape in SHAPES
                },
                "first_right": _first_right(ranks, lengths),
            }
            for source, ranks in by_source.items()
        }
    return report


def _first_right(ranks: list[np.ndarray], prompts: list[int]) -> list[float]:
    """By depth, the share of places where what ranks first is the text's."""
    held = np.concatenate([ours[prompt : len(ours) - DEPTH - 1] for ours, prompt in zip(ranks, prompts, strict=True)])
    return [round(float((held[:, depth] == 0).mean()), 4) for depth in range(DEPTH)]


def run(arguments: Sequence[str]) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="eagle_acceptance.py")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts (default 48)")
    parser.add_argument("--tokens", type=int, default=128, help="that the target writes behind each (default 128)")
    parser.add_argument("--eagle", type=Path, default=embedded_eagle_path(), help="folder of the head")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    report = measure(options)
    for temperature, sources in report["temperatures"].items():
        show = Console(highlight=False, soft_wrap=True).print
        show(f"temperature {temperature:g}")
        for source, figures in sources.items():
            right = " ".join(f"{share:.3f}" for share in figures["first_right"])
            for shape, length in figures["acceptance"].items():
                show(f"  {source:12} {shape:24} {length:.3f} tokens a round")
            show(f"  {source:12} {'first of a depth right':24} {right}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
