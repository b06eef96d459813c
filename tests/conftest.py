"""What every test may use: the option that rewrites golden transcripts, and Hypothesis without a clock."""

import signal

import pytest
from hypothesis import settings

# An example's time says how busy the machine is, and no more.
settings.register_profile("smq", deadline=None)
settings.load_profile("smq")

# A shell starts what it puts into the background with Ctrl-C ignored, and the commands that tests end so inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts instead of comparing them")


@pytest.fixture
def is_rewriting(request: pytest.FixtureRequest) -> bool:
    """True under --rewrite."""
    return bool(request.config.getoption("--rewrite"))
