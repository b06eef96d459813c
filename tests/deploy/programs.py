"""Programs of others in Go that check what deploy/ has, each built from the versions that go/go.mod and go.sum pin.

Owns the build: Helm, which renders the chart, and the parser that `docker compose config` is made of. Without Go or a
proxy of modules it is `Missing`, with the reason. Go keeps what it has compiled: only the first build takes minutes.
"""

from pathlib import Path
from typing import Final

from tests.kafka.foreign.clients import run

HERE: Final = Path(__file__).parent
BUILD_S: Final = 1500  # downloads included; six minutes on two busy cores
PACKAGES: Final = {"helm": "helm.sh/helm/v3/cmd/helm", "compose": "./compose"}


def go_program(name: str, target: Path) -> Path:
    """One of PACKAGES, in the directory `target`."""
    built = target / name
    run(HERE / "go", "go", "build", "-o", str(built), PACKAGES[name], timeout_s=BUILD_S)
    return built
