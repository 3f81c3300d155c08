"""The n-gram source's options, checked without loading anything that works with them."""

from pathlib import Path
from typing import Literal, Protocol

MatchType = Literal["prob", "bfs"]

# Of a node's children, so many are weighed: those used last.
WEIGHED = 32
DEPTHS = (2, 64)
_MOST_NODES = 2**30
_MOST_DRAFT_TOKENS = 256


class NgramOptions(Protocol):
    """The fields of the worker's configuration, by their names; see there."""

    @property
    def ngram_capacity(self) -> int: ...  # noqa: D102
    @property
    def ngram_max_trie_depth(self) -> int: ...  # noqa: D102
    @property
    def ngram_min_breadth(self) -> int: ...  # noqa: D102
    @property
    def ngram_max_breadth(self) -> int: ...  # noqa: D102
    @property
    def ngram_draft_tokens(self) -> int: ...  # noqa: D102
    @property
    def ngram_match_type(self) -> MatchType: ...  # noqa: D102
    @property
    def ngram_corpus(self) -> tuple[Path, ...]: ...  # noqa: D102
    @property
    def uses_ngram(self) -> bool: ...  # noqa: D102


def check_ngram_options(options: NgramOptions) -> None:
    """Looks at every value.

    Raises:
        ValueError: one is out of range, with the value and what is needed.
    """
    depth, breadth = options.ngram_max_trie_depth, options.ngram_min_breadth
    _check("ngram_max_trie_depth", depth, *DEPTHS)
    # Eviction never takes a node that the insertion under way stands on.
    _check("ngram_capacity", options.ngram_capacity, 2 * depth, _MOST_NODES - 1, why="twice ngram_max_trie_depth")
    _check("ngram_min_breadth", breadth, 1, WEIGHED)
    _check("ngram_max_breadth", options.ngram_max_breadth, breadth, WEIGHED, why="ngram_min_breadth")
    _check("ngram_draft_tokens", options.ngram_draft_tokens, 1, _MOST_DRAFT_TOKENS)
    if options.ngram_match_type not in ("prob", "bfs"):
        raise ValueError(f"ngram_match_type: {options.ngram_match_type!r} given, prob or bfs needed")
    if options.ngram_corpus and not options.uses_ngram:
        raise ValueError("ngram_corpus: a file given, with source ngram or model+ngram needed")
    for path in options.ngram_corpus:
        if not Path(path).is_file():
            raise ValueError(f"ngram_corpus: {path} given, a file needed")


def _check(name: str, value: int, least: int, most: int, *, why: str = "") -> None:
    if not least <= value <= most:
        of = f" ({why})" if why else ""
        raise ValueError(f"{name}: {value} given, {least}{of} to {most} needed")
