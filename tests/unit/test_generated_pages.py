"""The pages that come from code leave nothing out: each call, comment, command, option and setting is there."""

import re

import click
import pytest

from docs.generate import cell, escaped, page_of, settings, table
from docs.generate.commands import all_below
from docs.generate.grpc import PROTO, described
from smq.coordinator.cli.commands.man import options
from smq.coordinator.cli.root import cli
from smq.coordinator.config.node_toml import known_keys


def test_every_command_and_every_option_is_on_the_page_of_commands() -> None:
    page = page_of("commands").read_text()
    shared, *sections = re.split(r"^##+ (?=smq )", page, flags=re.M)
    commands = list(all_below(click.Context(cli, info_name="smq")))
    assert len(sections) == len(commands)
    for ctx, shown in zip(commands, sections, strict=True):
        assert re.match(rf"{ctx.command_path}\b(?! [a-z])", shown)
        for names, text in options(ctx):
            listed = f"- `{names}`: {escaped(text)}\n"
            if text and not names.endswith("--help"):  # with -h once the command has run
                assert listed in shown or listed in shared or f"`{names}`" in _of_another(shown), (
                    ctx.command_path,
                    names,
                )


def _of_another(section: str) -> str:
    """The options that stand at another command."""
    return " ".join(re.findall(r"^As for `smq .*`: (.*)$", section, re.M))


def test_every_call_and_its_comment_in_the_contract_are_on_the_page_of_grpc() -> None:
    page = page_of("grpc").read_text()
    calls = [method.name for service in described().service for method in service.method]
    assert len(calls) >= 40
    assert re.findall(r"^- `(\w+)`(?: \(a stream of .*?\))?: \S", page, re.M) == calls
    plain = " ".join(page.replace("\\", "").split())
    services = re.findall(r"(?:^//.*\n)*^service \w+ \{\n(?:^ .*\n)*", PROTO.read_text(), re.M)
    lines = [line for service in services for line in re.findall(r"// *(\S.*)", service)]
    assert len(lines) > 60
    assert [line for line in lines if " ".join(line.split()) not in plain] == []


def test_every_key_of_the_configuration_is_on_the_page_of_settings() -> None:
    page = page_of("settings").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (\S.*) \| (\S.*) \| `(SMQ_\w+)` \|$", page, re.M)
    shown = {("peers", "*") if key == "N" else key for key, *_ in rows}
    assert {key[-1] for key in known_keys() if key[-1] != "*"} | {("peers", "*")} == shown
    assert len(rows) == sum(key[-1] != "*" or key[0] == "peers" for key in known_keys())


def test_a_setting_without_a_word_about_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.coordinator.config.node_toml.known_keys", lambda: iter([("tuning", "node_id")]))
    with pytest.raises(LookupError, match=r"what tuning\.node_id means"):
        settings.render()


def test_text_for_a_table_stays_in_its_cell() -> None:
    assert cell("`a|b`\n  c*  <d> `e*`") == r"`a\|b` c\* \<d> `e*`"
    assert table(("a", "b"), [("c", "d")]) == "| a | b |\n|---|---|\n| c | d |\n"
