"""Documentation: links lead somewhere, and the pages that are made from the code are those of this code."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path):
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](gone.md) [d](https://example.org)\n")
    assert broken_links(page) == ["#three", "gone.md"]


def strings_of(folder: Path) -> Iterator[str]:
    """All text that a folder's programs may say, pieces of f-strings put together."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_the_program_says_what_troubleshooting_quotes():
    said = [text for folder in ("coordinator", "deploy", "draft_worker", "target_worker", "src/outrider")
            for text in strings_of(ROOT / folder)]  # fmt: skip
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        words for cell in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE) for words in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(quoted) >= 20
    assert [words for words in quoted if not any(words in text for text in said)] == []


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "README.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in contents]
    assert missing == ["README.md"]


def test_generated_pages_are_up_to_date(generate: ModuleType):
    stale = [name for name, make in generate.PAGES.items() if (ROOT / name).read_text() != make()]
    assert stale == [], "run `make docs` and commit what it writes"


def test_results_become_tables(generate: ModuleType, tmp_path: Path):
    measured = {
        "command": "python benchmarks/some.py",
        "machine": {"name": "a GPU"},
        "left_out": [],
        "cells": [{"sessions": 1, "round_ms": [5.0, 6.25]}, {"sessions": 16, "tokens": {"per_s": 12345.6}}],
    }
    (tmp_path / "some.json").write_text(json.dumps(measured))
    page = generate.results_page("note", tmp_path)
    assert "[some](#somejson)" in page
    assert "- **command**: `python benchmarks/some.py`\n- **machine**: name a GPU" in page
    header, _, first, second = page[page.index("**cells**") :].split("\n")[2:6]
    assert header == "| sessions | round_ms | tokens.per_s |"
    assert (first, second) == ("| 1 | 5 / 6.25 |  |", "| 16 |  | 12,346 |")
    assert "left_out" not in page


def test_a_proto_is_read_with_its_comments(generate: ModuleType):
    text = """
        // What it is.
        message Thing {
          // How many.
          optional uint32 count = 1;
          oneof way {
            string name = 2;
          }
          map<uint32, float> bias = 3;
        }
        message Empty {}
        service Door {
          // Opens.
          rpc Open(Thing) returns (stream Empty);
        }
        """
    thing, empty, door = generate.proto_blocks(text)
    assert (thing.name, thing.comment, empty.rows) == ("Thing", "What it is.", [])
    assert thing.rows == [
        ("`count`", "`optional uint32`", "1", "How many."),
        ("`name`", "`string`", "2", "One of `way`."),
        ("`bias`", "`map<uint32, float>`", "3", ""),
    ]
    assert door.rows == [("Open", "`Thing`", "stream of `Empty`", "Opens.")]
    with pytest.raises(ValueError, match="not understood in message Odd"):
        list(generate.proto_blocks("message Odd {\n  what is this\n}"))
