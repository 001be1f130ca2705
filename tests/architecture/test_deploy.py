"""What is deployed fits what is built: settings, health services, ports, selectors and metrics are known to the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

import draft_service.assembly
import gateway.assembly
import verify_service.assembly
from draft_service.settings import DraftSettings
from gateway.settings import GatewaySettings
from tests.architecture.build_context import Ignore, files_of, sources
from tests.architecture.kustomize import assemble, patched
from treewire.runtime.metrics import DraftMetrics, GatewayMetrics, Metrics
from treewire.runtime.settings import ServiceSettings
from verify_service.settings import VerifySettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS: dict[str, type[ServiceSettings]] = {"draft": DraftSettings, "verify": VerifySettings, "gateway": GatewaySettings}
SERVICES = {
    "draft": draft_service.assembly.SERVICE,
    "verify": verify_service.assembly.SERVICE,
    "gateway": gateway.assembly.SERVICE,
}
KUBERNETES = "1.37.0"
SGLANG = ("model", "device", "dtype", "max_context", "max_sessions", "max_tree_nodes", "bind")


class _Compose(yaml.SafeLoader):
    """Reads the tags of compose files as plain values."""


_Compose.add_constructor("!reset", lambda loader, node: None)


def manifests(folder: str) -> list[dict[str, Any]]:
    """Every object of a kustomize folder, patches included."""
    texts = [path.read_text() for path in sorted((DEPLOY / "k8s" / folder).glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def containers(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every container anywhere in a manifest."""
    for key, value in manifest.items():
        if key == "containers":
            yield from value
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, dict):
                yield from containers(child)


def check_environment(service: str, environment: dict[str, str]) -> None:
    """Every variable is a setting, and the values are ones that the settings take."""
    prefix = f"TREEWIRE_{service.upper()}_"
    values = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    assert set(environment) - {prefix + name.upper() for name in values} <= {"TREEWIRE_TOKEN_FILE"}
    known = {name: value for name, value in values.items() if name in SETTINGS[service].model_fields and "${" not in value}
    unknown = set(values) - set(SETTINGS[service].model_fields)
    if values.get("engine") == "sglang":
        known = {name: value for name, value in known.items() if name in SGLANG}
    else:
        assert not unknown
    SETTINGS[service](**{**known, "token": "secret"})  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["compose.yaml", "deploy/compose.gpu.yaml", "tests/compose/simulated.yaml"])
def test_compose_sets_what_the_services_know(file: str) -> None:
    """No variable of a compose file is unknown to its service, and no value refused."""
    services = yaml.load((ROOT / file).read_text(), _Compose)["services"]
    for name in SETTINGS:
        check_environment(name, services[name]["environment"])


def test_compose_finds_replicas_by_name_and_publishes_on_loopback_alone() -> None:
    """The gateway resolves the names of draft and verify, so that they scale; nothing is published beyond this machine."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    environment = services["gateway"]["environment"]
    assert environment["TREEWIRE_GATEWAY_DRAFT"] == "dns:///draft:50051"
    assert environment["TREEWIRE_GATEWAY_VERIFY"] == "dns:///verify:50052"
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert [name for name, service in services.items() if "profiles" in service] == ["prometheus", "grafana"]


def test_images_are_built_from_what_the_build_context_has() -> None:
    """Every file that a stage copies exists and passes .dockerignore."""
    ignore = Ignore((ROOT / ".dockerignore").read_text())
    copied = list(sources((DEPLOY / "Dockerfile").read_text()))
    assert {"pyproject.toml", "constraints-xgrammar.txt", "treewire"} <= set(copied)
    for source in copied:
        files = [file for file in files_of(ROOT, source) if "__pycache__" not in file.parts]
        assert files, f"{source} is not in the project"
        assert [str(file) for file in files if not ignore.passes(file)] == []


def test_images_have_all_of_the_wheel() -> None:
    """Whatever folder the wheel is made of is copied: a build leaves out without a word what is missing."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = {*wheel["packages"], *wheel["force-include"]}
    assert parts <= set(sources((DEPLOY / "Dockerfile").read_text()))


def test_copied_sources_are_read_as_docker_reads_them() -> None:
    """Flags, other stages, comments, continued lines and the JSON form."""
    dockerfile = """
        FROM base AS one
        COPY --chown=1:1 a b/ /to/
        # COPY never /to/
        COPY --from=zero x /to/
        copy c \\
          # between
          d ./
        ADD ["e f", "/to/"]
        RUN COPY g h
        """
    assert list(sources(dockerfile)) == ["a", "b/", "c", "d", "e f"]


@pytest.mark.parametrize(
    ("lines", "passing", "ignored"),
    [
        (["*", "!a", "!b/c.py"], ["a", "a/x/y", "b/c.py"], ["b", "b/d.py", "z/a"]),
        (["!a", "*"], [], ["a"]),
        (["**/*.pyc", "# a comment", "/top"], ["x.py", "b/top"], ["x.pyc", "a/b/x.pyc", "top/z"]),
        (["a/*/c", "?.txt"], ["a/c", "a/b/d/c", "12.txt"], ["a/b/c", "a/b/c/d", "1.txt"]),
        (["a/**", "!a/b"], ["a/b/c", "ab"], ["a/c", "a/c/b"]),
    ],
)
def test_dockerignore_is_read_as_docker_reads_it(lines: list[str], passing: list[str], ignored: list[str]) -> None:
    """The last match decides, of the path or of a folder above it; a star stays within a folder, two do not."""
    ignore = Ignore("\n".join(lines))
    assert [path for path in passing if not ignore.passes(PurePosixPath(path))] == []
    assert [path for path in ignored if ignore.passes(PurePosixPath(path))] == []


def test_gpu_overlay_puts_the_drafter_on_a_gpu_of_its_own() -> None:
    """One device for the drafter, eight others for the target, as many as it has ranks."""
    services = yaml.load((DEPLOY / "compose.gpu.yaml").read_text(), _Compose)["services"]

    def devices(service: str) -> set[str]:
        (reservation,) = services[service]["deploy"]["resources"]["reservations"]["devices"]
        return set(reservation["device_ids"])

    assert len(devices("draft")) == 1
    assert len(devices("verify")) == int(services["verify"]["environment"]["TREEWIRE_VERIFY_TP_SIZE"]) == 8
    assert not devices("draft") & devices("verify")


@pytest.mark.parametrize("name", SETTINGS)
def test_kubernetes_deployments_fit_the_services(name: str) -> None:
    """Settings, probes, ports and the drain fit; several replicas, spread, hardened, with a budget for disruptions."""
    objects = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "k8s" / "base" / f"{name}.yaml").read_text())}
    (container,) = containers(objects["Deployment"])
    environment = {each["name"]: each["value"] for each in container["env"]}
    check_environment(name, environment)
    settings = SETTINGS[name]
    port = int(environment[f"TREEWIRE_{name.upper()}_BIND"].rpartition(":")[2])
    assert port in [each["containerPort"] for each in container["ports"]]
    assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"] == {"port": port, "service": SERVICES[name]}
    assert container["livenessProbe"]["grpc"] == {"port": port}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    grace_seconds = float(
        environment.get(f"TREEWIRE_{name.upper()}_GRACE_SECONDS", settings.model_fields["grace_seconds"].default)
    )
    assert grace_seconds < pod["terminationGracePeriodSeconds"]
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert objects["Deployment"]["spec"]["replicas"] >= 2


def test_kubernetes_names_of_replicas_have_no_address_of_their_own() -> None:
    """What the gateway resolves are headless services of the ports it names."""
    objects = [each for each in manifests("base") if each["kind"] == "Service"]
    ports = {each["metadata"]["name"]: each["spec"] for each in objects if each["spec"].get("clusterIP") == "None"}
    (gateway_container,) = [
        each for manifest in manifests("base") for each in containers(manifest) if each["name"] == "gateway"
    ]
    environment = {each["name"]: each["value"] for each in gateway_container["env"]}
    for variable in ("TREEWIRE_GATEWAY_DRAFT", "TREEWIRE_GATEWAY_VERIFY"):
        name, _, port = environment[variable].removeprefix("dns:///").partition(":")
        assert int(port) in [each["port"] for each in ports[name]["ports"]]


def test_kubernetes_groups_serve_from_their_leaders() -> None:
    """A target over two machines: as many ranks as GPUs, every pod told its rank, and only leaders behind the service."""
    (group,) = [each for each in manifests("gpu") if each.get("kind") == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    num_gpus = 0
    for role in ("leader", "worker"):
        pod = template[f"{role}Template"]
        assert pod["metadata"]["labels"]["treewire/role"] == role
        (container,) = containers(pod)
        flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
        assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert flags["--dist-init-addr"] == "$(LWS_LEADER_ADDRESS):20000"
        assert ("--bind" in flags) == ("readinessProbe" in container) == (role == "leader")
        members = 1 if role == "leader" else template["size"] - 1
        num_gpus += members * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert num_gpus == int(flags["--tp-size"])
    patches = (DEPLOY / "k8s" / "gpu" / "kustomization.yaml").read_text()
    assert patches.count("treewire/role: leader") == 2, "the service and the budget take leaders alone"


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kubernetes_manifests_fit_the_schemas_of_kubernetes(folder: str) -> None:
    """What kustomize makes of each folder holds against the published schemas, unknown fields refused; pods of a
    LeaderWorkerSet, whose schema is not among them, as pods. Where kubectl is, it puts the same together."""
    objects = assemble(DEPLOY / "k8s" / folder)
    if shutil.which("kubectl") is not None:
        command = ["kubectl", "kustomize", str(DEPLOY / "k8s" / folder)]
        made = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert _by_name(made) == _by_name(objects)
    kinds = [each["kind"] for each in objects]
    assert kinds.count("PodDisruptionBudget") == kinds.count("Service") == len(SERVICES)
    assert kinds.count("Deployment") + kinds.count("LeaderWorkerSet") == len(SERVICES)
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            templates = each["spec"]["leaderWorkerTemplate"]
            for role in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "Pod", **templates[role]}
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def _by_name(objects: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_patches_are_merged_as_kubernetes_merges_them() -> None:
    """Maps by key and null removing one, lists of named items by name, other lists as a whole; a whole object deleted."""
    deployment = """
        apiVersion: apps/v1
        kind: Deployment
        metadata: { name: one }
        spec: { a: 1, b: { c: 2, d: 3 }, env: [{ name: X, value: "1" }, { name: Y, value: "2" }], args: [p, q] }
        """
    patch = """
        apiVersion: apps/v1
        kind: Deployment
        metadata: { name: one }
        spec:
          a: null
          b: { c: 4 }
          env: [{ name: Z, value: "5" }, { name: Y, value: "3" }, { name: X, $patch: delete }]
          args: [r]
        """
    objects = [yaml.safe_load(deployment)]
    (changed,) = patched(objects, yaml.safe_load(patch))
    env = [{"name": "Z", "value": "5"}, {"name": "Y", "value": "3"}]
    assert changed["spec"] == {"b": {"c": 4, "d": 3}, "env": env, "args": ["r"]}
    name = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "one"}}
    assert patched(objects, {**name, "$patch": "delete"}) == []
    with pytest.raises(ValueError, match="finds 0 objects"):
        patched(objects, {**name, "metadata": {"name": "two"}})
    with pytest.raises(ValueError, match="is not known here"):
        patched(objects, {**name, "spec": {"$patch": "replace"}})


def test_kubernetes_schemas_refuse_what_does_not_fit() -> None:
    """The check above can fail: a misspelt field of a probe is found."""
    (deployment,) = [
        each for each in manifests("base") if each["kind"] == "Deployment" and "verify" in each["metadata"]["name"]
    ]
    (container,) = containers(deployment)
    container["readinessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecond"):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_kustomize_names_files_that_exist() -> None:
    """Every resource and patch of a kustomization is there."""
    for folder in ("base", "gpu"):
        path = DEPLOY / "k8s" / folder
        kustomization = yaml.safe_load((path / "kustomization.yaml").read_text())
        patches = [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
        for name in [*kustomization["resources"], *patches]:
            assert (path / name).exists(), name


def test_dashboard_shows_metrics_that_exist() -> None:
    """Every metric of the dashboard is one that a service counts; the data source is the provisioned one."""
    names: set[str] = set()
    for make in (GatewayMetrics.on, DraftMetrics.on):
        registry = CollectorRegistry()
        make(registry)
        names |= _sample_names(registry)
    names |= _sample_names(Metrics("test").registry)
    dashboard = json.loads((DEPLOY / "monitoring/grafana/dashboards/treewire.json").read_text())
    sources = yaml.safe_load((DEPLOY / "monitoring/grafana/provisioning/datasources/prometheus.yaml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] in uids
        for target in panel["targets"]:
            used = set(re.findall(r"treewire_\w+", target["expr"]))
            assert used, panel["title"]
            assert used <= names, panel["title"]


def _sample_names(registry: CollectorRegistry) -> set[str]:
    """The names under which the metrics of a registry are scraped, whether or not they have a value yet."""
    suffixes = {"counter": ("_total",), "histogram": ("_sum", "_count", "_bucket"), "gauge": ("",)}
    return {family.name + suffix for family in registry.collect() for suffix in suffixes[family.type]}
