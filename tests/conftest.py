"""What every test may use: the option that rewrites golden transcripts."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts instead of comparing them")


@pytest.fixture
def is_rewriting(request: pytest.FixtureRequest) -> bool:
    """True under --rewrite."""
    return bool(request.config.getoption("--rewrite"))
