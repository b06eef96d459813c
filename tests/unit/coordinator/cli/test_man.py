"""The man pages: one per command, complete, and without a complaint of groff."""

import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from smq import __version__
from smq.coordinator.cli.commands.man import page
from smq.coordinator.cli.root import cli
from tests.skips import needs


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("man") / "man1"
    result = CliRunner().invoke(cli, ["man", str(directory)], prog_name="smq")
    assert result.exit_code == 0, result.output
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_every_command_has_a_page(pages: dict[str, str]) -> None:
    names = cli.list_commands(click.Context(cli))
    assert set(pages) == {"smq.1", *(f"smq-{name}.1" for name in names)}
    for name in names:
        escaped = name.replace("-", r"\-")
        assert rf"\fBsmq\-{escaped}\fR(1)" in pages["smq.1"]


def test_a_page_has_what_the_help_has(pages: dict[str, str]) -> None:
    text = pages["smq-topic.1"]
    assert f'"smq {__version__}"' in text
    for expected in (
        ".SH NAME\nsmq\\-topic \\- ",
        ".SS smq topic create",
        "\\fBsmq topic create\\fR",
        "\\-\\-bootstrap",
    ):
        assert expected in text
    assert "\\-\\-config" in pages["smq-serve.1"]
    assert "\\-\\-child" not in pages["smq-serve.1"]  # hidden


def test_lines_that_are_to_stay_as_they_are_do(pages: dict[str, str]) -> None:
    lines = 'eval "$(smq completion bash)"', 'eval "$(smq completion zsh)"', "smq completion fish"
    shown = ".nf\nPut one of these lines into your shell's start\\-up file:\n  " + "\n  ".join(lines)
    assert shown in pages["smq-completion.1"]


def test_text_that_roff_would_take_for_requests_is_text() -> None:
    @click.command(help=".TH is no request here, nor is \\fB bold.")
    def odd() -> None: ...

    text = page(click.Context(odd, info_name="odd"), "odd")
    assert "\\&.TH is no request here, nor is \\efB bold." in text


@needs("groff")
def test_groff_formats_every_page_without_a_complaint(pages: dict[str, str], tmp_path: Path) -> None:
    for name, text in pages.items():
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"{name}: {done.stderr}"
