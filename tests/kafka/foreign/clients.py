"""The clients, and how each is installed: in a pinned version, into the test's directory.

Owns the builds. A client that is not available here is `Missing`, with the reason: not every machine has the
registries and compilers.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.kafka.foreign.driver import Client

HERE = Path(__file__).parent
BUILD_S = 300  # downloads included


class Missing(Exception):
    """This client cannot run here."""


def run(directory: Path, *command: str, timeout_s: float = BUILD_S) -> None:
    """A step of a build; `Missing` if it fails."""
    if shutil.which(command[0]) is None:
        raise Missing(f"there is no {command[0]} on this machine")
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.CalledProcessError as e:
        raise Missing(f"{' '.join(command)} ended with {e.returncode}: {(e.stderr or e.stdout)[-500:]}") from e
    except subprocess.TimeoutExpired as e:
        raise Missing(f"{' '.join(command)} took more than {timeout_s} s") from e


def copied(name: str, build: Path) -> Path:
    """The sources of this name, in the test's directory."""
    return Path(shutil.copytree(HERE / name, build / name))


def _python(module: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda _build: [sys.executable, "-m", f"tests.kafka.foreign.{module}", *arguments]


def _kcat(_build: Path) -> list[str]:
    if shutil.which("kcat") is None:
        try:
            subprocess.run(["apt-get", "install", "-y", "kcat"], check=True, capture_output=True, timeout=BUILD_S)
        except (OSError, subprocess.SubprocessError) as e:
            raise Missing(f"there is no kcat, and apt-get install kcat does not bring it: {e}") from e
    return _python("kcat_driver")(_build)


def _kafkajs(build: Path) -> list[str]:
    directory = copied("kafkajs", build)
    run(directory, "npm", "ci", "--no-audit", "--no-fund")
    return ["node", str(directory / "driver.js")]


def _java(build: Path) -> list[str]:
    directory = copied("java", build)
    run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
    run(directory, "javac", "-d", "classes", "-cp", "jars/*", "Driver.java")
    return ["java", "-Xmx256m", "-cp", f"{directory}/classes:{directory}/jars/*", "Driver"]


def _franz(build: Path) -> list[str]:
    directory = copied("franz", build)
    run(directory, "go", "build", "-o", "driver", ".")
    return [str(directory / "driver")]


BUILDS: dict[str, Callable[[Path], list[str]]] = {
    "confluent-kafka": _python("python_driver", "confluent-kafka"),
    "kafka-python": _python("python_driver", "kafka-python"),
    "aiokafka": _python("python_driver", "aiokafka"),
    "kcat": _kcat,
    "kafkajs": _kafkajs,
    "kafka-clients (Java)": _java,
    "franz-go": _franz,
}


def start(name: str, servers: str, build: Path) -> Client:
    """`Missing` if it is not available."""
    command = BUILDS[name](build)
    return Client(name, [*command, servers], build / f"{name.split()[0]}.log")
