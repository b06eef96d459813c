"""Kubernetes' objects, as Helm rendered them, and what each pod's node would read in them.

Owns the reading of a list of objects, and Kubernetes' rule for variables. It judges nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import yaml

from smq.coordinator.config.node_toml import ServerConfig, parse_config

ROOT: Final = Path(__file__).resolve().parents[2]
RENDERED: Final = ROOT / "tests/deploy/rendered"
Manifest: TypeAlias = dict[str, Any]


def rendered(name: str) -> list[Manifest]:
    """What Helm makes of the chart: test_helm.py compares and rewrites these files."""
    return objects((RENDERED / f"{name}.yaml").read_text())


def objects(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest is not None]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind]


def stateful_set_of(manifests: list[Manifest]) -> Manifest:
    (found,) = of_kind(manifests, "StatefulSet")
    return found


def container_of(manifests: list[Manifest]) -> Manifest:
    (container,) = stateful_set_of(manifests)["spec"]["template"]["spec"]["containers"]
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


def pods_of(manifests: list[Manifest]) -> list[str]:
    stateful_set = stateful_set_of(manifests)
    return [f"{stateful_set['metadata']['name']}-{ordinal}" for ordinal in range(stateful_set["spec"]["replicas"])]


def configs(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerConfig]:
    """What each pod's node reads: the file and the variables, as Kubernetes fills them in."""
    (config,) = of_kind(manifests, "ConfigMap")
    for pod in pods_of(manifests):
        fields = {
            "metadata.name": pod,
            "metadata.namespace": stateful_set_of(manifests)["metadata"]["namespace"],
            "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
        }
        environment = expanded(container_of(manifests)["env"], fields)
        monkeypatch.setattr("socket.gethostname", lambda pod=pod: pod)
        yield parse_config(config["data"]["node.toml"], base_dir=Path("/etc/smq"), environment=environment)
