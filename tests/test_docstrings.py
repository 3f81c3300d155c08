"""Wording of docstrings: a first line says what comes back, in the imperative or as a noun phrase."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "src/outrider",
    "kernels",
    "draft_worker",
    "target_worker",
    "coordinator",
    "deploy",
    "recipes",
    "benchmarks",
    "docs",
    "examples",
)
# A clause leans on the name above it, and says nothing on a reference page or in an editor's tooltip.
CLAUSES = {"What", "Whether", "How", "Of", "Which", "Who", "Why"}
# Of functions: one voice. Words that are plural nouns as well (Steps, Runs, Answers) are left out.
THIRD_PERSON = {
    "Adds", "Appends", "Asks", "Begins", "Checks", "Closes", "Ends", "Gives", "Has", "Holds", "Keeps", "Lets", "Loads",
    "Makes", "Puts", "Raises", "Reads", "Removes", "Returns", "Sends", "Serves", "Sets", "Starts", "Stops", "Stores",
    "Takes", "Tells", "Waits", "Writes", "Yields",
}  # fmt: skip


def badly_worded(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) of documentation in a module that begins with a forbidden word."""
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        forbidden = CLAUSES | THIRD_PERSON if is_function else CLAUSES
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            match each:
                case ast.Expr(value=ast.Constant(value=str(words))) if words.partition(" ")[0] in forbidden:
                    yield each.lineno, words.partition("\n")[0]


def test_first_lines_are_imperatives_or_noun_phrases():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, words in badly_worded(path.read_text())
    ]
    assert found == []


def test_clauses_and_third_persons_are_found():
    text = (
        '"""What it is."""\nclass Part:\n    """Keeps a part."""\n    size = 1\n    """Of the part."""\n'
        '    def run(self):\n        """Starts it."""\n    def end(self):\n        """End it."""\n'
    )
    assert sorted(badly_worded(text)) == [(1, "What it is."), (5, "Of the part."), (7, "Starts it.")]
