"""The names group: rules between the names of two model codes."""

from __future__ import annotations

import click

from reshard.cli import completion, options
from reshard.cli.command import Group, command
from reshard.cli.output import echo_json, say


@click.group("names", cls=Group)
def names() -> None:
    """Show rules that give tensors other names and packing, between Hugging Face's models and MindFormers'."""


@command("list", "reshard names list\nreshard names list --json")
@options.json_output
@options.common
def names_list(as_json: bool) -> None:
    """Print the built-in tables."""
    from reshard.names import builtin_names, rules_named

    tables = [rules_named(name) for name in builtin_names()]
    if as_json:
        echo_json(
            [
                {"name": table.path, "title": table.title, "options": [option.name for option in table.options]}
                for table in tables
            ]
        )
        return
    width = max(len(table.path) for table in tables)
    say("\n".join(f"{table.path:{width}}  {table.title}" for table in tables))


@command(
    "show",
    """
reshard names show qwen3

To begin a table of your own:
reshard names show llama > mine.toml
""",
)
@click.argument("rules", metavar="NAME|FILE", shell_complete=completion.tables)
@options.json_output
@options.common
def names_show(rules: str, as_json: bool) -> None:
    """Print a table: a built-in one, or that of a file, which is checked.

    With --json, the rules as data.
    """
    from reshard.names import rules_named
    from reshard.names.toml_file import content_of

    table = rules_named(rules)
    if not as_json:
        click.echo(table.text, nl=False)
        return
    echo_json(
        {
            "name": table.path,
            "title": table.title,
            "sides": list(table.sides),
            "options": [
                {
                    "name": option.name,
                    "values": list(option.values),
                    "default": option.default,
                    "config": option.key,
                    "name_values": {name.text: value for name, value in option.name_values},
                    "about": option.about,
                }
                for option in table.options
            ],
            "content": content_of(table),
        }
    )


names.add_command(names_list)
names.add_command(names_show)
