"""The chart gives what tests/deploy/rendered has, explains each value, and refuses wrong ones.

The schema of the values is tried here without Helm, too; Helm itself (`full`) is built from Go's modules.
`pytest -m full tests/deploy/test_helm.py --rewrite` renders again.
"""

import re
import tarfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from smq import __version__
from tests.deploy.helm import CHART, DIFFERENT, RELEASES, VALUES, Chart, Release
from tests.deploy.manifests import RENDERED, configs, container_of, rendered

SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
TEXT = (CHART / "values.yaml").read_text()
DEFAULTS: dict[str, Any] = yaml.safe_load(TEXT)
WRONG: dict[str, dict[str, Any]] = {
    "a mistyped key": {"replicaCount": 3},
    "a mistyped key in a table": {"storage": {"class": "fast"}},
    "an even number of nodes": {"replicas": 4},
    "no node": {"replicas": 0},
    "a text for a number": {"replicas": "3"},
    "nothing for a value": {"replicas": None},
    "an empty cluster id": {"clusterId": ""},
    "a cluster id that a certificate would escape": {"clusterId": "my cluster"},
    "an unknown source of certificates": {"tls": {"source": "none"}},
    "no domain for the outside": {"outside": {"enabled": True}},
    "a port in the domain": {"outside": {"enabled": True, "domain": "example.org:9094"}},
    "a range without its length": {"outside": {"sourceRanges": ["192.0.2.1"]}},
    "days, which Go does not know": {"certManager": {"duration": "90d"}},
    "an unknown kind of issuer": {"certManager": {"issuer": {"kind": "clusterissuer"}}},
    "a size that Kubernetes does not know": {"storage": {"size": "20GB"}},
    "a size without its unit": {"storage": {"size": 20}},
    "memory that Kubernetes does not know": {"resources": {"limits": {"memory": "2GB"}}},
    "an unknown demand": {"spread": {"zones": "always"}},
    "a text for a truth": {"serviceMonitor": {"enabled": "yes"}},
    "a variable of another program": {"variables": {"KAFKA_ADDRESS": "[::]:1"}},
    "a number for a variable": {"variables": {"SMQ_SETTINGS__NUM_PARTITIONS": 12}},
    "a variable of the chart's own": {"variables": {"SMQ_PEERS__1": "elsewhere:7400"}},
}
pytestmark = pytest.mark.timeout(1800)  # Helm is built for the first test that needs it


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm does: table by table, and null removes a key."""
    found = deepcopy(values)
    for key, value in over.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        else:
            found[key] = value
    return found


# ------------------------------------------------------------------------------------------------- without Helm
def test_the_chart_is_of_this_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


def test_the_schema_has_every_value_and_no_other() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)

    def keys(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
        """Those of which one side lacks the other."""
        schema = SCHEMA["definitions"].get(schema.get("$ref", "").rpartition("/")[2], schema)
        if "properties" not in schema:
            return
        assert (schema["additionalProperties"], sorted(schema["required"])) == (False, sorted(values)), path
        yield from (f"{path}{key}" for key in (values.keys() ^ schema["properties"].keys()) - {"global"})
        for key in values.keys() & schema["properties"].keys():
            yield from keys(values[key], schema["properties"][key], f"{path}{key}.")

    assert list(keys(DEFAULTS, SCHEMA)) == []


def test_every_value_is_explained() -> None:
    """By a comment on its line, or above it or its neighbours."""
    assert set(re.findall(r"^(\w+):", TEXT, re.MULTILINE)) == set(DEFAULTS)
    silent = [block for block in TEXT.strip().split("\n\n") if not block.startswith("#")]
    assert silent == []


@pytest.mark.parametrize("path", sorted(VALUES.iterdir()), ids=lambda path: path.stem)
def test_the_schema_takes_the_values_of_each_case(path: Path) -> None:
    jsonschema.validate(merged(DEFAULTS, yaml.safe_load(path.read_text())), SCHEMA)


def test_the_schema_takes_values_that_differ_in_everything() -> None:
    jsonschema.validate(merged(DEFAULTS, DIFFERENT.values), SCHEMA)
    unlike = {key for key, value in DEFAULTS.items() if merged(DEFAULTS, DIFFERENT.values)[key] != value}
    assert set(DEFAULTS) - unlike == {"fullnameOverride", "networkPolicy", "podDisruptionBudget"}


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_refuses(case: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(DEFAULTS, WRONG[case]), SCHEMA)


# ----------------------------------------------------------------------------------------------------- by Helm
@pytest.mark.full
@pytest.mark.parametrize("name", RELEASES)
def test_the_chart_gives_what_is_kept(chart: Chart, name: str, is_rewriting: bool) -> None:
    kept = RENDERED / f"{name}.yaml"
    if is_rewriting:
        kept.write_text(chart.text(RELEASES[name]))
    assert chart.text(RELEASES[name]) == kept.read_text()


def test_every_case_is_kept() -> None:
    assert {path.stem for path in RENDERED.iterdir()} == set(RELEASES)


@pytest.mark.full
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_helm_finds_nothing_to_complain_of(chart: Chart, release: Release) -> None:
    chart.lint(release)


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG)
def test_helm_refuses(chart: Chart, case: str) -> None:
    assert "values don't meet the specifications of the schema" in chart.refusal(WRONG[case])


def test_variables_that_the_chart_sets_are_refused_as_values() -> None:
    names = {v["name"] for name in RELEASES for v in container_of(rendered(name))["env"]}
    own = {name for name in names if name.startswith("SMQ_")} - DIFFERENT.values["variables"].keys()
    assert len(own) > 10
    for name in own:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(merged(DEFAULTS, {"variables": {name: "x"}}), SCHEMA)


@pytest.mark.full
def test_two_releases_in_one_namespace_have_nothing_in_common(chart: Chart) -> None:
    """Neither a name nor a pod that both select."""
    found = [chart.rendered(Release(name, "streams", values=DIFFERENT.values)) for name in ("events", "smq-orders")]
    names, selectors = [], []
    for manifests in found:
        names.append({f"{m['kind']} {m['metadata']['name']}" for m in manifests})
        text = yaml.safe_dump(manifests)
        selectors.append(set(re.findall(r"app.kubernetes.io/instance: (\S+)", text)))
        assert text.count("app.kubernetes.io/instance") == text.count("app.kubernetes.io/name")
    assert not names[0] & names[1]
    assert selectors == [{"events"}, {"smq-orders"}]


@pytest.mark.full
def test_values_reach_the_objects_and_the_nodes(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = rendered("different")
    text = yaml.safe_dump(manifests)
    for word in ("fast", "1Ti", "8Gi", "registry.example.org/smq:1", "company", "192.0.2.0/24", "nvme", "high", "pull"):
        assert re.search(rf"(: |- )'?{re.escape(word)}'?$", text, re.MULTILINE), word
    for config in configs(manifests, monkeypatch):
        assert config.cluster_id == "production"
        assert config.settings == {"num.partitions": "12"}
    off = Release(values={"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}})
    by_default, kinds = ({m["kind"] for m in chart.rendered(release)} for release in (Release(), off))
    assert by_default - kinds == {"NetworkPolicy", "PodDisruptionBudget"}


@pytest.mark.full
def test_the_packaged_chart_has_the_configuration_itself(chart: Chart) -> None:
    with tarfile.open(chart.packaged()) as archive:
        member = archive.extractfile("smq/files/node.toml")
        assert member is not None
        assert member.read() == (CHART / "files/node.toml").read_bytes()


@pytest.mark.full
def test_the_notes_say_what_is_left_to_do(chart: Chart) -> None:
    notes = chart.notes(RELEASES["own-authority"])
    for node in (1, 2, 3):
        assert f"smq cert node CA --cluster-id smq --node {node} --host smq-{node - 1}.smq.smq.svc" in notes
        assert f"--from-file=smq-{node - 1}.key=CA/node-{node}/tls.key" in notes
    assert "create secret generic smq-metrics" in notes
    assert "events-smq-4.kafka.example.net" in chart.notes(DIFFERENT)
