"""The manifests: valid for Kubernetes' own schemas, and true for smq, whose parser reads what each pod would get."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes_validate
import pytest
import yaml

from smq.coordinator.addresses import format_address
from smq.coordinator.config import ServerConfig, parse_config
from smq.coordinator.listener_config import told
from smq.replication.net.tls import node_uri

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("base", "overlays/cert-manager", "overlays/own-authority", "overlays/outside", "overlays/monitoring")
VERSIONS = ("1.31", "1.33", kubernetes_validate.latest_version())
OF_OTHERS = ("cert-manager.io/", "monitoring.coreos.com/")  # their schemas are not part of Kubernetes
Manifest: TypeAlias = dict[str, Any]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which builds the overlays, is missing"
)


def built(overlay: str) -> list[Manifest]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return built(request.param)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind]


def container_of(manifests: list[Manifest]) -> Manifest:
    (stateful_set,) = of_kind(manifests, "StatefulSet")
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return dict(container)


def expanded(variables: list[Manifest], fields: dict[str, str]) -> dict[str, str]:
    """As Kubernetes does: a variable sees those before it in the list."""
    environment: dict[str, str] = {}
    for variable in variables:
        if "value" in variable:
            text = re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], variable["value"])
        else:
            text = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[variable["name"]] = text
    return environment


def configs(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerConfig]:
    """What each pod's node reads: the file and the variables, as Kubernetes fills them in."""
    (config,) = of_kind(manifests, "ConfigMap")
    (stateful_set,) = of_kind(manifests, "StatefulSet")
    for ordinal in range(stateful_set["spec"]["replicas"]):
        pod = f"smq-{ordinal}"
        fields = {
            "metadata.name": pod,
            "metadata.namespace": "smq",
            "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
        }
        environment = expanded(container_of(manifests)["env"], fields)
        monkeypatch.setattr("socket.gethostname", lambda pod=pod: pod)
        yield parse_config(config["data"]["node.toml"], base_dir=Path("/etc/smq"), environment=environment)


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_for_kubernetes(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        if not manifest["apiVersion"].startswith(OF_OTHERS):
            kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)


def test_the_schemas_refuse_a_mistyped_key() -> None:
    (service, *_) = of_kind(built("base"), "Service")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)


def test_smq_reads_what_each_pod_gets(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(configs(manifests, monkeypatch))
    assert [config.node_id for config in found] == sorted(found[0].peers) == [1, 2, 3]
    assert all(config.peers == found[0].peers and config.rack == "zone-a" for config in found)
    assert not any(config.insecure for config in found)
    assert all(
        config.data_dir.parent == Path("/var/lib/smq") for config in found
    )  # the volume's root is another user's
    for config in found:
        assert config.peers[config.node_id] == (f"smq-{config.node_id - 1}.smq", 7400)
        assert config.grpc_advertised == (f"smq-{config.node_id - 1}.smq.smq.svc", 7401)


def test_no_two_pods_advertise_one_address(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [
        format_address(told(address, advertised))
        for config in configs(manifests, monkeypatch)
        for way in config.ways_in
        for _, address, advertised in way.ports
    ]
    assert len(set(addresses)) == len(addresses)


def test_the_container_opens_the_ports_that_smq_listens_on(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {port["containerPort"] for port in container_of(manifests)["ports"]}
    for config in configs(manifests, monkeypatch):
        listened = {address[1] for way in config.ways_in for _, address, _ in way.ports}
        assert opened == listened | {config.nodes_listen[1], config.http_address[1]}


def test_services_lead_to_ports_of_the_container(manifests: list[Manifest]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container_of(manifests)["ports"]}
    (stateful_set,) = of_kind(manifests, "StatefulSet")
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    for service in of_kind(manifests, "Service"):
        selector = {k: v for k, v in service["spec"]["selector"].items() if not k.startswith("statefulset.")}
        assert selector.items() <= labels.items()
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in ports or target in ports.values(), port
    assert stateful_set["spec"]["serviceName"] in [s["metadata"]["name"] for s in of_kind(manifests, "Service")]


def test_policies_and_budgets_are_for_the_nodes_and_admit_clients(manifests: list[Manifest]) -> None:
    mine = {"matchLabels": {"app.kubernetes.io/name": "smq"}}
    (budget,) = of_kind(manifests, "PodDisruptionBudget")
    assert (budget["spec"]["selector"], budget["spec"]["maxUnavailable"]) == (mine, 1)
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")}
    assert all(policy["podSelector"] == mine for policy in policies.values())
    nodes, clients, monitoring = policies["smq"]["ingress"]
    assert nodes["from"] == [{"podSelector": mine}]
    assert clients["from"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"smq-client": "true"}}}]
    assert {"port": "nodes"} not in clients["ports"] + monitoring["ports"]


def test_pods_run_without_privileges_on_a_read_only_root(manifests: list[Manifest]) -> None:
    (stateful_set,) = of_kind(manifests, "StatefulSet")
    pod, container = stateful_set["spec"]["template"]["spec"], container_of(manifests)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/var/lib/smq", "/tmp"}


def test_probes_ask_what_smq_answers_to_strangers(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    container = container_of(manifests)
    for config in configs(manifests, monkeypatch):
        assert config.http.probes == "anyone"
        assert config.http_tls is not None
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: get["path"] for name, get in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert all(get["scheme"] == "HTTPS" and get["port"] == "http" for get in probes.values())


def is_named(host: str, name: str) -> bool:
    """A star stands for one label."""
    return host == name or (name.startswith("*.") and host.partition(".")[2] == name[2:])


@pytest.mark.parametrize("overlay", ["overlays/cert-manager", "overlays/outside", "overlays/monitoring"])
def test_the_certificate_names_the_nodes_and_every_advertised_host(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = built(overlay)
    (certificate,) = [m["spec"] for m in of_kind(manifests, "Certificate") if m["metadata"]["name"] == "smq-nodes"]
    found = list(configs(manifests, monkeypatch))
    assert certificate["uris"] == [node_uri(config.cluster_id, config.node_id) for config in found]
    for config in found:
        hosts = [told(address, advertised)[0] for way in config.ways_in for _, address, advertised in way.ports]
        assert [host for host in hosts if not any(is_named(host, name) for name in certificate["dnsNames"])] == []
    volumes = of_kind(manifests, "StatefulSet")[0]["spec"]["template"]["spec"]["volumes"]
    assert certificate["secretName"] in [v["secret"]["secretName"] for v in volumes if "secret" in v]


def test_the_monitor_scrapes_a_port_of_the_service_with_the_token() -> None:
    manifests = built("overlays/monitoring")
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    (service,) = [s for s in of_kind(manifests, "Service") if s["metadata"]["name"] == "smq"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["authorization"]["credentials"] == {"name": "smq-metrics", "key": "token"}
