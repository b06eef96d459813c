"""What every test may use: the option that rewrites golden transcripts, and Hypothesis without a clock."""

import pytest
from hypothesis import settings

# An example's time says how busy the machine is, and no more.
settings.register_profile("smq", deadline=None)
settings.load_profile("smq")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts instead of comparing them")


@pytest.fixture
def is_rewriting(request: pytest.FixtureRequest) -> bool:
    """True under --rewrite."""
    return bool(request.config.getoption("--rewrite"))
