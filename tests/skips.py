"""What a test needs of the machine, and the rule that no check is skipped in silence.

Owns the marks for programs that may be missing, and the variable TESTS_SKIP_NOTHING, under which each skip is a failure
with its reason, whichever test asked for it. `make test-release` sets it. tests/conftest.py installs the rule.
"""

import os
import shutil
from collections.abc import Generator
from typing import Any, Final

import pytest

NOTHING: Final = "TESTS_SKIP_NOTHING"  # not SMQ_...: a node refuses such a variable


def program(name: str) -> str | None:
    """Where it is: as the variable of its name in upper case says, or in the path. None if it is not installed."""
    return os.environ.get(name.upper()) or shutil.which(name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips tests where one of these programs is not installed."""
    missing = [name for name in names if program(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


class NoSkips:
    """A plugin that turns every skip into a failure. A test that is expected to fail (xfail) is none."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        return _judged(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        report = yield
        return _judged(report)


def _judged(report: Any) -> Any:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"under {NOTHING} a skip is a failure: {reason}"
    return report


def install(config: pytest.Config) -> None:
    """The rule, if this run is under it."""
    if os.environ.get(NOTHING):
        config.pluginmanager.register(NoSkips(), "no-skips")
