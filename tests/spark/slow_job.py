"""A stream in a session of its own, whose Python process takes 13 s to load: three more than Spark waits for it."""

import os
import sys
from pathlib import Path
from typing import Any

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED

SLOW = """
import os, time
if "PYTHON_WORKER_FACTORY_SOCK_PATH" in os.environ:
    time.sleep(13)
"""


def main(folder: Path, servers: str, topic: str) -> None:
    (folder / "sitecustomize.py").write_text(SLOW)
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    spark = session("slow", master="local[2]", conf={"spark.log.level": "ERROR", **SHORT_LIVED})
    options: dict[str, Any] = {"servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    writer = spark.readStream.format("smq").options(**options).load().writeStream.format("memory").queryName("found")
    writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start().awaitTermination()
    sys.stdout.write(f"{spark.table('found').count()}\n")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
