"""The manifests, without a cluster: what Kubernetes' API would refuse, and what it would take and could not work."""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.scripts.scripts import start as ray_start

from outrider.cli import build_app
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.deploy.config_file import read_config
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.target_worker.config import TargetWorkerConfig

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("raycluster", "rayservice", "plain", "cpu")
ON_RAY = ("raycluster", "rayservice", "cpu")
SECRETS = {
    "outrider-coordinator-tls": {"ca.crt", "tls.crt", "tls.key"},
    "outrider-target-tls": {"ca.crt", "tls.crt", "tls.key"},
    "outrider-draft-tls": {"ca.crt", "tls.crt", "tls.key"},
    "outrider-tokens": {"tokens.json"},
    "outrider-ray-token": {"auth_token"},
}
"""Secrets that docs/kubernetes.md has made by hand, with their keys."""
OUTSIDE = {53, 443, 6443}
"""Ports of what is not ours: names and Kubernetes' API server."""

Manifest = dict[str, Any]
Built = Callable[[str], list[Manifest]]


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, built: Built) -> list[Manifest]:
    return built(request.param)


@pytest.fixture(params=ON_RAY)
def on_ray(request: pytest.FixtureRequest, built: Built) -> list[Manifest]:
    return built(request.param)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def cluster_spec(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the spec of the RayCluster, or of the one that the RayService keeps."""
    (owner,) = of_kind(manifests, "RayCluster", "RayService")
    return owner["spec"] if owner["kind"] == "RayCluster" else owner["spec"]["rayClusterConfig"]


def pod_templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Every pod that comes of them: metadata and spec."""
    for manifest in of_kind(manifests, "Deployment", "Job"):
        yield manifest["spec"]["template"]
    if of_kind(manifests, "RayCluster", "RayService"):
        spec = cluster_spec(manifests)
        yield from (group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]))


def component(template: Manifest) -> str:
    return template["metadata"]["labels"]["app.kubernetes.io/component"]


def selects(selector: Manifest, template: Manifest) -> bool:
    labels = template["metadata"]["labels"]
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    among = [labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])]
    return wanted and all(among)


def commands(template: Manifest) -> Iterator[list[str]]:
    """Every `outrider ...` line that a pod's containers and probes run, as the process would see it."""
    fields = {"POD_IP": "10.1.2.3", "POD_NAME": "outrider-target-0"}
    for container in template["spec"]["containers"]:
        given = {entry["name"] for entry in container.get("env", [])}
        # KubeRay starts Ray where there is no command; elsewhere the image's entry point is outrider.
        if "args" in container:
            assert "command" not in container
            yield [re.sub(r"\$\((\w+)\)", lambda name: fields[name[1]], word) for word in container["args"]]
            assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= given
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if (run := container[name].get("exec") if name in container else None) is not None:
                words = run["command"]
                if words[:2] == ["/bin/sh", "-c"]:
                    (line,) = words[2:]
                    assert set(re.findall(r"\$(\w+)", line)) <= given
                    words = shlex.split(re.sub(r"\$(\w+)", lambda name: fields[name[1]], line))
                    assert words.pop(0) == "exec"
                assert words[0] == "outrider"
                yield words[1:]


def parse(words: list[str]) -> dict[str, Any]:
    """Return the options that the command line reads from these words; nothing is run."""
    app = typer.main.get_command(build_app())
    with app.make_context("outrider", list(words)) as context:
        name, command, rest = app.resolve_command(context, [*context._protected_args, *context.args])  # pyright: ignore[reportAttributeAccessIssue]
        with command.make_context(name, rest, parent=context) as found:
            return found.params


# ------------------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_fits_its_schema(schemas: Any, built: Built, overlay: str):
    found = built(overlay)
    assert len(found) > 8
    for manifest in found:
        schemas.check(manifest)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "outrider"


def test_kustomize_builds_what_these_tests_read(built: Built):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    for overlay in ("rayservice", "cpu"):  # which use all that the reader knows
        command = [kubectl, "kustomize", str(MANIFESTS / overlay)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert in_order(yaml.safe_load_all(done.stdout)) == in_order(built(overlay))


def in_order(manifests: Iterable[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


def test_what_the_reader_does_not_know_is_refused(built: Built, tmp_path: Path):
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: a-\n", encoding="utf-8")
    with pytest.raises(ValueError, match="namePrefix"):
        built(str(tmp_path))


# ------------------------------------------------------------------------------------------------- commands, settings


def test_every_command_is_one_that_outrider_has(manifests: list[Manifest], tmp_path: Path):
    roles = {"coordinator": CoordinatorConfig, "target-worker": TargetWorkerConfig, "draft-worker": DraftWorkerConfig}
    seen = set()
    for template in pod_templates(manifests):
        for words in commands(template):
            options = parse(at_hand(words, manifests, tmp_path))
            seen.add(words[0])
            assert set(re.findall(r"/etc/outrider/[\w./]+", " ".join(words))) <= mounted_files(template)
            if (kind := roles.get(words[0])) is not None:
                names = {field.name for field in dataclasses.fields(kind)}
                config = kind(**{name: _frozen(value) for name, value in options.items() if name in names})
                grace = template["spec"]["terminationGracePeriodSeconds"]
                assert config.drain_s < grace / 1.5
            elif words[0] == "health":
                assert int(options["endpoint"].rpartition(":")[2]) in ports_of(template).values()
                assert options["role"].value == component(template)
    on_ray = bool(of_kind(manifests, "RayCluster", "RayService"))
    assert seen - {"serve"} == ({"health"} if on_ray else {"health", *roles})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def at_hand(words: list[str], manifests: list[Manifest], folder: Path) -> list[str]:
    """The words with the settings where this machine has them: `serve` looks whether its file is there."""
    there = "/etc/outrider/settings/deployment.yaml"
    return [str(settings_file(manifests, folder)) if word == there else word for word in words]


def mounted_files(template: Manifest) -> set[str]:
    """Every file that Secrets and ConfigMaps put into a pod's one container."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    found = set()
    (container,) = template["spec"]["containers"]
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if (secret := volume.get("secret")) is not None:
            assert mount["readOnly"]
            keys = SECRETS[secret["secretName"]]
            items = secret.get("items", [{"key": key, "path": key} for key in keys])
            assert {item["key"] for item in items} <= keys
            found |= {f"{mount['mountPath']}/{item['path']}" for item in items}
        elif "configMap" in volume:
            found.add(f"{mount['mountPath']}/deployment.yaml")
    return found


def test_the_settings_fit_the_cluster(on_ray: list[Manifest], tmp_path: Path):
    config = read_config(settings_file(on_ray, tmp_path))
    spec = cluster_spec(on_ray)
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    counts = {"coordinator": config.coordinators, "target": config.targets, "draft": config.draft_workers}
    for role, count in counts.items():
        group = groups[role]
        (wanted,) = getattr(config, f"{role}_resources")
        name, _, amount = wanted.partition("=")
        # One role a pod: its ports are its own.
        assert group["resources"] == {role: "1"}
        assert (name, float(amount)) == (role, 1.0)
        # One more has room while a worker is replaced.
        assert group["minReplicas"] <= count <= group["replicas"] < group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert float(gpus) == (getattr(config, f"{role}_gpus", 0.0) or 0.0)
        assert f"{config.certs}/{role}.pem" in mounted_files(group["template"])
        assert f"{config.certs}/ca.pem" in mounted_files(group["template"])
        for model in (config.target_model, config.draft_model):
            assert model is None or str(Path(model).parent) in mount_paths(group["template"])
    assert config.max_drafts is not None
    assert config.max_drafts < groups["draft"]["maxReplicas"]
    assert config.min_drafts == groups["draft"]["minReplicas"]
    assert str(config.token_file) in mounted_files(groups["coordinator"]["template"])
    ports = {role: ports_of(group["template"]) for role, group in groups.items()}
    assert ports["coordinator"].items() >= {"clients": config.port, "workers": config.port + 1}.items()
    assert (ports["target"]["target"], ports["draft"]["draft"]) == (config.target_port, config.draft_port)


def settings_file(manifests: list[Manifest], folder: Path) -> Path:
    (found,) = of_kind(manifests, "ConfigMap")
    path = folder / "deployment.yaml"
    path.write_text(found["data"][path.name], encoding="utf-8")
    return path


def mount_paths(template: Manifest) -> set[str]:
    return {mount["mountPath"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]}


def ports_of(template: Manifest) -> dict[str, int]:
    (container,) = template["spec"]["containers"]
    found = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert len(found) == len(set(found.values())) == len(container["ports"])
    return found


def test_the_job_and_the_serve_application_use_the_settings_and_the_cluster_that_there_are(
    built: Built, tmp_path: Path
):
    (job,) = of_kind(built("raycluster"), "Job")
    (words,) = commands(job["spec"]["template"])
    options = parse(at_hand(words, built("raycluster"), tmp_path))
    assert options["detach"]
    # KubeRay calls the head's Service after the cluster, and after the RayService.
    (cluster,) = of_kind(built("raycluster"), "RayCluster")
    port = ports_of(cluster["spec"]["headGroupSpec"]["template"])["client"]
    assert options["address"] == f"ray://{cluster['metadata']['name']}-head-svc:{port}"
    (service,) = of_kind(built("rayservice"), "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    for template in pod_templates(built("rayservice")):
        assert application["args"]["settings"] in mounted_files(template)


# ---------------------------------------------------------------------------------------------------------------- Ray


def test_rays_autoscaler_reads_the_cluster_as_it_is_meant(built: Built):
    (cluster,) = of_kind(built("raycluster"), "RayCluster")
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    seen = {name: (kind["min_workers"], kind["max_workers"], kind["resources"]) for name, kind in types.items()}
    assert seen["headgroup"][2]["CPU"] == 0
    assert seen["coordinator"][:2] == (2, 4)
    assert seen["target"][:2] == (2, 4)
    assert seen["draft"][:2] == (0, 5)
    for role, gpus in (("coordinator", None), ("target", 1), ("draft", 1)):
        assert seen[role][2][role] == 1
        assert seen[role][2].get("GPU") == gpus


def test_ray_starts_with_options_that_it_has_on_the_ports_that_are_named(on_ray: list[Manifest]):
    known = {option for parameter in ray_start.params for option in parameter.opts}
    named = {
        "node-manager-port": "node-manager",
        "object-manager-port": "object-manager",
        "runtime-env-agent-port": "runtime-env",
        "dashboard-agent-grpc-port": "agent-grpc",
        "dashboard-agent-listen-port": "agent",
        "metrics-export-port": "metrics",
    }
    spec = cluster_spec(on_ray)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={spec['rayVersion']}" in pins
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        options = group["rayStartParams"]
        assert {f"--{name}" for name in options} <= known
        ports = ports_of(group["template"])
        assert {name: int(options[option]) for option, name in named.items()}.items() <= ports.items()
        for policy in of_kind(on_ray, "NetworkPolicy"):
            for port in port_rules(policy):
                if "endPort" in port:
                    assert (port["port"], port["endPort"]) == tuple(
                        int(options[f"{end}-worker-port"]) for end in ("min", "max")
                    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_openais_api_is_off_and_comes_on_as_the_docs_say(built: Built, tmp_path: Path, overlay: str):
    manifests = built(overlay)
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (coordinators,) = [template for template in pod_templates(manifests) if component(template) == "coordinator"]
    if overlay == "plain":
        (argument,) = re.findall(r"value: (--http-port=\d+)", page)
        (words,) = [words for words in commands(coordinators) if words[0] == "coordinator"]
        found = [parse(given)["http_port"] for given in (words, [*words, argument])]
    else:
        (key,) = re.findall(r"^ +(http_port: \d+)$", page, re.MULTILINE)
        path = settings_file(manifests, tmp_path)
        as_shipped = path.read_text(encoding="utf-8")
        found = [read_config(path).http_port]
        path.write_text(as_shipped.replace("\ncoordinator:\n", f"\ncoordinator:\n  {key}\n"), encoding="utf-8")
        found.append(read_config(path).http_port)
    assert found == [None, ports_of(coordinators)["http"]]


# ------------------------------------------------------------------------------------------------------------- network


def port_rules(policy: Manifest) -> Iterator[Manifest]:
    for direction in ("ingress", "egress"):
        for rule in policy["spec"].get(direction, []):
            yield from rule["ports"]


def test_every_port_is_one_of_the_pods_that_are_meant(manifests: list[Manifest]):
    templates = list(pod_templates(manifests))
    every_name = {name for template in templates if component(template) != "serve" for name in ports_of(template)}
    for service in of_kind(manifests, "Service"):
        meant = [template for template in templates if selects({"matchLabels": service["spec"]["selector"]}, template)]
        assert meant
        for port in service["spec"]["ports"]:
            assert all(ports_of(template)[port["targetPort"]] == port["port"] for template in meant)
    for policy in of_kind(manifests, "NetworkPolicy"):
        for port in port_rules(policy):
            assert port["port"] in every_name | OUTSIDE or "endPort" in port, port
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"], template) for template in templates)
    for template in templates:
        for container in template["spec"]["containers"]:
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(name, {}):
                    assert container[name]["httpGet"]["port"] in ports_of(template)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_who_has_to_talk_may_talk(built: Built, overlay: str):
    manifests = built(overlay)
    pods = {component(template): template for template in pod_templates(manifests)}
    own = {
        ("coordinator", "target", "target"),
        ("coordinator", "draft", "draft"),
        ("target", "workers", "coordinator"),
        ("draft", "workers", "coordinator"),
    }
    if "serve" in pods:
        own.add(("serve", "client", "head"))
    rays = set() if overlay == "plain" else {"gcs", "dashboard", "node-manager", "object-manager"}
    rays |= set() if overlay == "plain" else {"runtime-env", "agent-grpc", "agent", "metrics"}
    between = {
        (source, name, target)
        for source in pods.keys() - {"serve"}
        for target, callee in pods.items()
        if target not in (source, "serve")
        for name in rays & ports_of(callee).keys()
    }
    # Whoever wears the label reaches the clients' doors of coordinators; who wears nothing reaches nobody.
    own_and_clients = own | {("client", "clients", "coordinator"), ("client", "http", "coordinator")}
    callers = pods | {"client": pod_with({"outrider-client": "true"}), "stranger": pod_with({})}
    for permits, expected in ((lets_in, own_and_clients | between), (lets_out, own | between)):
        permitted = {
            (source, name, target)
            for source, caller in callers.items()
            for target, callee in pods.items()
            if target not in (source, "serve")
            for name in ports_of(callee)
            if permits(manifests, caller, callee, name)
        }
        assert permitted == expected, permits.__name__
        # Coordinators ask each other where workers register, and dial no other's door for clients.
        one = pods["coordinator"]
        among = {name for name in ports_of(one) if permits(manifests, one, one, name)}
        assert among - rays == {"workers"}


def pod_with(labels: dict[str, str]) -> Manifest:
    return {"metadata": {"labels": labels}}


def lets_in(manifests: list[Manifest], caller: Manifest, callee: Manifest, name: str) -> bool:
    return _permits(manifests, "Ingress", "from", of=callee, peer=caller, name=name)


def lets_out(manifests: list[Manifest], caller: Manifest, callee: Manifest, name: str) -> bool:
    return _permits(manifests, "Egress", "to", of=caller, peer=callee, name=name)


def _permits(manifests: list[Manifest], kind: str, end: str, *, of: Manifest, peer: Manifest, name: str) -> bool:
    """Return True if a policy of one pod permits a peer, or none selects the pod."""
    spoken = False
    for policy in of_kind(manifests, "NetworkPolicy"):
        spec = policy["spec"]
        if kind not in spec["policyTypes"] or not selects(spec["podSelector"], of):
            continue
        spoken = True
        for rule in spec.get(kind.lower(), []):
            peers = rule.get(end)
            # The API server and names are elsewhere; their rules name ports that no pod here has.
            meant = peers is None or any(
                "kubernetes.io/metadata.name" not in each.get("namespaceSelector", {}).get("matchLabels", {})
                and selects(each["podSelector"], peer)
                for each in peers
            )
            if meant and name in [port["port"] for port in rule["ports"]]:
                return True
    return not spoken


# ------------------------------------------------------------------------------------------------------------ security


def test_no_pod_may_more_than_it_needs(manifests: list[Manifest]):
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    for template in pod_templates(manifests):
        spec = template["spec"]
        assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        # KubeRay's autoscaler runs in the head's pod and asks Kubernetes for pods; nobody else asks for anything.
        if component(template) != "head":
            assert spec["automountServiceAccountToken"] is False
            assert spec["serviceAccountName"] == "outrider"
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in mount_paths(template)
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert limits.keys() == requests.keys() >= {"cpu", "memory"}
            assert limits["memory"] == requests["memory"]
            assert container["image"].partition("-")[0] == f"outrider:{version[1]}"


def test_every_secret_is_used_and_every_volume_mounted(manifests: list[Manifest]):
    used = set()
    for template in pod_templates(manifests):
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}
        used |= {volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume}
        for entry in container["env"]:
            if (reference := entry.get("valueFrom", {}).get("secretKeyRef")) is not None:
                assert reference["key"] in SECRETS[reference["name"]]
                used.add(reference["name"])
    if of_kind(manifests, "RayCluster", "RayService"):
        used.add(cluster_spec(manifests)["authOptions"]["secretName"])
        assert cluster_spec(manifests)["authOptions"]["mode"] == "token"
    else:
        used.add("outrider-ray-token")
    assert used == SECRETS.keys()


# ---------------------------------------------------------------------------------------------------------------- docs


def test_the_steps_in_the_docs_make_what_the_manifests_need():
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    for name, keys in SECRETS.items():
        written = re.sub("coordinator|target|draft", "$role", name)  # in a loop
        (line,) = [line for line in shell.splitlines() if f"secret generic {written} " in line]
        sources = re.findall(r"--from-(?:file|literal)=([\w.]+)", line)
        assert set(sources) == keys
    lines = re.findall(r"^\s*(?:-- )?(outrider .*?)(?: > .*)?$", shell.replace(" -- ", "\n-- "), re.MULTILINE)
    assert {line.split()[1] for line in lines} == {"certs", "token", "generate", "status"}
    for line in lines:
        parse(shlex.split(line)[1:])
    for overlay in OVERLAYS:
        assert f"| `{overlay}` |" in text
