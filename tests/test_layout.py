"""Guards of the repository's layout: who may import whom, the `kernels` trap, generated code, the wheel."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT / "src" / "outrider"
LINKED = {
    "kernels": ROOT / "kernels",
    "draft_worker": ROOT / "draft_worker",
    "target_worker": ROOT / "target_worker",
    "coordinator": ROOT / "coordinator",
    "deploy": ROOT / "deploy",
    "v1": ROOT / "protos" / "outrider" / "v1",
}
# What a part may import of ours. "shared" is every module of src/outrider that KNOWS_EVERY_ROLE does not name.
ALLOWED = {
    "v1": {"v1"},
    "kernels": {"kernels"},
    "shared": {"shared", "kernels", "v1"},
    "draft_worker": {"draft_worker", "shared", "kernels", "v1"},
    "target_worker": {"target_worker", "shared", "kernels", "v1"},
    "coordinator": {"coordinator", "shared", "v1"},
    "deploy": {*LINKED, "shared", "every role"},
    "every role": {*LINKED, "shared", "every role"},
}
KNOWS_EVERY_ROLE = {"cli", "local"}
HEAVY = {"torch", "transformers", "triton", "ray", "numba"}


def run(*command: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=110, check=False)


def in_fresh_python(code: str) -> str:
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part_of(module: str) -> str:
    """The part that `outrider.<...>` belongs to."""
    name = module.removeprefix("outrider").removeprefix(".").partition(".")[0]
    if name in KNOWS_EVERY_ROLE:
        return "every role"
    return name if name in LINKED else "shared"


def sources() -> Iterator[tuple[str, Path]]:
    """(module, file) of everything that ships, as seen through src/outrider."""
    for folder in (SHARED, *(SHARED / name for name in LINKED)):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(SHARED.parent).with_suffix("").parts
            if folder == SHARED and parts[1] in LINKED:
                continue  # some Pythons walk into links: each linked folder has its own turn
            yield ".".join(parts).removesuffix(".__init__"), file


def imports(file: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, inside functions too; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of(part: str) -> list[str]:
    return [module for module, _ in sources() if part_of(module) == part]


def test_links_are_relative_and_lead_to_the_folders():
    for name, folder in LINKED.items():
        link = SHARED / name
        assert link.is_symlink(), f"{link} is not a symbolic link (git config core.symlinks?)"
        assert not link.readlink().is_absolute()
        assert link.resolve() == folder
        assert folder.is_dir()


def test_no_package_markers_where_they_break_imports():
    """A folder `kernels` with an __init__.py shadows the package that transformers looks for."""
    folders = [*LINKED.values(), ROOT / "protos", ROOT / "tests"]
    assert [str(marker) for folder in folders for marker in folder.rglob("__init__.py")] == []


def test_transformers_imports_from_the_repository_root():
    assert "Llama" in in_fresh_python("from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)")


def test_ruff_bans_a_top_level_kernels():
    done = run(
        sys.executable, "-m", "ruff", "check", "--stdin-filename", "coordinator/probe.py", "-", stdin="import kernels\n"
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_every_import_goes_in_the_allowed_direction():
    wrong = []
    for module, file in sources():
        part = part_of(module)
        for name in imports(file):
            if name.partition(".")[0] == "outrider" and part_of(name) not in ALLOWED[part]:
                wrong.append(f"{module} ({part}) imports {name} ({part_of(name)})")
            if name.partition(".")[0] in LINKED:
                wrong.append(f"{module} imports {name}: say outrider.{name}")
            if name.partition(".")[0] == "ray" and part != "deploy":
                wrong.append(f"{module} ({part}) imports ray: only deploy may")
            if name.partition(".")[0] in HEAVY and part == "coordinator":
                wrong.append(f"{module} imports {name}: the coordinator stays light")
    assert wrong == []


def test_the_direction_guard_sees_a_wrong_import(tmp_path: Path):
    probe = tmp_path / "probe.py"
    probe.write_text("def f():\n    from outrider.target_worker import server\n    import ray.util\n")
    found = set(imports(probe))
    assert found == {"outrider.target_worker.server", "ray.util"}
    assert part_of("outrider.target_worker.server") not in ALLOWED["coordinator"]
    assert part_of("outrider.local") not in ALLOWED["shared"]
    assert part_of("outrider.engine.runner") == part_of("outrider") == "shared"


@pytest.mark.parametrize("part", ["coordinator", "cli", "client"])
def test_stays_light(part: str):
    """The coordinator, the client library and the command's start load no torch, not even through others."""
    modules = modules_of(part) if part in LINKED else [f"outrider.{part}"]
    assert modules
    loaded = in_fresh_python(f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & set(sys.modules)))")
    assert loaded.split() == []


def test_a_command_line_is_built_from_little():
    """Configurations of all roles are part of it, and every actor of a deployment reads one as well."""
    code = f"import sys, outrider.cli; outrider.cli.build_app(); print(*sorted({HEAVY!r} & set(sys.modules)))"
    assert in_fresh_python(code).split() == []


def test_a_command_starts_without_the_options_of_others():
    """Probes of a container run one every few seconds, and `serve` begins with one."""
    others = {"outrider.coordinator.loadtest.options", "outrider.deploy.config", "outrider.client", "numpy"}
    code = f"import sys, outrider.cli; outrider.cli.build_app('health'); print(*sorted({others!r} & set(sys.modules)))"
    assert in_fresh_python(code).split() == []


def test_kernels_import_without_triton():
    """Triton exists on Linux alone; elsewhere the references have to do."""
    modules = ", ".join(modules_of("kernels"))
    in_fresh_python(f"import sys; sys.modules['triton'] = None; import {modules}")


def test_generated_code_is_up_to_date():
    done = subprocess.run(
        ["sh", "protos/generate.sh", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel built from a copy, so that nothing built before gets into it or stays behind."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    copy.mkdir()
    for name in ("src", *{folder.relative_to(ROOT).parts[0] for folder in LINKED.values()}):
        unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile):
    expected = {str(file.relative_to(SHARED.parent)) for _, file in sources()}
    assert len(expected) > 20
    assert expected - set(wheel.namelist()) == set()


def test_the_wheel_holds_the_embedded_pair_and_the_types(wheel: zipfile.ZipFile):
    models = {str(file.relative_to(SHARED.parent)) for file in (SHARED / "models").rglob("*") if file.is_file()}
    data = {name for name in models if "__pycache__" not in name} | {"outrider/py.typed"}
    data.add("outrider/coordinator/bench/prompts.jsonl")
    data |= {f"outrider/v1/{file.name}" for file in LINKED["v1"].glob("*.pyi")}
    assert data - set(wheel.namelist()) == set()
    assert {"outrider/models/target/config.json", "outrider/models/draft/config.json"} <= data


def test_the_wheel_installs_one_command_and_one_top_level_name(wheel: zipfile.ZipFile):
    names = wheel.namelist()
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert wheel.read(entry_points).decode().split() == ["[console_scripts]", "outrider", "=", "outrider.cli:main"]
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"outrider"}


def test_the_console_script_answers():
    script = Path(sys.executable).parent / "outrider"
    done = run(str(script), "--help")
    assert done.returncode == 0, done.stderr
    for command in ("serve", "generate", "status", "coordinator", "draft-worker", "target-worker"):
        assert command in done.stdout
