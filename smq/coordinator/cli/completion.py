"""`smq completion`: what a shell needs to complete the commands and options of `smq`.

Owns the printing of click's own script. It knows no command: the script asks `smq` at each completion. `cli.main` loads
it when it is used.
"""

from typing import Final

import click
from click.shell_completion import get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints the script that completes commands and options in SHELL.

    \b
    bash, in ~/.bashrc:   source <(smq completion bash)
    zsh, in ~/.zshrc:     source <(smq completion zsh)
    fish:                 smq completion fish > ~/.config/fish/completions/smq.fish
    """
    made = get_completion_class(shell)
    assert made is not None  # click has the three
    click.echo(made(ctx.find_root().command, {}, "smq", "_SMQ_COMPLETE").source())
