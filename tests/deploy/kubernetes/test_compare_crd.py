"""The comparison of our table of KubeRay's fields with a CRD: the same finds nothing, every kind of change is told."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

SCRIPT = Path(__file__).with_name("compare_crd.py")
TYPES = yaml.safe_load(SCRIPT.with_name("kuberay_fields.yaml").read_text(encoding="utf-8"))


def as_crd(kind: Any) -> dict[str, Any]:
    """The schema that a CRD has for an entry of the table."""
    match kind:
        case [item]:
            return {"type": "array", "items": as_crd(item)}
        case {"string": None}:
            return {"type": "object", "additionalProperties": {"type": "string"}}
        case str() if "|" in kind:
            return {"type": "string", "enum": kind.split("|")}
        case str() if kind in TYPES:
            required = [name.rstrip("!") for name in TYPES[kind] if name.endswith("!")]
            properties = {name.rstrip("!"): as_crd(value) for name, value in TYPES[kind].items()}
            return {"type": "object", "properties": properties, "required": required}
    return {"type": "object" if kind.startswith("k8s:") else kind}


def compare(folder: Path, change: Callable[[dict[str, Any]], object]) -> tuple[int, str]:
    schema = as_crd("RayCluster")
    change(schema["properties"]["spec"]["properties"])
    names, versions = {"kind": "RayCluster"}, [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]
    crd = {"kind": "CustomResourceDefinition", "spec": {"names": names, "versions": versions}}
    path = folder / "crd.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "items": [crd]}), encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_the_same_fields_are_the_same_and_further_ones_do_no_harm(tmp_path: Path):
    code, text = compare(tmp_path, lambda spec: spec.update(tlsOptions={"type": "object"}))
    assert (code, text) == (0, "+ RayCluster.spec.tlsOptions\ncompared RayCluster: 0 differences that matter\n")


def test_what_is_different_is_told(tmp_path: Path):
    def change(spec: dict[str, Any]) -> None:
        del spec["headServiceAnnotations"]
        spec["rayVersion"]["type"] = "integer"
        spec["workerGroupSpecs"]["items"]["required"].remove("groupName")
        spec["authOptions"]["properties"]["mode"]["enum"].append("none")

    code, text = compare(tmp_path, change)
    assert code == 1
    assert text.splitlines() == [
        "RayCluster.spec.authOptions.mode: one of ['disabled', 'token', 'none'] in the CRD",
        "RayCluster.spec.headServiceAnnotations: the CRD has no such field",
        "RayCluster.spec.rayVersion: integer in the CRD",
        "RayCluster.spec.workerGroupSpecs[].groupName: required in one alone",
        "compared RayCluster: 4 differences that matter",
    ]
