"""Bans on our sources: reading formats that run code, or code that comes with a checkpoint."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kernels", "draft_worker", "target_worker", "coordinator", "deploy", "src/outrider")
RUNS_CODE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# On data, each of them runs what the data says.
CALLS = {"eval", "exec", "torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"}


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {a.name}" for a in node.names if a.name.partition(".")[0] in RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_CODE:
            yield f"imports {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in CALLS and not (name == "yaml.load" and "Strict" in given.get("Loader", "")):
                yield f"calls {name}"
            if given.get("allow_pickle", "False") != "False":
                yield f"{name}: allow_pickle"
            if given.get("weights_only", "True") != "True":
                yield f"{name}: weights_only"
            if given.get("trust_remote_code", "False") != "False":
                yield f"{name}: trust_remote_code"
            # Without it, transformers asks whoever sits at the terminal.
            if name.startswith("Auto") and name.endswith("from_pretrained") and "trust_remote_code" not in given:
                yield f"{name}: no trust_remote_code=False"
            if "ForCausalLM" in name and name.endswith("from_pretrained") and given.get("use_safetensors") != "True":
                yield f"{name}: no use_safetensors=True"


def test_no_source_runs_what_it_reads():
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    found = [f"{file.relative_to(ROOT)} {fault}" for file in files for fault in faults(file.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text)",
        "AutoConfig.from_pretrained(folder)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=trust)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)",
    ],
)
def test_the_search_finds(source: str):
    assert list(faults(source))
