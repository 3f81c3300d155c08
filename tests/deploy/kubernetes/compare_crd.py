"""Compares kuberay_fields.yaml with the CRDs of a KubeRay release: `python compare_crd.py ray.io_rayclusters.yaml ...`.

The files are those of helm-chart/kuberay-operator/crds in KubeRay's repository, or what a cluster says of itself:
`kubectl get crd rayclusters.ray.io rayservices.ray.io --output yaml`. Ends with 1 where the table allows what the CRD
does not; fields that only the CRD has are listed and do no harm.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FIELDS = Path(__file__).with_name("kuberay_fields.yaml")
OWN = {"apiVersion", "kind", "metadata", "status"}


def crds(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, schema of its version v1) of every CRD in a YAML document."""
    if document["kind"] == "List":
        for item in document["items"]:
            yield from crds(item)
    elif document["kind"] == "CustomResourceDefinition":
        for version in document["spec"]["versions"]:
            if version["name"] == "v1":
                yield document["spec"]["names"]["kind"], version["schema"]["openAPIV3Schema"]


def differences(types: dict[str, dict[str, Any]], kind: str, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """What is not the same, one line each; lines that begin with + are fields that only the CRD has."""
    path = path or kind
    fields = {name.rstrip("!"): value for name, value in types[kind].items()}
    required = {name.rstrip("!") for name in types[kind] if name.endswith("!")}
    found = schema.get("properties", {})
    yield from (f"+ {path}.{name}" for name in found.keys() - fields.keys() - OWN)
    yield from (f"{path}.{name}: the CRD has no such field" for name in fields.keys() - found.keys())
    yield from (f"{path}.{name}: required in one alone" for name in required ^ (set(schema.get("required", [])) - OWN))
    for name in fields.keys() & found.keys():
        yield from _of_value(types, fields[name], found[name], f"{path}.{name}")


def _of_value(types: dict[str, dict[str, Any]], kind: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    match kind:
        case [item]:
            expected = "array"
            yield from _of_value(types, item, schema.get("items", {}), f"{path}[]")
        case {"string": None}:
            expected = "object"
            if schema.get("additionalProperties") != {"type": "string"}:
                yield f"{path}: no texts by name in the CRD"
        case str() if "|" in kind:
            expected = "string"
            if set(schema.get("enum", [])) != set(kind.split("|")):
                yield f"{path}: one of {schema.get('enum')} in the CRD"
        case str() if kind in types:
            expected = "object"
            yield from differences(types, kind, schema, path)
        case _:
            expected = "object" if kind.startswith("k8s:") else kind
    if schema.get("type") != expected:
        yield f"{path}: {schema.get('type')} in the CRD"


def main(paths: list[str]) -> int:
    """Prints the differences; returns the exit code."""
    types = yaml.safe_load(FIELDS.read_text(encoding="utf-8"))
    seen, wrong = set(), 0
    for path in paths:
        for document in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            for kind, schema in crds(document):
                if kind in types:
                    seen.add(kind)
                    for line in sorted(differences(types, kind, schema)):
                        wrong += not line.startswith("+")
                        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"compared {', '.join(sorted(seen)) or 'nothing'}: {wrong} differences that matter\n")
    return int(wrong > 0 or not seen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
