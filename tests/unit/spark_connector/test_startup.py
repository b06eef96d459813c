"""What Spark's Python processes do first, and what they need not load."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import smq.spark_connector
from smq.spark_connector import local_session

STARTUP = Path(smq.spark_connector.__file__).parent / "startup"
# As PySpark's processes do it, after imports that take as long as the test likes.
SLOW = """
import os, socket, sys, time
while not os.path.exists("go"):
    time.sleep(0.01)
with socket.socket(socket.AF_UNIX) as other:
    other.settimeout(15)
    other.connect("other")
with socket.socket(socket.AF_UNIX) as to_spark:
    to_spark.settimeout(15)
    to_spark.connect(os.environ["PYTHON_WORKER_FACTORY_SOCK_PATH"])
    to_spark.settimeout(None)
    to_spark.sendall(b"hello")
    assert to_spark.recv(5) == b"world"
with socket.socket(socket.AF_UNIX) as again:
    again.connect(os.environ["PYTHON_WORKER_FACTORY_SOCK_PATH"])
print(sys.modules["sitecustomize"].__file__)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process runs; the paths of unix sockets are short there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listening(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    made.listen()
    made.settimeout(60)
    return made


def test_a_process_of_sparks_connects_back_before_it_imports_anything(folder: Path) -> None:
    """Each later connection of its own is another one, and a user's own module of the name is imported, too."""
    (folder / "users").mkdir()
    (folder / "users" / "sitecustomize.py").touch()
    (folder / "slow.py").write_text(SLOW)
    env = os.environ | {"PYTHON_WORKER_FACTORY_SOCK_PATH": "spark"}
    env["PYTHONPATH"] = os.pathsep.join([str(STARTUP), str(folder / "users")])
    with listening("spark") as spark, listening("other") as other:
        process = subprocess.Popen([sys.executable, "slow.py"], env=env, stdout=subprocess.PIPE, text=True)
        connection, _ = spark.accept()
        (folder / "go").touch()
        other.accept()[0].close()
        assert connection.recv(5) == b"hello"
        connection.sendall(b"world")
        spark.accept()[0].close()
        assert process.communicate(timeout=60)[0].strip() == str(folder / "users" / "sitecustomize.py")
        assert process.returncode == 0


@pytest.mark.parametrize("path", [{}, {"PYTHON_WORKER_FACTORY_SOCK_PATH": "gone"}])
def test_any_other_process_is_left_as_it_is(folder: Path, path: dict[str, str]) -> None:
    code = "import sys; print('socket' in sys.modules, sys.modules['sitecustomize'].__file__)"
    env = os.environ | path | {"PYTHONPATH": str(STARTUP)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", str(STARTUP / "sitecustomize.py")], "")


def test_a_session_s_processes_find_it_before_what_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_session, "find_java_home", lambda: tmp_path)
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "users"})
    for _ in range(2):
        local_session.prepare_environment()
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(STARTUP), "users"])


@pytest.mark.parametrize("module", ["stream.stream_reader", "batch_reader", "sink.writer"])
def test_a_process_that_plans_or_commits_loads_no_decoder(module: str) -> None:
    """A task alone needs it. Each query starts several such processes."""
    code = f"import sys, smq.spark_connector.{module}; print('aiokafka' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_the_daemon_loads_before_it_forks_starts_no_thread() -> None:
    code = (
        "import importlib, os, smq.spark_connector.daemon as daemon\n"
        "for name in daemon.PRELOADED: importlib.import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
