"""The schemas of objects that are not Kubernetes' own: from the modules of the projects that define them.

Owns the pinned versions and their hashes, and the reading of a CustomResourceDefinition. As Kubernetes does when it is
asked to be strict, it refuses keys that a schema does not name. Rules in CEL (x-kubernetes-validations) are not
evaluated.
"""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

from tests.deploy.manifests import Manifest
from tests.kafka.foreign.clients import Missing

DOWNLOAD_S: Final = 600
# Group -> module, version, hash as in a go.sum, the folder of its definitions.
MODULES: Final = {
    "cert-manager.io": (
        "github.com/cert-manager/cert-manager",
        "v1.18.2",
        "h1:H2P75ycGcTMauV3gvpkDqLdS3RSXonWF2S49QGA1PZE=",
        "deploy/crds",
    ),
    "monitoring.coreos.com": (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        "example/prometheus-operator-crd",
    ),
}


def validate(manifest: Manifest) -> None:
    """jsonschema.ValidationError for an object that its definition refuses."""
    group, _, version = manifest["apiVersion"].partition("/")
    jsonschema.validate(json.loads(json.dumps(manifest)), _schema(group, manifest["kind"], version))


@functools.cache
def _schema(group: str, kind: str, version: str) -> dict[str, Any]:
    texts = (path.read_text() for path in definitions(group))
    (text,) = [text for text in texts if f"\n    kind: {kind}\n" in text]  # read by Python, all together take a minute
    spec = yaml.safe_load(text)["spec"]
    assert (spec["group"], spec["names"]["kind"]) == (group, kind)
    (found,) = [v["schema"]["openAPIV3Schema"] for v in spec["versions"] if v["name"] == version]
    return dict(_strict(found))


@functools.cache
def definitions(group: str) -> list[Path]:
    """The files that define the group's kinds. `Missing` without Go or a proxy of modules."""
    module, version, pinned, folder = MODULES[group]
    if shutil.which("go") is None:
        raise Missing("there is no go on this machine")
    command = ["go", "mod", "download", "-json", f"{module}@{version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S, cwd="/")
    except subprocess.TimeoutExpired as e:
        raise Missing(f"{module} could not be downloaded within {DOWNLOAD_S} s") from e
    told = json.loads(done.stdout or "{}")
    if done.returncode:
        raise Missing(f"{module} cannot be downloaded: {told.get('Error') or done.stderr[-500:]}")
    assert told["Sum"] == pinned, f"{module}@{version} is not what was pinned"
    return sorted(Path(told["Dir"], folder).glob("*.yaml"))


def _strict(schema: Any) -> Any:
    """The same as a JSON schema that refuses unknown keys, wherever keys are named."""
    if isinstance(schema, list):
        return [_strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("properties"), dict):
        named = {key: _strict(inner) for key, inner in schema["properties"].items()}
        schema = {key: _strict(inner) for key, inner in schema.items() if key != "properties"} | {"properties": named}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        return schema
    return {key: _strict(inner) for key, inner in schema.items()}
