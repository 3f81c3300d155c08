"""Checks of the n-gram drafter's options, free of torch and numba: command lines are built from them."""

from pathlib import Path
from typing import Any, Literal

MatchType = Literal["prob", "bfs"]

MAX_BREADTH = 32
"""Most children of a node that are considered, the most recently used ones."""
MIN_DEPTH, MAX_DEPTH = 2, 64
"""Tokens of a path in the trie."""
_MAX_CAPACITY = 2**30 - 1
_MAX_DRAFT_TOKENS = 256


def check_ngram_options(config: Any) -> None:
    """Raise ValueError for the first field of a `DraftWorkerConfig` beginning with ngram that is out of range."""
    depth, breadth = config.ngram_max_trie_depth, config.ngram_min_breadth
    _check("ngram_max_trie_depth", depth, MIN_DEPTH, MAX_DEPTH)
    # Eviction never takes a node of the path that is being inserted.
    _check("ngram_capacity", config.ngram_capacity, 2 * depth, _MAX_CAPACITY, why="twice ngram_max_trie_depth")
    _check("ngram_min_breadth", breadth, 1, MAX_BREADTH)
    _check("ngram_max_breadth", config.ngram_max_breadth, breadth, MAX_BREADTH, why="ngram_min_breadth")
    _check("ngram_draft_tokens", config.ngram_draft_tokens, 1, _MAX_DRAFT_TOKENS)
    if config.ngram_match_type not in ("prob", "bfs"):
        raise ValueError(f"ngram_match_type: {config.ngram_match_type!r} given, prob or bfs needed")
    if config.ngram_corpus and not config.uses_ngram:
        raise ValueError("ngram_corpus: a file given, with source ngram or model+ngram needed")
    for path in config.ngram_corpus:
        if not Path(path).is_file():
            raise ValueError(f"ngram_corpus: {path} given, a file needed")


def _check(name: str, value: int, least: int, most: int, *, why: str = "") -> None:
    if not least <= value <= most:
        of = f" ({why})" if why else ""
        raise ValueError(f"{name}: {value} given, {least}{of} to {most} needed")
