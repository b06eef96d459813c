"""The section on rotation in docs/security.md, word by word, under a producer whose records must all be stored."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.pages import claimed

OLD, NEW = "the first password", "the second password"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_everything_is_rotated_while_records_are_stored(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SMQ_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "SMQ_CLUSTER_DIR": str(tmp_path / "D"),
    }
    for name, password in (("old-password", OLD), ("new-password", NEW)):
        (tmp_path / name).write_text(password)

    def shell(command: str) -> str:
        run: Any = {"cwd": tmp_path, "env": environment, "text": True, "capture_output": True, "timeout": 120}
        done = subprocess.run(["bash", "-euc", command], check=False, **run)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return str(done.stdout)

    cluster = Cluster(tmp_path)
    try:
        cluster.start("--auth")
        (tmp_path / "D").symlink_to(cluster.directory)
        tls = tmp_path / "D/tls"
        first_ca = (tls / "ca/ca.crt").read_bytes()
        (tmp_path / "first-ca.crt").write_bytes(first_ca)
        shell("smq user create alice --password-from old-password; smq acl grant alice read topic orders")
        shell("smq acl grant alice write topic orders; smq topic create orders")
        environment["ID"] = json.loads(shell("smq status --json"))["cluster_id"]

        def client(user: str, password: str, ca: Path) -> dict[str, Any]:
            return {
                "bootstrap.servers": cluster.nodes[1].kafka,
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-256",
                "sasl.username": user,
                "sasl.password": password,
                "ssl.ca.location": str(ca),
            }

        ended = threading.Event()
        outcomes: list[Any] = []

        def produce(config: dict[str, Any]) -> None:
            producer = Producer(config)
            while not ended.wait(0.02):
                producer.produce("orders", b"x", on_delivery=lambda error, _: outcomes.append(error))
                producer.poll(0)
            assert producer.flush(30) == 0

        users, certificates = claimed("docs/security.md", __file__)
        shell(users.split("smq user delete")[0])
        thread = threading.Thread(target=produce, args=(client("alice2", NEW, tmp_path / "first-ca.crt"),))
        thread.start()
        try:
            wait_for("records to be stored", lambda: len(outcomes) > 10)
            shell("smq user delete" + users.split("smq user delete")[1])
            before = len(outcomes)
            shell(certificates)
            wait_for("records to be stored after all of it", lambda: len(outcomes) > before + 10)
        finally:
            ended.set()
            thread.join()
        assert set(outcomes) == {None}
        assert (tls / "node-1/ca.crt").read_bytes() == (tls / "ca/ca.crt").read_bytes() != first_ca
        assert "alice2" in shell("smq user list")
        now = AdminClient(client("alice2", NEW, tls / "ca/ca.crt"))
        assert "orders" in now.list_topics(timeout=20).topics
        for refused in (client("alice", OLD, tls / "ca/ca.crt"), client("alice2", NEW, tmp_path / "first-ca.crt")):
            with pytest.raises(KafkaException):
                AdminClient(refused).list_topics(timeout=3)
    finally:
        cluster.stop()
