"""The trie against a plain count of every run, its own invariants under eviction, and others' cases."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, TextTails, propose
from outrider.draft_worker.drafters.ngram.trie import ROOT, NgramTrie, find


class Tree(NamedTuple):
    """Proposals after one text."""

    tokens: list[int]
    parents: list[int]
    shares: list[float]
    counts: list[int]
    matched: int


def trees_of(trie: NgramTrie, texts: list[list[int]], config: ProposalConfig | None = None) -> list[Tree]:
    found = propose(trie, TextTails.of(texts, trie.max_trie_depth - 1), config or ProposalConfig())
    columns = (found.tokens, found.parents, found.shares, found.counts)
    return [
        Tree(*(column[row, :size].tolist() for column in columns), matched=matched)
        for row, (size, matched) in enumerate(found.found.tolist())
    ]


def counts_of(trie: NgramTrie) -> dict[tuple[int, ...], int]:
    """Every path with its count, by walking children."""
    nodes, found = trie.nodes, {}
    waiting: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    while waiting:
        node, path = waiting.pop()
        child = nodes.first[node]
        while child:
            found[*path, int(nodes.token[child])] = int(nodes.count[child])
            waiting.append((child, (*path, int(nodes.token[child]))))
            child = nodes.next[child]
    return found


def child_of(trie: NgramTrie, parent: int, token: int) -> int:
    nodes = trie.nodes
    return int(find(nodes.token, nodes.parent, nodes.chain, nodes.heads, parent, token))


def runs_of(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, min(begin + depth, len(text)) + 1)
    )


def random_texts(seed: int, *, vocab: int, texts: int = 6, length: int = 40) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(vocab) for _ in range(drawn.randrange(1, length))] for _ in range(texts)]


def check(trie: NgramTrie) -> None:
    """Check the invariants that hold after every insertion."""
    nodes, paths = trie.nodes, counts_of(trie)
    assert len(paths) == len(trie) <= trie.capacity
    order, node = {}, nodes.older[ROOT]
    while node != ROOT:
        assert nodes.newer[nodes.older[node]] == node
        order[int(node)] = len(order)
        node = nodes.older[node]
    assert len(order) == len(paths)
    where = {}
    for path in sorted(paths, key=len):
        parent, token = where.get(path[:-1], ROOT), path[-1]
        node = where[path] = child_of(trie, parent, token)
        assert node != 0
        assert nodes.depth[node] == len(path)
        assert parent == ROOT or order[parent] < order[node]
    for path, node in where.items():
        # A path's last tokens are a path too, and the node knows it.
        assert nodes.suffix[node] == where.get(path[1:], ROOT)
        assert len(path) == 1 or path[1:] in where


@pytest.mark.parametrize("seed", range(5))
def test_every_run_is_counted_once(seed: int):
    texts = random_texts(seed, vocab=4)
    trie = NgramTrie(capacity=10_000, max_trie_depth=5)
    for text in texts:
        trie.insert((text, 0))
    assert counts_of(trie) == runs_of(texts, 5)
    check(trie)


def test_a_text_that_grows_counts_as_if_it_had_come_at_once():
    (text,) = random_texts(7, vocab=3, texts=1, length=200)
    trie = NgramTrie(capacity=10_000, max_trie_depth=6)
    drawn, start = random.Random(1), 0
    while start < len(text):
        end = min(start + drawn.randrange(1, 9), len(text))
        # Of what was there before, the last five tokens are enough.
        begin = max(0, start - 5)
        trie.insert((text[begin:end], start - begin))
        start = end
    assert counts_of(trie) == runs_of([text], 6)
    check(trie)


@pytest.mark.parametrize(("capacity", "vocab"), [(10, 2), (30, 5), (100, 50), (257, 1000)])
def test_what_was_not_used_for_longest_makes_room(capacity: int, vocab: int):
    trie = NgramTrie(capacity=capacity, max_trie_depth=5)
    for text in random_texts(capacity, vocab=vocab, texts=30):
        trie.insert((text, 0))
        check(trie)
    # The newest text of all is there, however full it is: ten nodes.
    text = [vocab + place for place in range(4)]
    trie.insert((text, 0))
    assert trees_of(trie, [text[:2]])[0].tokens == text[2:]


@pytest.mark.parametrize(("capacity", "vocab"), [(5000, 3), (5000, 40), (300, 8), (20, 3)])
def test_texts_that_grow_in_turn_keep_the_trie_in_order(capacity: int, vocab: int):
    depth, drawn = 6, random.Random(3)
    texts = random_texts(5, vocab=vocab, texts=5, length=60)
    trie, starts = NgramTrie(capacity=capacity, max_trie_depth=depth), [0] * len(texts)
    while any(start < len(text) for start, text in zip(starts, texts, strict=True)):
        place = drawn.randrange(len(texts))
        start, end = starts[place], min(starts[place] + drawn.randrange(1, 6), len(texts[place]))
        first = max(0, start - depth + 1)
        trie.insert((texts[place][first:end], start - first))
        starts[place] = end
        check(trie)
    if not trie.evicted:
        assert counts_of(trie) == runs_of(texts, depth)


def test_counts_stay_at_the_most_that_they_can_be():
    trie = NgramTrie(capacity=100, max_trie_depth=4)
    trie.insert(([1, 2], 0))
    trie.nodes.count[child_of(trie, ROOT, 1)] = 2**31 - 2
    for _ in range(3):
        trie.insert(([1, 2], 0))
    assert trees_of(trie, [[2]])[0].tokens == []
    assert counts_of(trie) == {(1,): 2**31 - 1, (2,): 4, (1, 2): 4}


def test_counts_and_shares_tell_how_sure_a_proposal_is():
    trie = NgramTrie(capacity=1000, max_trie_depth=4)
    for text in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 9]):
        trie.insert((text, 0))
    (tree,) = trees_of(trie, [[7, 1, 2]])
    assert tree == Tree([3, 9], [-1, -1], [0.75, 0.25], [3, 1], 2)


def test_many_texts_at_once_are_each_as_alone():
    trie = NgramTrie(capacity=5000, max_trie_depth=6)
    texts = random_texts(3, vocab=4, texts=20)
    for text in texts:
        trie.insert((text, 0))
    config = ProposalConfig(draft_tokens=9)
    together = trees_of(trie, [*texts, []], config)
    assert together == [trees_of(trie, [text], config)[0] for text in [*texts, []]]
    assert together[-1].tokens == []
    for tree in together:
        assert len(tree.tokens) <= 9
        assert all(parent < place for place, parent in enumerate(tree.parents))
        # Siblings are distinct.
        assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)


def test_where_nothing_can_be_written_it_is_compiled_at_every_start():
    """The class of errors with which numba says so."""
    code = (
        "import numba\n"
        "plain = numba.njit\n"
        "def njit(cache=False, **options):\n"
        "    if cache: raise RuntimeError('cannot cache function: no locator available')\n"
        "    return plain(**options)\n"
        "numba.njit = njit\n"
        "from outrider.draft_worker.drafters.ngram import trie\n"
        "assert not hasattr(trie.find, '_cache') or not trie.find.stats.cache_path\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ the cases of other projects

VECTORS = Path(__file__).parent / "vectors"


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.fixture(scope="module")
def sglang() -> dict:
    return json.loads((VECTORS / "sglang_ngram_corpus.json").read_text())


def trie_of(params: dict, texts: list[list[int]]) -> NgramTrie:
    trie = NgramTrie(capacity=params["capacity"], max_trie_depth=params["max_trie_depth"])
    for text in texts:
        trie.insert((text, 0))
    return trie


def config_of(params: dict, match_type: str) -> ProposalConfig:
    return ProposalConfig(
        # Theirs count the last token of the text as a node of the tree.
        draft_tokens=params["draft_token_num"] - 1,
        min_breadth=params["min_bfs_breadth"],
        max_breadth=params["max_bfs_breadth"],
        match_type=match_type,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("match_type", ["bfs", "prob"])
def test_trees_are_those_of_sglang(sglang: dict, match_type: str):
    trie = trie_of(sglang["params"], sglang["seed_sequences"])
    expected = sglang[f"expected_{match_type.upper()}"]
    config = config_of(sglang["params"], match_type)
    for query, ids, masks in zip(sglang["queries"], expected["ids"], expected["masks"], strict=True):
        wanted = {tuple(ids[column] for column in range(1, len(ids)) if mask[column]) for mask in masks[1:]}
        (tree,) = trees_of(trie, [query], config)
        # Zeros fill up.
        assert paths_of(tree.tokens, tree.parents) == {path for path in wanted if path != (0,)}


def test_it_behaves_as_sglang_says(sglang: dict):
    cases = {case["name"]: case for case in sglang["behaviour_cases"]}
    for name, texts, query in [
        ("frequency_boost_PROB", None, None),
        ("shared_suffix", None, None),
        ("context_longer_than_depth", [list(range(1, 20))], list(range(1, 16))),
        ("eviction_old", [[*range(first, first + 30)] for first in (5000, *range(6000, 6150, 30))], None),
    ]:
        case = cases.pop(name)
        params = sglang["params"] | case.get("params", {})
        trie = trie_of(params, texts or case["put"])
        (tree,) = trees_of(trie, [query or case["query"]], config_of(params, "prob"))
        assert set(case.get("must_contain", [])) <= set(tree.tokens), name
        assert not set(case.get("must_not_contain", [])) & set(tree.tokens), name
        assert "expected_ids_1" not in case or tree.tokens[0] == case["expected_ids_1"]
    reset = cases.pop("reset")
    # A trie is not reset, but replaced by an empty one.
    assert not any(reset["expected_ids"][1:])
    assert trees_of(trie_of(sglang["params"], []), [reset["query"]], config_of(sglang["params"], "bfs"))[0].tokens == []
    # About masks alone, which are not made here.
    assert cases.keys() == {"leaf_paths"}


@pytest.mark.parametrize(("cases", "match_type"), [("cases", "prob"), ("gpu_cases", "bfs")])
def test_single_branches_are_those_of_vllm(cases: str, match_type: str):
    """Theirs looks for the last tokens in the text itself; the first or the last place where they stand wins."""
    for case in json.loads((VECTORS / "vllm_ngram.json").read_text())[cases]:
        given = case["inputs"]
        trie = NgramTrie(capacity=10_000, max_trie_depth=given["max_ngram"] + 1)
        trie.insert((given["tokens"], 0))
        config = ProposalConfig(
            draft_tokens=given["k"],
            min_match=given["min_ngram"],
            max_breadth=1,
            match_type=match_type,  # pyright: ignore[reportArgumentType]
        )
        (tree,) = trees_of(trie, [given["tokens"]], config)
        # Where theirs fills up with the last token because the text is at its end, ours goes on.
        expected = [token for token in case["expected"] if token != given.get("last_sampled")]
        assert tree.tokens[: len(expected)] == expected, case
        assert expected or not tree.tokens, case
