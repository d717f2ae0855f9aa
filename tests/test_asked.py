"""What is asked: an option that is a field of a group is in commands, help, records, Python and pasted commands."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import reshard
from reshard.api import Conversion
from reshard.asked import (
    NUMBER,
    PARALLEL,
    RANKS,
    TEXTS,
    Edits,
    Effort,
    Group,
    Kind,
    Option,
    Source,
    Target,
    fields_of,
    from_json,
    groups_of,
    to_json,
    words_of,
)
from reshard.cli.main import cli
from reshard.cli.options import group
from reshard.errors import UsageError
from reshard.in_python import in_python
from tests import asking
from tests.corpus import ROOT

GROUPS: list[type[Group]] = [Source, Target, Edits, Effort, Conversion]
FIELDS = [(group, name) for group in GROUPS for name in fields_of(group)]
OTHERS = {"to": "dcp", "format": "ckpt", "io": "mmap", "crc": "never", "check_replicas": "all", "checksum": "crc32"}


def another(option: Option, default: Any) -> Any:
    """A value that is not the default."""
    if option.parameter in OTHERS:
        return OTHERS[option.parameter]
    values: dict[Kind, Any] = {
        RANKS: (3, 7),
        NUMBER: 5,
        PARALLEL: (("tp", 2), ("pp", 4)),
        reshard.asked.SIZE: 5000,
        reshard.asked.MEMORY: 1 << 30,
    }
    if option.kind in values:
        return values[option.kind]
    if isinstance(default, bool):
        return not default
    return {"shard": (0, 4), "optimizer": "keep"}.get(option.parameter, ("a*", "b") if default == () else "text")


def asked(of: type[Group], name: str) -> Conversion:
    option, default = fields_of(of)[name]
    return asking.conversion_of("/src", "/dst", **{option.parameter: another(option, default)})


@pytest.mark.parametrize(("of", "name"), FIELDS)
def test_a_field_is_recorded(of: type[Group], name: str) -> None:
    conversion = asked(of, name)
    assert conversion != asking.conversion_of("/src", "/dst")
    assert from_json(Conversion, json.loads(json.dumps(to_json(conversion)))) == conversion


@pytest.mark.parametrize(("of", "name"), FIELDS)
def test_a_pasted_command_asks_for_the_same(of: type[Group], name: str) -> None:
    conversion = asked(of, name)
    words = [word for each in groups_of(conversion) for word in words_of(each)]
    assert len(words) == (2 if fields_of(of)[name][0].kind is TEXTS else 1)
    command = cli.get_command(click.Context(cli), "convert")
    assert command is not None and command.callback is not None
    context = command.make_context("convert", ["/src", "/dst", *words])
    typed = {key: value for key, value in context.params.items() if key not in ("dry_run", "verify", "scheduler")}
    parameters = {option.parameter: (each, name) for each in GROUPS for name, (option, _) in fields_of(each).items()}
    for parameter, (each, field) in parameters.items():
        default = fields_of(each)[field][1]
        value = typed[parameter]
        # What click left out has the field's default.
        if value is None or (isinstance(default, bool) and default):
            typed[parameter] = default if value is None else not value
    flat = {key: typed[key] for key in parameters}
    assert asking.conversion_of(typed["src"], typed["dst"], **flat) == conversion


@pytest.mark.parametrize("of", GROUPS)
def test_every_field_is_documented_without_words_of_the_command_line(of: type[Group]) -> None:
    documented = str(of.__doc__)
    names = [field.name for field in fields(of)]  # type: ignore[arg-type]
    assert re.findall(r"^        (\w+): ", documented, re.MULTILINE) == names
    assert not re.search(r"--[a-z]|\b(repeatable|SRC|DST|DIR|GLOB|DTYPE)\b", documented)


@pytest.mark.parametrize("of", GROUPS)
def test_users_see_the_fields_and_what_a_conversion_does(of: type[Group]) -> None:
    made = Conversion(Source("a"), Target("b")) if of is Conversion else of(*(["a"] if of in (Source, Target) else []))
    methods = {"plan", "convert", "verify"} if of is Conversion else set()
    names = {field.name for field in fields(of)}  # type: ignore[arg-type]
    assert {name for name in dir(made) if not name.startswith("_")} == names | methods


def test_the_page_on_python_has_every_field() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for of in GROUPS:
        for field in fields(of):  # type: ignore[arg-type]
            assert field.name in reshard.asked.GROUPS or re.search(rf"{of.__name__}\([^)]*\b{field.name}\b", page)


def test_a_field_keeps_one_type_of_those_it_accepts() -> None:
    source = Source(Path("a"), strategy=Path("b"), step=20, without_ranks=[7, 3])
    assert source == Source("a", "b", "20", without_ranks="3,7")
    assert (source.path, source.strategy, source.step, source.without_ranks) == ("a", "b", "20", (3, 7))
    target = Target(Path("a"), max_shard_size="5GB", args=Path("b"), sizes={"pp": 4, "tp": 2})
    assert target == Target("a", max_shard_size=5 * 10**9, args="b", sizes="tp=2,pp=4")
    edits = Edits("a", ["b"], names=Path("c"), config=Path("d"), cast="bf16")
    assert edits == Edits(("a",), ("b",), names="c", config="d", cast=["bf16"])
    assert Effort(max_memory="2G") == Effort(max_memory=2 << 30)
    assert Conversion(source, target, files="0-2", shard=[0, 4]) == Conversion(
        source, target, files=(0, 1, 2), shard=(0, 4)
    )


def test_a_conversion_shows_what_is_asked() -> None:
    conversion = Conversion(Source("a", "none"), Target(Path("b"), form="hf"), Edits(cast="bf16"), files="0-2")
    parts = "Source('a', strategy='none'), Target('b', form='huggingface'), Edits(cast=('bf16',)), files=(0, 1, 2)"
    shown = f"Conversion({parts})"
    assert repr(conversion) == shown
    assert eval(shown) == conversion


@pytest.mark.parametrize(("of", "name"), FIELDS)
def test_messages_in_python_name_the_field(of: type[Group], name: str) -> None:
    (option, _) = fields_of(of)[name]
    assert f"{of.__name__}.{name} ({option.names[0]})" in in_python(f"leave out {option.names[0]}")


def test_an_option_is_added_in_one_place() -> None:
    @dataclass(frozen=True)
    class Coloured(Group):
        path: str
        colour: str | None = reshard.asked._option(None, "Colour of all tensors.", "Source", metavar="NAME")

    @click.command()
    @click.argument("src")
    @group(Coloured)
    def paint(src: str, coloured: Coloured) -> None:
        click.echo(" ".join([src, *words_of(coloured)]))

    run = CliRunner()
    assert "--colour NAME" in run.invoke(paint, ["--help"]).output
    assert run.invoke(paint, ["a"]).output == "a\n"
    assert run.invoke(paint, ["a", "--colour", "red"]).output == "a --colour=red\n"
    with pytest.raises(UsageError, match="colour"):
        Coloured("a", colour="")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"form": "torch"}, "form='torch' is none of 'ranks'"),
        ({"shards": 0}, "shards=0 is not between 1 and"),
        ({"prefix": 5}, "prefix=5"),
        ({"overwrite": "yes"}, "overwrite='yes'"),
        ({"max_shard_size": "many"}, "not a size"),
        ({"sizes": "tp=2,tp=4"}, "each once"),
        ({"sizes": "tp"}, "not a list of sizes"),
        ({"sizes": {"dp": 2}}, "tp, pp, ep"),
    ],
)
def test_a_value_of_another_kind_is_refused(values: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        Target("out", **values)


def test_groups_are_exported() -> None:
    names = [field.name for field in fields(Conversion)]
    assert [getattr(reshard, name.title()) for name in names[:4]] == [Source, Target, Edits, Effort]


def test_sizes_below_one_byte_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="max_memory=0"):
        Effort(max_memory=0)
    with pytest.raises(UsageError, match="max_shard_size=-1"):
        Target("/dst", max_shard_size=-1)
