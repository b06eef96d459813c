"""The chart's objects: valid for Kubernetes' own schemas, and true for smq, whose parser reads what each pod would get.

They are judged as tests/deploy/rendered keeps them; test_helm.py holds that Helm gives just these (`full`).
"""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from smq.coordinator.config.node_toml import told
from smq.replication.net.peer_tls import node_uri
from tests.deploy.custom_resources import MODULES, definitions, validate
from tests.deploy.helm import RELEASES
from tests.deploy.manifests import Manifest, configs, container_of, of_kind, pods_of, rendered, stateful_set_of
from tests.kafka.foreign.clients import Missing
from tests.unit.coordinator.server.test_self_check import shared_by

VERSIONS = ("1.31", "1.33", kubernetes_validate.latest_version())
OF_OTHERS = tuple(f"{group}/" for group in MODULES)  # their schemas are not part of Kubernetes


@pytest.fixture(scope="module")
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """Of a release."""
    return rendered(request.param)


WITH_OTHERS = ["cert-manager", "outside", "monitoring", "different"]
everywhere = pytest.mark.parametrize("manifests", RELEASES, indirect=True)


@everywhere
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_for_kubernetes(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        if not manifest["apiVersion"].startswith(OF_OTHERS):
            kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)


@pytest.fixture
def others() -> None:
    """Needs the definitions of the projects whose objects these are."""
    try:
        for group in MODULES:
            definitions(group)
    except Missing as e:
        pytest.skip(str(e))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("manifests", WITH_OTHERS, indirect=True)
def test_objects_of_others_are_valid_by_the_definitions_of_their_projects(manifests: list[Manifest]) -> None:
    of_others = [manifest for manifest in manifests if manifest["apiVersion"].startswith(OF_OTHERS)]
    assert of_others
    for manifest in of_others:
        validate(manifest)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("manifests", ["monitoring"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("Certificate", "renewBefore", "renewBeforeExpiry"),
        ("Certificate", "digital signature", "digital signatur"),
        ("Certificate", "rotationPolicy: Always", "rotationPolicy: Sometimes"),
        ("Issuer", "selfSigned", "selfsigned"),
        ("ServiceMonitor", "matchLabels", "matchLabel"),
        ("ServiceMonitor", "interval: 15s", "interval: 15 s"),
    ],
)
def test_the_definitions_of_others_refuse(manifests: list[Manifest], kind: str, right: str, wrong: str) -> None:
    (text, *_) = [text for text in map(yaml.safe_dump, of_kind(manifests, kind)) if right in text]
    with pytest.raises(jsonschema.ValidationError):
        validate(yaml.safe_load(text.replace(right, wrong)))


def test_the_schemas_refuse_a_mistyped_key() -> None:
    (service, *_) = of_kind(rendered("secret"), "Service")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)


@everywhere
def test_smq_reads_what_each_pod_gets(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(configs(manifests, monkeypatch))
    pods, where = pods_of(manifests), stateful_set_of(manifests)["metadata"]
    assert [config.node_id for config in found] == sorted(found[0].peers) == list(range(1, len(pods) + 1))
    assert all(config.peers == found[0].peers and config.rack == "zone-a" for config in found)
    assert not any(config.insecure for config in found)
    assert all(
        config.data_dir.parent == Path("/var/lib/smq") for config in found
    )  # the volume's root is another user's
    for pod, config in zip(pods, found, strict=True):
        assert config.peers[config.node_id] == (f"{pod}.{where['name']}", 7400)
        assert config.grpc_advertised == (f"{pod}.{where['name']}.{where['namespace']}.svc", 7401)


@everywhere
def test_no_two_pods_advertise_one_address(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_by(configs(manifests, monkeypatch)) == []


@everywhere
def test_the_container_opens_the_ports_that_smq_listens_on(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {port["containerPort"] for port in container_of(manifests)["ports"]}
    for config in configs(manifests, monkeypatch):
        listened = {address[1] for way in config.ways_in for _, address, _ in way.ports}
        assert opened == listened | {config.nodes_listen[1], config.http_address[1]}


@everywhere
def test_services_lead_to_ports_of_the_container(manifests: list[Manifest]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container_of(manifests)["ports"]}
    stateful_set = stateful_set_of(manifests)
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    for service in of_kind(manifests, "Service"):
        selector = {k: v for k, v in service["spec"]["selector"].items() if not k.startswith("statefulset.")}
        assert selector.items() <= labels.items()
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in ports or target in ports.values(), port
    assert stateful_set["spec"]["serviceName"] in [s["metadata"]["name"] for s in of_kind(manifests, "Service")]


@everywhere
def test_policies_and_budgets_are_for_the_nodes_and_admit_clients(manifests: list[Manifest]) -> None:
    mine = stateful_set_of(manifests)["spec"]["selector"]
    (budget,) = of_kind(manifests, "PodDisruptionBudget")
    assert (budget["spec"]["selector"], budget["spec"]["maxUnavailable"]) == (mine, 1)
    policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")]
    assert all(policy["podSelector"] == mine for policy in policies)
    ((nodes, clients, monitoring),) = [policy["ingress"] for policy in policies if len(policy["ingress"]) > 1]
    assert nodes["from"] == [{"podSelector": mine}]
    assert clients["from"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"smq-client": "true"}}}]
    assert {"port": "nodes"} not in clients["ports"] + monitoring["ports"]


@everywhere
def test_pods_run_without_privileges_on_a_read_only_root(manifests: list[Manifest]) -> None:
    pod, container = stateful_set_of(manifests)["spec"]["template"]["spec"], container_of(manifests)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/var/lib/smq", "/tmp"}


@everywhere
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


@pytest.mark.parametrize("manifests", WITH_OTHERS, indirect=True)
def test_the_certificate_names_the_nodes_and_every_advertised_host(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    (certificate,) = [m["spec"] for m in of_kind(manifests, "Certificate") if "uris" in m["spec"]]
    found = list(configs(manifests, monkeypatch))
    assert certificate["uris"] == [node_uri(config.cluster_id, config.node_id) for config in found]
    for config in found:
        hosts = [told(address, advertised)[0] for way in config.ways_in for _, address, advertised in way.ports]
        assert [host for host in hosts if not any(is_named(host, name) for name in certificate["dnsNames"])] == []
    volumes = stateful_set_of(manifests)["spec"]["template"]["spec"]["volumes"]
    assert certificate["secretName"] in [v["secret"]["secretName"] for v in volumes if "secret" in v]


@pytest.mark.parametrize("manifests", ["monitoring", "different"], indirect=True)
def test_the_monitor_scrapes_a_port_of_the_service_with_the_token(manifests: list[Manifest]) -> None:
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    (service,) = [s for s in of_kind(manifests, "Service") if s["spec"].get("clusterIP") == "None"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    volumes = stateful_set_of(manifests)["spec"]["template"]["spec"]["volumes"]
    (token,) = [volume["secret"]["secretName"] for volume in volumes if volume["name"] == "metrics"]
    assert endpoint["authorization"]["credentials"] == {"name": token, "key": "token"}
