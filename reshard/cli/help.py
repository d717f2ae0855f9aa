"""help: `--help` as a command; completion: what shells need for the tab key."""

from __future__ import annotations

import re

import click
from click.shell_completion import CompletionItem

from reshard.cli.command import Choice, command


def _names(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """Subcommands of the typed commands."""
    command, _context = _find(ctx.find_root(), tuple(ctx.params.get("names") or ()))
    if not isinstance(command, click.Group):
        return []
    return [CompletionItem(name) for name in command.list_commands(ctx) if name.startswith(typed)]


@command("help", "reshard help verify\nreshard help strategy show")
@click.argument("names", nargs=-1, metavar="[COMMAND...]", shell_complete=_names)
@click.pass_context
def show_help(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of COMMAND, as `reshard COMMAND --help` does, or the list of commands."""
    _, context = _find(ctx.find_root(), names)
    click.echo(context.get_help())


@command(
    "completion",
    """
eval "$(reshard completion bash)"
eval "$(reshard completion zsh)"
reshard completion fish | source
""",
)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that enables completion with the tab key in SHELL: bash, zsh or fish.

    The line for your shell, as below, enables it in ~/.bashrc, ~/.zshrc after compinit, or
    ~/.config/fish/config.fish.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    # Not made.source(): click starts the shell there to check its version.
    source = ShellComplete.source(shell_class(ctx.find_root().command, {}, "reshard", "_RESHARD_COMPLETE"))
    # click's bash script drops words, such as none, where files are offered, too.
    click.echo(_FILES_ONLY.sub(lambda _: _WORDS_AND_FILES, source))


# click 8.0 spells the name COMREPLY.
_FILES_ONLY = re.compile(r" *COMP?REPLY=\(\)\n *compopt -o default\n")
_WORDS_AND_FILES = """\
            if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
                compopt -o default
            else
                compopt -o filenames
                mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
            fi
"""


def _find(root: click.Context, names: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    """The command of these names, and a context that its help is written in."""
    context = root
    for name in names:
        if not isinstance(context.command, click.Group):
            raise click.UsageError(f"{context.command_path} has no commands of its own: {name}", context)
        spelled, command, _ = context.command.resolve_command(context, [name])
        if command is None:
            raise click.UsageError(f"No such command: {name}.", context)
        context = click.Context(command, parent=context, info_name=spelled)
    return context.command, context
