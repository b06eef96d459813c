"""The steps of the sink's protocol, as `dying_source` passes them, and what may happen to the process that reaches one.

A test arms a step by a file. The first process that reaches it takes the file away and does what it says: it kills the
driver and itself, or itself alone, or it waits until it is released. Nothing of this is in the product.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final, Literal

ARMED: Final = "SMQ_TEST_ARMED"  # variables of the job's environment: the file,
DRIVER: Final = "SMQ_TEST_DRIVER"  # and the process id of the driver's Python

# In the order in which a micro-batch passes them. "sent": before the answer, so that the outcome is not known.
PLAN: Final = "the end of the next micro-batch is looked up, and not yet in the checkpoint"
PLANNED: Final = "a planned micro-batch is cut into tasks"
TASK: Final = "a task begins"
STAGED: Final = "a task's rows are staged, and its commit message is not sent"
COMMIT: Final = "the driver is about to commit"
STEPS: Final = (
    PLAN,
    PLANNED,
    TASK,
    "StartProducer sent",
    "StartProducer answered",
    "AddToTransaction sent",
    "AddToTransaction answered",
    "PublishRecord sent",
    "PublishRecord answered",
    STAGED,
    COMMIT,
    "CommitBatch sent",
    "CommitBatch answered",
)

Action = Literal["kill driver", "kill task", "hold"]


def kill_driver(pid: int) -> None:
    """kill -9 of a driver: the Java that it started, in a process group of its own, and its Python."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, check=False)
    for found in [*map(int, listed.stdout.split()), pid]:
        os.kill(found, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------ the test's side
def arm(path: Path, step: str, action: Action) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([step, action]))
    draft.rename(path)


def taken(path: Path) -> Path:
    """Where the file is once its step has been reached. To delete it releases a process that waits."""
    return path.with_suffix(".taken")


# ------------------------------------------------------------------------------------------------------- the job's side
def is_armed(step: str) -> bool:
    return _armed()[0] == step


def reach(step: str) -> None:
    """Does what the test has armed for this step; nothing if another process was faster."""
    armed, action = _armed()
    if armed != step:
        return
    path = _path()
    try:
        path.rename(taken(path))
    except FileNotFoundError:
        return
    if action == "hold":
        while taken(path).exists():
            time.sleep(0.02)
        return
    if action == "kill driver":
        kill_driver(int(os.environ[DRIVER]))
    os.kill(os.getpid(), signal.SIGKILL)


def _path() -> Path:
    return Path(os.environ[ARMED])


def _armed() -> tuple[str, str]:
    try:
        step, action = json.loads(_path().read_text())
    except FileNotFoundError:
        return "", ""
    return step, action
