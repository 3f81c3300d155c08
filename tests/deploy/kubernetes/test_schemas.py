"""The schemas that hold the manifests: a wrong field is found, wherever it is."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

Manifest = dict[str, Any]
MISSING = object()


@pytest.mark.parametrize("schemas", ["1.37"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayCluster", "spec.workerGroupSpec", []),
        ("RayCluster", "spec.workerGroupSpecs.0.maxReplica", 3),
        ("RayCluster", "spec.workerGroupSpecs.0.maxReplicas", "3"),
        ("RayCluster", "spec.workerGroupSpecs.0.groupName", MISSING),
        ("RayCluster", "spec.workerGroupSpecs.0.template", MISSING),
        ("RayCluster", "spec.workerGroupSpecs.0.rayStartParams.object-store-memory", 200_000_000),
        ("RayCluster", "spec.workerGroupSpecs.1.template.spec.nodeSelectors", {"a": "b"}),
        ("RayCluster", "spec.workerGroupSpecs.1.template.spec.containers.0.image", 3),
        ("RayCluster", "spec.workerGroupSpecs.1.template.spec.containers.0.name", MISSING),
        ("RayCluster", "spec.headGroupSpec", MISSING),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.readinessProbe.httpGet.port", MISSING),
        ("RayCluster", "spec.authOptions.mode", "tokens"),
        ("RayCluster", "spec.autoscalerOptions.securityContext.readOnlyRootFileSystem", True),
        ("RayCluster", "spec.autoscalerOptions.version", "v3"),
        ("RayCluster", "spec.enableInTreeAutoscaling", "yes"),
        ("RayCluster", "metadata.label", {}),
        ("RayCluster", "apiVersion", "ray.io/v1alpha1"),
        ("RayService", "spec.serveConfig", "{}"),
        ("RayService", "spec.rayClusterConfig", MISSING),
        ("RayService", "spec.rayClusterConfig.headGroupSpec", MISSING),
        ("Job", "spec.template.spec.restartPolicy", 1),
        ("NetworkPolicy", "spec.podSelectors", {}),
        ("PodDisruptionBudget", "spec.minAvailable", [1]),
        ("Service", "spec.ports.0.port", "x"),
    ],
)
def test_a_wrong_field_is_found(
    schemas: Any, built: Callable[[str], list[Manifest]], kind: str, path: str, value: object
):
    found = built("rayservice" if kind == "RayService" else "raycluster")
    manifest = next(each for each in found if each["kind"] == kind)
    *above, last = path.split(".")
    holder: Any = manifest
    for step in above:
        holder = holder[int(step)] if isinstance(holder, list) else holder[step]
    if value is MISSING:
        del holder[last]
    else:
        holder[last] = value
    with pytest.raises(jsonschema.ValidationError):
        schemas.check(manifest)


def test_an_unknown_kind_is_no_manifest(schemas: Any):
    for version, kind in (("ray.io/v1", "RayCluter"), ("apps/v1", "Deploiment")):
        with pytest.raises(LookupError, match=kind):
            schemas.check({"apiVersion": version, "kind": kind})
