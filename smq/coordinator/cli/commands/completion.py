"""`smq completion`: the script by which a shell completes commands, options, topics and groups.

Owns the command; click has the scripts. `cli.root` loads it when it is used.
"""

from typing import Final

import click
from click.shell_completion import get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints a script that lets SHELL complete commands, options, topics and groups.

    \b
    Put one of these lines into your shell's start-up file:
      eval "$(smq completion bash)"
      eval "$(smq completion zsh)"
      smq completion fish | source
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(found(ctx.find_root().command, {}, "smq", "_SMQ_COMPLETE").source())
