"""The pages that come from code leave nothing out: each call, comment, command, option and setting is there."""

import re
from collections.abc import Iterator

import click
import pytest

from docs.generate import cell, page_of, settings, table
from docs.generate.grpc import PROTO, described
from smq.coordinator.cli.commands.man import below, options
from smq.coordinator.cli.root import cli
from smq.coordinator.config.node_toml import known_keys


def _commands(ctx: click.Context) -> Iterator[click.Context]:
    for inner in below(ctx):
        yield inner
        yield from _commands(inner)


def test_every_command_and_every_option_is_on_the_page_of_commands() -> None:
    sections = dict(re.findall(r"^##+ (smq .+)\n\n([^#]*(?:#[^# ][^#]*)*)", page_of("commands").read_text(), re.M))
    shared = page_of("commands").read_text().partition("## smq")[0]
    commands = list(_commands(click.Context(cli, info_name="smq")))
    assert list(sections) == [ctx.command_path for ctx in commands]
    for ctx in commands:
        shown = sections[ctx.command_path]
        for names, text in options(ctx):
            row = f"| {cell(f'`{names}`')} |"
            is_help = names.endswith("--help")  # with -h once the command has run
            assert row in shown or row in shared or not text or is_help, (ctx.command_path, names)


def test_every_call_has_a_meaning_and_every_comment_of_the_contract_is_on_its_page() -> None:
    page = page_of("grpc").read_text()
    calls = [method.name for service in described().service for method in service.method]
    assert len(calls) >= 40
    for call in calls:
        assert re.search(rf"^\| `{call}` \| \[requests?\]\(#\w+\), \[answers?\]\(#\w+\) \| \S.* \|$", page, re.M), call
    plain = " ".join(page.replace("\\", "").split())
    lines = re.findall(r"// *(\S.*)", PROTO.read_text())
    comments = [" ".join(line.split()) for line in lines if not line.startswith("---")]
    assert len(comments) > 200
    assert [line for line in comments if line not in plain] == []
    wrapped = re.findall(r"; +// .*\n {8,}// .*", PROTO.read_text())
    assert wrapped == [], "protoc gives the second line to the next field: put both lines above their own"


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
