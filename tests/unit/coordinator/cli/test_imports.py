"""The modules that a command loads: most of a short command's time, and of the start of `smq dev`.

No test asserts a time. These name what must not be loaded, and bound how many modules are.
"""

import subprocess
import sys

import pytest

SERVER = {"lmdb", "pysyncobj", "uvloop", "structlog", "aiohttp", "prometheus_client", "cryptography"}
SLOW = {"rich", "aiokafka", "cramjam", "numpy", "pandas", "pyarrow", "pyspark"}
LIST_MODULES_MAX = 330  # 278 on Python 3.11; rich alone would bring 70 more, the codec of records 60
DEV_MODULES_MAX = 1_100  # 977, a third of them ours


def _loaded(*modules: str) -> list[str]:
    script = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def _packages(modules: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("command", ["topic", "status", "node", "config", "offsets", "txn"])
def test_a_short_command_loads_neither_the_server_nor_what_draws_and_decodes(command: str) -> None:
    loaded = _loaded("smq.coordinator.cli.main", f"smq.coordinator.cli.commands.{command}", "smq.clients.admin")
    assert not _packages(loaded) & (SERVER | SLOW)
    assert len(loaded) <= LIST_MODULES_MAX


def test_help_loads_no_client_either() -> None:
    script = (
        "import atexit, sys, smq.coordinator.cli.main as cli\n"
        "atexit.register(lambda: print(*sys.modules))\n"
        "sys.argv = ['smq', '--help']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not _packages(done.stdout.splitlines()[-1].split()) & (SERVER | SLOW | {"grpc", "google", "asyncio"})


def test_a_health_check_does_not_load_the_server() -> None:
    loaded = _packages(_loaded("smq.coordinator.cli.main", "smq.coordinator.cli.commands.health"))
    assert not loaded & (SERVER | SLOW)


def test_the_process_over_the_nodes_of_a_cluster_loads_no_server() -> None:
    loaded = _loaded("smq.coordinator.cli.commands.cluster")
    assert not _packages(loaded) & {"lmdb", "pysyncobj", "uvloop", "prometheus_client", "aiokafka"}


def test_a_node_loads_nothing_of_spark() -> None:
    loaded = _loaded("smq.coordinator.cli.commands.serve")
    assert not _packages(loaded) & {"pyarrow", "pyspark", "pandas", "numpy"}
    assert len(loaded) <= DEV_MODULES_MAX


def test_a_node_without_tls_reads_no_certificates() -> None:
    assert not {"cryptography.x509", "smq.coordinator.tls.certificates"} & set(
        _loaded("smq.coordinator.cli.commands.serve")
    )


def test_garbage_is_collected_in_commands_and_not_while_their_modules_load() -> None:
    """`--help` stands for any command: the collector is as the command would find it."""
    script = (
        "import atexit, gc, sys, smq.coordinator.cli.main as cli\n"
        "early = []\n"
        "gc.callbacks.append(lambda phase, info: gc.get_freeze_count() or early.append(phase))\n"
        "atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(early)))\n"
        "sys.argv = ['smq', 'dev', '--help']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True 0"
