"""The Dockerfile, without Docker: a linter's view of it, and whether what it copies and installs is what there is."""

import fnmatch
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments on one line), in order, comments left out."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    joined = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [
        (name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in joined.split("\n")) if name
    ]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)


def test_a_linter_finds_nothing():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    done = lint(text)
    assert done.returncode == 0, done.stdout
    assert lint(text + "\nUSER root\nRUN cd /tmp && sudo pip install torch\n").returncode != 0


def test_it_runs_as_nobody_in_particular_and_starts_outrider(
    instructions: list[tuple[str, str]], project: dict[str, Any]
):
    last = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    final = instructions[last:]
    assert [rest for name, rest in final if name == "USER"] == ["10001:10001"]
    assert any("useradd --uid 10001 " in rest for name, rest in final if name == "RUN")
    # As a list: a shell in between would keep SIGTERM from the role.
    (entry,) = [json.loads(rest) for name, rest in final if name == "ENTRYPOINT"]
    assert entry == ["outrider"]
    assert entry[0] in project["scripts"]
    assert "CMD" not in {name for name, _ in instructions}


def test_both_variants_are_built_on_a_python_that_the_project_takes(
    instructions: list[tuple[str, str]], project: dict[str, Any]
):
    stages = [rest.split(" AS ") for name, rest in instructions if name == "FROM"]
    names = {stage[1] for stage in stages if len(stage) == 2}
    assert {"base-cpu", "base-cuda", "build-cpu", "build-cuda"} <= names
    for image in (stage[0] for stage in stages):
        if image in names or "${VARIANT}" in image:
            continue
        version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)
        assert version is not None, image
        assert version[1] in SpecifierSet(project["requires-python"])


def test_what_pip_installs_is_pinned(instructions: list[tuple[str, str]], project: dict[str, Any]):
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    commands = [
        shlex.split(part)
        for name, rest in instructions
        if name == "RUN"
        for part in rest.split("&&")
        if "pip install" in part
    ]
    assert commands
    for words in commands:
        assert words[words.index("--constraint") + 1] == "constraints.txt"
        own = Requirement("outrider" + words[-1].removeprefix("."))
        wanted = [*project["dependencies"]]
        for extra in own.extras:
            wanted += project["optional-dependencies"][extra]
        check_pinned(pins, wanted, seen=set())


def check_pinned(pins: dict[str, str], requirements: list[str], *, seen: set[str]) -> None:
    """Every requirement that applies has a pin within it, and so have those of the packages that are here."""
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        # What PyTorch's CUDA build brings along is left to it: constraints.txt says so.
        if str(requirement) in seen or name.startswith(("nvidia-", "cuda-")):
            continue
        seen.add(str(requirement))
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{text}: {pins[name]} pinned"
        try:
            below = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # only an image has it; its own requirements were pinned together with it
        environments = [{"extra": extra} for extra in requirement.extras or {""}]
        applying = [
            str(each).partition(";")[0]
            for each in map(Requirement, below)
            if each.marker is None or any(each.marker.evaluate(environment) for environment in environments)
        ]
        check_pinned(pins, applying, seen=seen)


def test_the_build_gets_what_it_needs_and_nothing_else(project: dict[str, Any]):
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    linked = {
        link.resolve().relative_to(ROOT).parts[0] for link in (ROOT / "src/outrider").iterdir() if link.is_symlink()
    }
    files = {project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt"}
    assert sent == {"src", *linked, *files}
    assert all((ROOT / name).exists() for name in sent)
    again = [rule for rule in rules[1:] if not rule.startswith("!")]
    for junk in ("src/outrider/__pycache__", "kernels/__pycache__", "src/outrider.egg-info", "deploy/kubernetes"):
        assert any(fnmatch.fnmatch(junk, rule) for rule in again), junk
