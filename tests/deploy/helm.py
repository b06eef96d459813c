"""The chart as its users see it: Helm renders or refuses it.

Owns the calls of Helm, and the releases that tests judge, one of which differs from the defaults in everything.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.deploy.manifests import ROOT, Manifest, objects

CHART: Final = ROOT / "deploy/helm/smq"
VALUES: Final = ROOT / "deploy/helm/values"


@dataclass(frozen=True, slots=True)
class Release:
    name: str = "smq"
    namespace: str = "smq"
    files: tuple[Path, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)


DIFFERENT: Final = Release(
    "events",
    "streams",
    values={
        "replicas": 5,
        "clusterId": "production",
        "image": {"repository": "registry.example.org/smq", "tag": "1", "pullSecrets": ["pull"]},
        "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
        "storage": {"size": "1Ti", "className": "fast"},
        "tls": {"secretName": "certificates"},
        "certManager": {"issuer": {"name": "company", "kind": "ClusterIssuer"}},
        "outside": {
            "enabled": True,
            "domain": "kafka.example.net",
            "annotations": {"example.org/class": "internal"},
            "sourceRanges": ["192.0.2.0/24"],
        },
        "metrics": {"secretName": "scraper"},
        "serviceMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}},
        "spread": {"machines": "preferred", "zones": "required"},
        "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"key": "smq", "operator": "Exists"}],
        "priorityClassName": "high",
        "podAnnotations": {"example.org/team": "data"},
        "variables": {"SMQ_SETTINGS__NUM_PARTITIONS": "12", "SMQ_TUNING__SCRUB_PERIOD_S": "7"},
    },
)


RELEASES: Final = {path.stem: Release(files=(path,)) for path in sorted(VALUES.glob("*.yaml"))} | {
    "different": DIFFERENT
}


class Chart:
    """Rendered by this program."""

    def __init__(self, helm: Path, directory: Path) -> None:
        self._helm = str(helm)
        self._template = ("template", "--kube-version=1.33.0")
        self._directory = directory

    def lint(self, release: Release) -> None:
        self._run("lint", "--strict", str(CHART), *self._options(release))

    def text(self, release: Release) -> str:
        return self._run(*self._template, release.name, str(CHART), *self._options(release))

    def rendered(self, release: Release) -> list[Manifest]:
        return objects(self.text(release))

    def notes(self, release: Release) -> str:
        """What `helm install` prints at its end. It asks a cluster first, so here an object carries the text."""
        copy = self._directory / "with-notes"
        shutil.copytree(CHART, copy, dirs_exist_ok=True)
        text = (copy / "templates/NOTES.txt").read_text()
        (copy / "templates/_notes.tpl").write_text('{{- define "notes" -}}\n' + text + "{{- end -}}\n")
        (copy / "templates/notes.yaml").write_text('kind: Notes\ntext: {{ include "notes" $ | quote }}\n')
        only = ("--show-only", "templates/notes.yaml")
        (found,) = objects(self._run(*self._template, release.name, str(copy), *only, *self._options(release)))
        return str(found["text"])

    def packaged(self) -> Path:
        """As it would be published."""
        self._run("package", str(CHART), "--destination", str(self._directory))
        (found,) = self._directory.glob("*.tgz")
        return found

    def refusal(self, values: dict[str, Any]) -> str:
        """What Helm says against these values."""
        done = self._try(*self._template, "smq", str(CHART), *self._options(Release(values=values)))
        assert done.returncode != 0, f"helm takes {values}"
        return done.stderr

    def _options(self, release: Release) -> list[str]:
        own = self._directory / "values.json"
        own.write_text(json.dumps(release.values))
        files = [f"--values={path}" for path in (*release.files, own)]
        return ["--namespace", release.namespace, *files]

    def _run(self, *arguments: str) -> str:
        done = self._try(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _try(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._helm, *arguments], capture_output=True, text=True, check=False)
