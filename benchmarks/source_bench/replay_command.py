"""The command line of benchmarks/source_replay.py, and the texts that it replays."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.source_bench.replay import MIXTURES, ReplayFigures, ReplaySettings, ReplayText, replay
from benchmarks.source_bench.workloads import NAMES, workload
from rich.console import Console
from rich.table import Table

_CHILDREN = 4
# Chances that the draft gives its children fall into so many bins of each rank, and are right on average in each.
_BINS = 12


def write_texts(name: str, count: int, new_tokens: int) -> list[ReplayText]:
    """What the embedded target writes of a workload's prompts, greedily, and what the embedded draft guesses there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outrider.models import embedded_draft_path, embedded_target_path

    target: Any
    draft: Any
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path()).eval() for path in (embedded_target_path, embedded_draft_path)
    )
    tokenizer = AutoTokenizer.from_pretrained(embedded_target_path())
    texts: list[ReplayText] = []
    for prompt in workload(name, count).prompts:
        ids = tokenizer(prompt).input_ids
        with torch.no_grad():
            how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
            written = target.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist()
            logits = draft(torch.tensor([ids + written])).logits[0, len(ids) - 1 : -1]
        chances, tokens = logits.softmax(-1).topk(_CHILDREN)
        guesses = [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), chances.tolist(), strict=True)]
        texts.append(ReplayText(prompt=ids, output=written, guesses=guesses))
    return calibrated(texts)


def calibrated(texts: Sequence[ReplayText]) -> list[ReplayText]:
    """The same with chances that are right on average, as those of a draft worker are after a while."""
    chances = np.array([[chance for _, chance in place] for text in texts for place in text.guesses])
    right = np.array(
        [
            [token == own for token, _ in place]
            for text in texts
            for own, place in zip(text.output, text.guesses, strict=True)
        ]
    )
    learned = np.zeros_like(chances)
    for rank in range(chances.shape[1]):
        edges = np.quantile(chances[:, rank], np.linspace(0, 1, _BINS + 1)[1:-1])
        bins = np.searchsorted(edges, chances[:, rank])
        trials, hits = np.bincount(bins, minlength=_BINS), np.bincount(bins, right[:, rank], minlength=_BINS)
        learned[:, rank] = ((hits + 0.5) / (trials + 1))[bins]
    rows = iter(learned.tolist())
    return [
        ReplayText(
            prompt=text.prompt,
            output=text.output,
            guesses=[
                [(token, chance) for (token, _), chance in zip(place, next(rows), strict=True)]
                for place in text.guesses
            ],
        )
        for text in texts
    ]


def _texts(chosen: argparse.Namespace) -> dict[str, list[ReplayText]]:
    if chosen.texts is not None and chosen.texts.is_file():
        held = json.loads(chosen.texts.read_text(encoding="utf-8"))
        if missing := set(chosen.workloads) - set(held):
            raise SystemExit(f"{chosen.texts} has no {' and no '.join(sorted(missing))}: name another file in --texts")
        return {name: [ReplayText(**fields) for fields in texts] for name, texts in held.items()}
    texts = {name: write_texts(name, chosen.requests, chosen.max_new_tokens) for name in chosen.workloads}
    if chosen.texts is not None:
        held = {name: [vars(text) for text in own] for name, own in texts.items()}
        chosen.texts.write_text(json.dumps(held), encoding="utf-8")
    return texts


def row_of(figures: ReplayFigures, first: ReplayFigures, plain: ReplayFigures) -> list[str]:
    """A pass beside the first one of its mixture, and beside `off`."""
    return [
        f"{figures.acceptance_length:.2f}",
        f"{figures.acceptance_length / first.acceptance_length:.2f}" if figures is not first else "",
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.tokens_per_s / plain.tokens_per_s:.2f}",
        f"{figures.rows / figures.verifications:.1f}",
        ", ".join(f"{word} {counts[2]:,}" for word, counts in figures.sources.items()),
    ]


def run(arguments: Sequence[str]) -> int:
    """A table; the exit code."""
    chosen = _parse(arguments)
    console = Console()
    texts = _texts(chosen)
    settings = ReplaySettings(
        sessions=chosen.sessions,
        target_step_ms=chosen.target_step_ms,
        target_row_us=chosen.target_row_us,
        draft_step_ms=chosen.draft_step_ms,
        match_ms=chosen.match_ms,
        insert_us=chosen.insert_us,
        rtt_ms=chosen.rtt_ms,
        max_depth=chosen.max_depth,
        max_nodes=chosen.max_nodes,
    )
    shown = Table(
        title=f"{chosen.sessions} sessions, target {chosen.target_step_ms:g} ms, draft {chosen.draft_step_ms:g} ms"
    )
    for heading in ("workload", "mixture", "pass"):
        shown.add_column(heading)
    for heading in ("acceptance length", "by first pass", "tokens/s", "by off", "rows", "accepted of"):
        shown.add_column(heading, justify="right")
    for name in chosen.workloads:
        own = texts[name]
        (plain,) = replay(own, "off", settings, passes=1)
        for mixture in chosen.mixtures:
            passes = 2 if name == "twice" and mixture != "off" else 1
            found = replay(own, mixture, settings, passes=passes)
            for number, figures in enumerate(found, start=1):
                if figures.outputs != [list(text.output) for text in own]:
                    raise RuntimeError(f"{mixture} has written other tokens than the target")
                shown.add_row(name, mixture, str(number), *row_of(figures, found[0], plain))
    Console(width=max(console.width, 120)).print(shown)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/source_replay.py",
        description="Sources of growth on texts of the embedded target, at given times of steps, on virtual time.",
    )
    own, add = ReplaySettings(), parser.add_argument
    add("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    add("--mixtures", nargs="+", choices=MIXTURES, default=list(MIXTURES))
    add("--requests", type=int, default=64, help="of each workload (default 64)")
    add("--max-new-tokens", type=int, default=128, help="of each request (default 128)")
    add("--sessions", type=int, default=16, help="requests at a time (default 16)")
    add("--max-depth", type=int, default=12, help="of trees (default 12)")
    add("--max-nodes", type=int, default=own.max_nodes, help="of trees (default %(default)s)")
    add("--target-step-ms", type=float, default=own.target_step_ms, help="default %(default)s")
    add("--target-row-us", type=float, default=own.target_row_us, help="of each row (default %(default)s)")
    add("--draft-step-ms", type=float, default=own.draft_step_ms, help="of a model draft (default %(default)s)")
    add("--match-ms", type=float, default=own.match_ms, help="from a commit to its n-grams (default %(default)s)")
    add("--insert-us", type=float, default=own.insert_us, help="of a token into the trie (default %(default)s)")
    add("--rtt-ms", type=float, default=own.rtt_ms, help="to a draft and back (default %(default)s)")
    add("--texts", type=Path, metavar="FILE", help="where texts are kept: read if it is there, else written")
    return parser.parse_args(arguments)
