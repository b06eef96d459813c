"""What every test may use: the option that rewrites golden transcripts, and Hypothesis without a clock.

And the rule for skips, and how `make test` shares the tests out among its workers.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import skips
from tests.examples import FULL

# An example's time says how busy the machine is, and no more.
settings.register_profile("smq", deadline=None)
settings.load_profile("smq")

# A shell starts what it puts into the background with Ctrl-C ignored, and the commands that tests end so inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts instead of comparing them")


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.markexpr:  # as `make test-full`
        os.environ[FULL] = "1"
    skips.install(config)
    made = tempfile.TemporaryDirectory(prefix="smq-tests-")
    config.add_cleanup(made.cleanup)
    _share_what_is_compiled(Path(made.name))
    _keep_sparks_files(Path(made.name))


def _share_what_is_compiled(directory: Path) -> None:
    """Tests start some hundreds of processes. If PYTHONDONTWRITEBYTECODE keeps the checkout clean, each would compile
    every module that it loads, a quarter of a node's start. So they share what is compiled, beside the checkout."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "compiled")


def _keep_sparks_files(directory: Path) -> None:
    """A Java virtual machine that a test kills removes nothing of what it keeps in its temporary directories."""
    spark = directory / "spark"
    spark.mkdir()
    os.environ["SPARK_LOCAL_DIRS"] = str(spark)  # blockmgr-*
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{given} -Djava.io.tmpdir={spark}".strip()  # artifacts-*, spark-*


# --------------------------------------------------------------------------------------- shares of xdist's workers
WHOLE = ("tests/cluster", "tests/kafka", "tests/spark")


def share_of(test: str) -> str:
    """What one worker runs: a whole live suite, or a file of the others. So a suite starts its clusters and its Java
    virtual machine once, and its order is the same in every run."""
    return next((suite for suite in WHOLE if test.startswith(f"{suite}/")), test.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = share_of
    return scheduler


@pytest.fixture
def is_rewriting(request: pytest.FixtureRequest) -> bool:
    """True under --rewrite."""
    return bool(request.config.getoption("--rewrite"))
