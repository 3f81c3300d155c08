"""Manifests as Kubernetes would get them, and the schemas that its API would hold them to; all without a cluster."""

import copy
import json
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.exceptions
import pytest
import yaml
from referencing import Registry, Resource

MANIFESTS = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
FIELDS = Path(__file__).with_name("kuberay_fields.yaml")
RAY_KINDS = ("RayCluster", "RayService")
KUBERNETES = ("1.34", "1.37")
"""The versions whose schemas count, the oldest and the newest."""

KUBERAY_ID = "https://outrider.internal/kuberay.json"

Manifest = dict[str, Any]


# ------------------------------------------------------------------------------------------------- kustomize, strictly


def build(folder: Path) -> list[Manifest]:
    """Return what `kubectl kustomize FOLDER` prints, for the few features that these manifests use.

    Raises:
        ValueError: it uses something else.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := kustomization.keys() - {"resources", "patches", "images", "replacements"}:
        raise ValueError(f"{folder}: {sorted(unknown)} not known to this reader")
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else _documents(path)
    for patch in kustomization.get("patches", []):
        for operation in yaml.safe_load(patch["patch"]):
            _apply(_one(found, patch["target"]), operation)
    for image in kustomization.get("images", []):
        for container in _containers(found):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    for replacement in kustomization.get("replacements", []):
        source = dict(replacement["source"])
        value = _walk(_one(found, source), source.pop("fieldPath").split("."))
        for target in replacement["targets"]:
            for field in target["fieldPaths"]:
                *above, last = field.split(".")
                holder = _walk(_one(found, target["select"]), above)
                if last not in holder:
                    raise ValueError(f"{folder}: nothing to replace at {field}")
                holder[last] = copy.deepcopy(value)
    local = "config.kubernetes.io/local-config"
    return [manifest for manifest in found if local not in manifest["metadata"].get("annotations", {})]


def _documents(path: Path) -> list[Manifest]:
    # Through JSON, so that what YAML's anchors share is not shared: a patch is of one place.
    return json.loads(json.dumps(list(yaml.safe_load_all(path.read_text(encoding="utf-8")))))


def _one(manifests: list[Manifest], wanted: dict[str, str]) -> Manifest:
    (found,) = [
        manifest
        for manifest in manifests
        if manifest["kind"] == wanted["kind"] and manifest["metadata"]["name"] == wanted["name"]
    ]
    return found


def _walk(value: Any, path: list[str]) -> Any:
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    *above, last = operation["path"].removeprefix("/").split("/")
    holder = _walk(manifest, above)
    key: Any = int(last) if isinstance(holder, list) else last
    match operation["op"]:
        case "add" if isinstance(holder, dict):
            holder[key] = operation["value"]
        case "replace":
            _ = holder[key]  # it has to be there
            holder[key] = operation["value"]
        case "remove":
            del holder[key]
        case other:
            raise ValueError(f"{other} at {operation['path']} not known to this reader")


def _containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container of every pod in a manifest, or in a list of them."""
    if isinstance(value, list):
        for entry in value:
            yield from _containers(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key in ("containers", "initContainers"):
                yield from entry
            else:
                yield from _containers(entry)


# ------------------------------------------------------------------------------------------------------------- schemas


class Schemas:
    """The schemas of one Kubernetes version, KubeRay's kinds beside its own. Unknown fields are errors."""

    def __init__(self, version: str) -> None:
        folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
        self._folder = folder
        definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
        kuberay = {
            "$id": KUBERAY_ID,
            "$schema": definitions["$schema"],
            "$defs": _kuberay_definitions(definitions["$id"]),
        }
        known: Registry[Any] = Registry()
        self._registry = known.with_resources(
            [(schema["$id"], Resource.from_contents(schema)) for schema in (definitions, kuberay)]
        )

    def check(self, manifest: Manifest) -> None:
        """Raises jsonschema.ValidationError with the place, LookupError where there is no such kind."""
        group, _, version = manifest["apiVersion"].rpartition("/")
        if group == "ray.io" and manifest["kind"] in RAY_KINDS:
            schema = {"$ref": f"{KUBERAY_ID}#/$defs/{manifest['kind']}"}
        else:
            name = "-".join(filter(None, (manifest["kind"].lower(), group.partition(".")[0], version)))
            path = self._folder / f"{name}.json"
            if not path.is_file():
                raise LookupError(f"no kind {manifest['kind']} in {manifest['apiVersion']}")
            schema = json.loads(path.read_text(encoding="utf-8"))
        validator = jsonschema.Draft202012Validator(schema, registry=self._registry)
        if error := jsonschema.exceptions.best_match(validator.iter_errors(manifest)):
            raise error


def _kuberay_definitions(kubernetes_id: str) -> dict[str, Any]:
    types = yaml.safe_load(FIELDS.read_text(encoding="utf-8"))
    definitions = {name: _object(fields, kubernetes_id) for name, fields in types.items()}
    for kind in RAY_KINDS:
        head = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": kind}}
        head["metadata"] = _schema("k8s:io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", kubernetes_id)
        definitions[kind]["properties"] |= head
        definitions[kind]["required"] += list(head)
    return definitions


def _object(fields: dict[str, Any], kubernetes_id: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name.rstrip("!"): _schema(kind, kubernetes_id) for name, kind in fields.items()},
        "required": [name.rstrip("!") for name in fields if name.endswith("!")],
        "additionalProperties": False,
    }


def _schema(kind: Any, kubernetes_id: str) -> dict[str, Any]:
    match kind:
        case [item]:
            return {"type": "array", "items": _schema(item, kubernetes_id)}
        case {"string": None}:
            return {"type": "object", "additionalProperties": {"type": "string"}}
        case "string" | "integer" | "boolean":
            return {"type": kind}
        case str() if "|" in kind:
            return {"enum": kind.split("|")}
        case str() if kind.startswith("k8s:"):
            return {"$ref": f"{kubernetes_id}#/$defs/{kind.removeprefix('k8s:')}"}
        case str():
            return {"$ref": f"#/$defs/{kind}"}
    raise ValueError(f"{kind!r} in {FIELDS.name}")


@pytest.fixture(scope="session", params=KUBERNETES)
def schemas(request: pytest.FixtureRequest) -> Schemas:
    return Schemas(request.param)


@pytest.fixture(scope="session")
def built() -> Callable[[str], list[Manifest]]:
    """Return a function that builds a folder of manifests, a new copy each time."""
    return lambda folder: build(MANIFESTS / folder)
