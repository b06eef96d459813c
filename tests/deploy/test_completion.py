"""Completion in the shells themselves, by the script that the installed command prints: commands and options."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from smq.coordinator.cli.commands.completion import SHELLS
from smq.testing.node_process import wait_for
from tests.skips import needs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CASES = [
    (("smq", "to"), {"top", "topic"}),
    (("smq", "topic", "des"), {"describe"}),
    (("smq", "dev", "--eph"), {"--ephemeral"}),
    (("smq", "serve", "--conf"), {"--config"}),
    (("smq", "completion", "f"), {"fish"}),
]
each_case = pytest.mark.parametrize(("words", "expected"), CASES, ids=[" ".join(words) for words, _ in CASES])
BASH = """
source <(smq completion bash) || exit
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _smq_completion smq
printf "%s\\n" "${COMPREPLY[@]}"
"""
# Ctrl-X writes what stands on the line to a file.
ZSHRC = """
unsetopt zle_bracketed_paste beep
autoload -Uz compinit && compinit -u -D
eval "$(smq completion zsh)"
write-line() { print -r -- "$BUFFER" > "$HOME/line.new" && mv "$HOME/line.new" "$HOME/line" }
zle -N write-line && bindkey '^X' write-line && touch "$HOME/started"
"""


def environment(installed: Path, home: Path) -> dict[str, str]:
    return {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(home), "TERM": "vt100", "LANG": "C.UTF-8"}


def printed(command: list[str], installed: Path, home: Path) -> str:
    env = environment(installed, home)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_get_their_completions(installed: Path, tmp_path: Path, shell: str) -> None:
    assert "_SMQ_COMPLETE" in printed(["smq", "completion", shell], installed, tmp_path)


@each_case
def test_bash_completes(installed: Path, tmp_path: Path, words: tuple[str, ...], expected: set[str]) -> None:
    assert set(printed(["bash", "-c", BASH, "bash", *words], installed, tmp_path).split()) == expected


@needs("fish")
@pytest.mark.full
@each_case
def test_fish_completes(installed: Path, tmp_path: Path, words: tuple[str, ...], expected: set[str]) -> None:
    script = f"smq completion fish | source; complete --do-complete '{' '.join(words)}'"
    lines = printed(["fish", "--no-config", "-c", script], installed, tmp_path).splitlines()
    assert {line.partition("\t")[0] for line in lines} == expected


@needs("zsh")
@pytest.mark.full
@pytest.mark.parametrize(("words", "expected"), [case for case in CASES if len(case[1]) == 1])
def test_zsh_completes_at_its_prompt(
    installed: Path, tmp_path: Path, words: tuple[str, ...], expected: set[str]
) -> None:
    """By the Tab key, with a space after the word."""
    (tmp_path / ".zshrc").write_text(ZSHRC)
    ours, theirs = pty.openpty()
    env = environment(installed, tmp_path)
    command = ["zsh", "--interactive"]
    with subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as shell:
        os.close(theirs)
        try:
            wait_for("zsh has read its start-up file", (tmp_path / "started").exists, 60)
            os.write(ours, " ".join(words).encode() + b"\t\x18")
            wait_for("zsh has completed the line", (tmp_path / "line").exists, 60)
        finally:
            shell.kill()
            os.close(ours)
    assert (tmp_path / "line").read_text() == " ".join((*words[:-1], *expected)) + " \n"
