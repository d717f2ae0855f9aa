"""What is asked of a conversion: `Source`, `Target`, `Edits` and `Effort`, and the files that a run writes.

A field declares its option. Options of commands, records of commands, commands to paste and parameters in Python
follow from the fields, so an option is added here and nowhere else. Nothing here is changed while a conversion runs.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar, Union

from reshard.defaults import DEFAULT_PREFIX, MAX_DEVICES, MAX_MEMORY, usable_cpus
from reshard.errors import UsageError
from reshard.forms import FORM_CLASSES, SHORT_NAMES
from reshard.text.messages import number_ranges

Path = Union[str, "os.PathLike[str]"]
Sizes = tuple[tuple[str, int], ...]
G = TypeVar("G", bound="Group")
Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)


class Accepts(Generic[Given, Kept]):
    """The type of a field that accepts more types than it keeps; for type checkers alone."""

    # Dataclasses take the type of a parameter from __set__, and that of an attribute from __get__.
    def __set__(self, group: Any, value: Given) -> None: ...

    def __get__(self, group: Any, of: Any) -> Kept:
        raise AttributeError


TORCH = "torch"
"""--format torch: a legacy tree of Megatron."""

_SIZES = (1, 1 << 62)
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([KMGT])(?:(I)?B)?|B)?\s*", re.IGNORECASE)


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks of ``0-7,12``, ascending.

    Raises:
        ValueError: the text is no list of ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of ranks such as 0-7,12")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first or last >= MAX_DEVICES:
            raise ValueError(f"{part.strip()!r} is not a range of ranks below {MAX_DEVICES}")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def parse_memory(text: str) -> int:
    """The bytes of a size in binary units, such as ``512M``.

    Raises:
        ValueError: the text is no size.
    """
    return _bytes(text, 1024, "512M or 2G", "")


def parse_size(text: str) -> int:
    """The bytes of ``5GB`` or ``5G`` (decimal, as at Hugging Face), ``5GiB`` (binary) or ``1000B``.

    Raises:
        ValueError: the text is no size.
    """
    return _bytes(text, 1000, "5GB, 500M (decimal) or 5GiB (binary)", "B")


def _bytes(text: str, unit: int, examples: str, ending: str) -> int:
    """The bytes of a size in a unit, which is binary with an ``i``; ``ending`` is that of units in the errors."""
    match = _SIZE.fullmatch(text)
    size = 0
    if match is not None:
        power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
        size = int(Decimal(match[1]) * (1024 if match[3] else unit) ** power)
    if not size:
        raise ValueError(f"{text!r} is not a size such as {examples}")
    if text.strip()[-1].isdigit():
        raise ValueError(f"{text!r} has no unit: {text.strip()}M{ending} or {text.strip()}G{ending}")
    return size


def _ranks(value: Any) -> tuple[int, ...]:
    ranks = tuple(sorted({*map(operator.index, value)}))
    if ranks and not 0 <= ranks[0] <= ranks[-1] < MAX_DEVICES:
        raise ValueError(f"{value} are not ranks below {MAX_DEVICES}")
    return ranks


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(_text, value))


def _text(value: Any) -> str:
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError
    return text


def _step(value: Any) -> str:
    return value if isinstance(value, str) else str(operator.index(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_SIZED = ("tp", "pp", "ep")


def parse_parallel_sizes(text: str) -> tuple[tuple[str, int], ...]:
    """The sizes of ``tp=2,pp=4,ep=2``.

    Raises:
        ValueError: the text is no list of sizes.
    """
    pairs = [re.fullmatch(r"\s*([a-z]+)\s*=\s*(\d{1,6})\s*", part) for part in text.split(",")]
    if not all(pairs):
        raise ValueError(f"{text!r} is not a list of sizes such as tp=2,pp=4,ep=2")
    return _parallel_sizes([(pair[1], int(pair[2])) for pair in pairs if pair])


def _parallel_sizes(value: Any) -> tuple[tuple[str, int], ...]:
    pairs = [*value.items()] if isinstance(value, Mapping) else [*value]
    sizes = {name: operator.index(size) for name, size in pairs}
    if (
        len(sizes) < len(pairs)
        or not sizes.keys() <= {*_SIZED}
        or not all(0 < size <= MAX_DEVICES for size in sizes.values())
    ):
        stated = ",".join(f"{name}={size}" for name, size in pairs)
        raise ValueError(f"{stated!r}: the sizes are {', '.join(_SIZED)}, each once and at least 1")
    return tuple((name, sizes[name]) for name in _SIZED if name in sizes)


def _share(value: Any) -> tuple[int, int]:
    number, runs = map(operator.index, value)
    if not 0 <= number < runs:
        raise ValueError(f"shard={value} is not a share; the first of four is (0, 4)")
    return number, runs


class Kind(NamedTuple):
    """A kind of values.

    Attributes:
        name: the noun for messages.
        accepts: what callers in Python pass.
        checked: a value as it is kept; raises TypeError or ValueError.
        parse: reads a text as it is typed; None where it is the value.
        words: the text of a value, as it is typed.
    """

    name: str
    accepts: str
    checked: Callable[[Any], Any]
    parse: Callable[[str], Any] | None = None
    words: Callable[[Any], str] = str


TEXT = Kind("text", "a text or a path", _text)
STRATEGY = Kind("strategy", "a path", lambda value: "none" if value == "None" else _text(value))
TEXTS = Kind("texts", "a text or a list of texts", _texts)
STEP = Kind("step", "a number or a text such as '3_10'", _step)
FLAG = Kind("flag", "True or False", _flag)
FORM = Kind("form", "a text", lambda value: SHORT_NAMES.get(value, value))
FORMAT = Kind("format", "a text", _text)
NUMBER = Kind("number", "a whole number", operator.index)
RANKS = Kind("ranks", "ranks such as [0, 2] or '0-7,12'", _ranks, parse_ranks, number_ranges)
SIZE = Kind("size", "bytes, or a size such as '2GiB'", operator.index, parse_size, lambda size: f"{size}B")
MEMORY = SIZE._replace(parse=parse_memory)
PARALLEL = Kind(
    "sizes",
    "sizes such as {'tp': 2} or 'tp=2,pp=4'",
    _parallel_sizes,
    parse_parallel_sizes,
    lambda sizes: ",".join(f"{name}={size}" for name, size in sizes),
)
SHARE = Kind(
    "shard", "a share such as (0, 4), the first of four", _share, words=lambda share: "/".join(map(str, share))
)


VALUE = "value"
"""`Option.identity` of options whose values are compared."""


class Option(NamedTuple):
    """The option of a field.

    Attributes:
        help: its help.
        section: of a command's help.
        names: its spellings; by default the field's name.
        kind: of its values.
        metavar: as help names the value.
        shown: as help names the default; by default the value.
        choices: the possible values; the kind is then `TEXT`.
        limits: smallest and largest number.
        completes: what a shell completes: ``paths``, ``tables`` or ``types``.
        identity: how runs that fill one directory together agree: `VALUE` if they have the same value, or the digests
            of `Record.digests` that must be equal, with spaces; empty if they may differ, because it decides no byte.
    """

    help: str
    section: str
    names: tuple[str, ...] = ()
    kind: Kind = TEXT
    metavar: str | None = None
    shown: str | None = None
    choices: Collection[str] = ()
    limits: tuple[int, int] | None = None
    completes: str | None = None
    identity: str = ""

    @property
    def parameter(self) -> str:
        """The name of the option with underscores."""
        return self.names[0].lstrip("-").replace("-", "_")


def _option(default: Any, help: str, section: str, *names: str, **attributes: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, section, names, **attributes)})


# Without a default, mypy takes a field for no descriptor.
def _path() -> Any:
    return field()


def fields_of(group: type) -> dict[str, tuple[Option, Any]]:
    """The option and the default of every field of a group that has an option, by the field's name."""
    fields = [field for field in dataclasses.fields(group) if "option" in field.metadata]
    return {field.name: (_named(field.metadata["option"], field.name), field.default) for field in fields}


def _named(option: Option, field: str) -> Option:
    return option if option.names else option._replace(names=(f"--{field.replace('_', '-')}",))


# Patterns whose order and repetition decide nothing.
_UNORDERED = ("include", "exclude")
# Texts that callers in Python may pass as a dictionary.
_PAIRS = ("rename", "cast")


class Group:
    """Fields with options."""

    def __post_init__(self) -> None:
        """Check every field by itself.

        Raises:
            UsageError: a value is not of its kind.
        """
        for name, (option, default) in fields_of(type(self)).items():
            value = getattr(self, name)
            if value is None and (default is None or name == "prefix"):
                continue
            object.__setattr__(self, name, _checked(name, option, value))
        if "path" in vars(self):
            object.__setattr__(self, "path", _checked("path", Option("", ""), vars(self)["path"]))

    def __repr__(self) -> str:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        values = {name: value for name, value in vars(self).items() if value != defaults[name]}
        shown = [f"{'' if name in ('path', *GROUPS) else f'{name}='}{value!r}" for name, value in values.items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def is_typed(group: Group) -> bool:
    """Whether a command line can ask for the same."""
    fields = dataclasses.fields(group)  # type: ignore[arg-type]
    others = [field for field in fields if "option" not in field.metadata and field.name != "path"]
    values = ((getattr(group, field.name), field.default) for field in others)
    return all(is_typed(value) if isinstance(value, Group) else value == default for value, default in values)


def words_of(group: Group, names: Sequence[str] | None = None) -> list[str]:
    """The options of a group, as words; defaults are left out.

    Args:
        group: the group.
        names: only these fields.
    """
    words: list[str] = []
    for name, (option, default) in fields_of(type(group)).items():
        value = getattr(group, name)
        if value in (default, None) or (names is not None and name not in names):
            continue
        values = value if option.kind is TEXTS else (value,)
        flag = option.names[0]
        words += [flag if isinstance(each, bool) else f"{flag}={option.kind.words(each)}" for each in values]
    return words


def given(group: Group, identity: bool = False) -> dict[str, Any]:
    """The fields with options that are not at their defaults; only those whose values agree between runs."""
    values = {name: (getattr(group, name), *field) for name, field in fields_of(type(group)).items()}
    return {
        name: tuple(sorted({*value})) if identity and name in _UNORDERED else value
        for name, (value, option, default) in values.items()
        if value != default and (option.identity == VALUE or not identity)
    }


def to_json(group: Group, identity: bool = False) -> dict[str, Any]:
    """The path, the groups within, and `given`; see `from_json`. The identity has no path."""
    groups = {name: to_json(value, identity) for name, value in vars(group).items() if isinstance(value, Group)}
    path = {} if identity or "path" not in vars(group) else {"path": vars(group)["path"]}
    return {**path, **groups, **given(group, identity)}


def from_json(of: type[G], values: Mapping[str, Any]) -> G:
    """The group of a record.

    Raises:
        UsageError: a value is unknown or invalid.
    """
    fields = {field.name: field for field in dataclasses.fields(of)}  # type: ignore[arg-type]
    arguments = dict(values)
    for name, value in values.items():
        if name not in fields_of(of) and not (name in fields and name in ("path", *GROUPS)):
            raise UsageError(f"{name!r} is unknown")
        if name in GROUPS:
            if not isinstance(value, dict):
                raise UsageError(f"{name} is not an object")
            arguments[name] = from_json(GROUPS[name], value)
    try:
        return of(**arguments)
    except TypeError as error:
        raise UsageError(str(error)) from error


def _advice(option: Option, value: object) -> str | None:
    """What is meant by a word that is none of the choices, for callers in Python."""
    if option.kind not in (FORM, FORMAT):
        return None
    # Loaded only here, for an error.
    from reshard.forms.other_words import advice_on
    from reshard.in_python import in_python

    advice = advice_on(str(value))
    return None if advice is None else in_python(advice)


def _read(name: str, parse: Callable[[str], Any] | None, value: Any) -> Any:
    """The value of a text; without ``parse``, the texts of a dictionary, as they are typed."""
    if parse is not None:
        return parse(value)
    if name not in _PAIRS:
        raise TypeError
    pairs = [(_text(old), _text(new)) for old, new in value.items()]
    if name == "rename" and any("=" in old for old, _ in pairs):
        raise ValueError(f"rename={value!r}: a name with = in it cannot be renamed")
    return ["=".join(pair) for pair in pairs]


def _checked(name: str, option: Option, value: Any) -> Any:
    """A value of a field, as it is kept.

    Raises:
        UsageError: it is not of the field's kind.
    """
    try:
        if isinstance(value, Mapping if option.kind.parse is None else str):
            value = _read(name, option.kind.parse, value)
        result = option.kind.checked(value)
    except (TypeError, ValueError) as error:
        text = str(error) if isinstance(error, ValueError) else f"{name}={value!r}: pass {option.kind.accepts}"
        raise UsageError(text) from error
    texts = result if isinstance(result, tuple) else (result,)
    if "" in texts:
        raise UsageError(f"{name} is empty", hint="leave it out for its default")
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise UsageError(f"{name} contains a NUL character")
    if option.choices and result not in option.choices:
        raise UsageError(
            f"{name}={value!r} is none of {', '.join(map(repr, option.choices))}", hint=_advice(option, value)
        )
    if option.limits is not None and not option.limits[0] <= result <= option.limits[1]:
        raise UsageError(f"{name}={value!r} is not between {option.limits[0]} and {option.limits[1]}")
    return result


@dataclass(frozen=True, repr=False)
class Source(Group):
    """A checkpoint to read.

    Attributes:
        path: rank directories, a file, a path with ``{rank}`` in it, or a directory of another form.
        strategy: strategy that it was saved with, a path; ``"none"`` if it is not sharded.
        step: step to read, such as ``"3_10"`` or ``20``; ``"latest"`` is the newest complete one, ``"release"`` that of
            a root of Megatron.
        file_suffix: read only files whose names end in this text before ``.ckpt`` or ``.safetensors``.
        without_ranks: count these ranks as lost: replicas on other ranks are read. ``[3, 7]`` or ``"3,8-15"``.
        fallback: if the newest step is not complete, use an older one; if false, fail.
        files: the file of each rank, in place of those at ``path``.
    """

    path: Accepts[Path, str] = _path()
    strategy: Accepts[Path | None, str | None] = _option(
        None,
        "Strategy that the source was saved with; none if it is not sharded.",
        "Strategies",
        "--src-strategy",
        kind=STRATEGY,
        metavar="FILE|DIR|none",
        completes="paths",
        identity="source_strategy",
    )
    step: Accepts[SupportsIndex | str, str] = _option(
        "latest",
        "Step to read; latest is the newest complete one, release that of a root of Megatron.",
        "Source",
        kind=STEP,
        metavar="EPOCH_STEP|latest",
    )
    file_suffix: str | None = _option(
        None,
        "Read only files whose names end in TEXT before .ckpt or .safetensors.",
        "Source",
        metavar="TEXT",
        shown="all files",
        identity=VALUE,
    )
    without_ranks: Accepts[str | Iterable[SupportsIndex], tuple[int, ...]] = _option(
        (),
        "Count these source ranks as lost: replicas on other ranks are read.",
        "Source",
        kind=RANKS,
        metavar="3,7",
        shown="none",
        identity=VALUE,
    )
    fallback: bool = _option(
        True,
        "Fail if the newest step is not complete, instead of using an older one.",
        "Source",
        "--no-fallback",
        kind=FLAG,
    )
    files: Mapping[int, str] | None = None


@dataclass(frozen=True, repr=False)
class Target(Group):
    """A checkpoint to write.

    Attributes:
        path: the target directory.
        strategy: its strategy, a path; ``"none"`` for one unsharded rank, ``"same"`` for the source's.
        shards: cut rows over this number of files, as FSDP does, in place of ``strategy``.
        form: its form, such as ``"ranks"``, ``"huggingface"`` (or ``"hf"``) or ``"dcp"``; None for ``"ranks"``.
        max_shard_size: largest file of ``"huggingface"`` (by default 5 GB) or ``"unified"`` (3 GiB), in bytes, or
            ``"500M"``, ``"5GB"`` (decimal) or ``"5GiB"``.
        prefix: prefix of file names; with ``{rank}``, ``{epoch}`` or ``{step}`` in it, the whole name.
        format: format of the files: ``"same"`` as the source's, ``"ckpt"``, ``"safetensors"``; ``"torch"`` for a legacy
            tree of Megatron.
        args: the arguments of a training with Megatron, as a JSON file, or a checkpoint of Megatron that has them; for
            the form ``"megatron"``, or with ``Edits.names`` in place of those of the source.
        sizes: parallel sizes of a legacy tree of Megatron: ``{"tp": 2, "pp": 4}`` or ``"tp=2,pp=4"``; others are 1.
        overwrite: replace existing targets, including those of another conversion.
        checksum: ``"crc32"`` records checksums in the manifest, which ``reshard verify`` compares, and CRCs in archives
            of ``"dcp"``.
        is_file: ``path`` is the file itself.
    """

    path: Accepts[Path, str] = _path()
    strategy: Accepts[Path | None, str | None] = _option(
        None,
        "Strategy of the target; none for one unsharded rank, same for the source's.",
        "Strategies",
        "--dst-strategy",
        kind=STRATEGY,
        metavar="FILE|DIR|none|same",
        completes="paths",
        identity="target_strategy",
    )
    shards: int | None = _option(
        None,
        "Cut rows over N files, as FSDP does, in place of --dst-strategy.",
        "Strategies",
        kind=NUMBER,
        metavar="N",
        limits=(1, MAX_DEVICES),
        identity=VALUE,
    )
    form: str | None = _option(
        None,
        f"Form of the target: {', '.join(FORM_CLASSES)}; hf is short for huggingface.",
        "Target",
        "--to",
        kind=FORM,
        metavar="FORM",
        shown="ranks",
        choices=FORM_CLASSES.keys(),
        identity=VALUE,
    )
    max_shard_size: Accepts[int | str | None, int | None] = _option(
        None,
        "Largest file of --to huggingface or unified: 500M, 5GB (decimal) or 5GiB.",
        "Target",
        kind=SIZE,
        metavar="SIZE",
        limits=_SIZES,
        shown="5GB, unified 3GiB",
        identity="division",
    )
    prefix: str | None = _option(
        DEFAULT_PREFIX,
        "Prefix of target file names; with {rank}, {epoch} or {step} in it, the whole name.",
        "Target",
        metavar="TEXT",
    )
    format: str = _option(
        "same",
        "Format of the target files; torch with --to megatron: a legacy tree of .pt files.",
        "Target",
        kind=FORMAT,
        choices=("same", "ckpt", "safetensors", TORCH),
    )
    args: Accepts[Path | None, str | None] = _option(
        None,
        "The arguments of a training with Megatron, as a JSON file, or a checkpoint of Megatron that has them: for "
        "--to megatron, or with --names in place of those of SRC.",
        "Target",
        metavar="FILE|DIR",
        completes="paths",
        shown="those of SRC",
        identity="division",
    )
    sizes: Accepts[Mapping[str, int] | Sizes | str | None, Sizes | None] = _option(
        None,
        "Parallel sizes of --to megatron --format torch.",
        "Target",
        kind=PARALLEL,
        metavar="tp=2,pp=4,ep=2",
        shown="1 each",
        identity="division",
    )
    overwrite: bool = _option(
        False,
        "Replace existing targets, including those of another conversion.",
        "Target",
        kind=FLAG,
    )
    checksum: str = _option(
        "none",
        "Record checksums in the manifest for `reshard verify DST`, and CRCs in archives of dcp.",
        "Checks",
        choices=("none", "crc32"),
    )
    is_file: bool = False


@dataclass(frozen=True, repr=False)
class Edits(Group):
    """The parameters that are converted, and their names, packing and types.

    Patterns have the wildcards of a shell. Where several texts are accepted, one text may stand alone.

    Attributes:
        include: patterns of the parameters to convert; none for all.
        exclude: patterns of the parameters to skip, also of those that ``include`` selects.
        allow_missing: patterns of parameters of the target strategy that the source may lack.
        names: a built-in table (``reshard names list``) or a TOML file that converts names and packing to those of
            another framework. ``"none"`` keeps them, those of fused experts, too.
        reverse: apply the table from right to left; by default the side that fits the source is the left.
        config: the model's ``config.json``, or its directory; by default that of the source. It has sizes for the
            table. The form ``"huggingface"`` gets a copy, and of a directory also the tokenizer's files.
        optimizer: ``"keep"`` applies the table to optimizer state, too; by default that is left out.
        rename: other names, ``"OLD=NEW"`` or ``{"OLD": "NEW"}``; a ``*`` in both renames all that match.
        dequantize: turn quantised weights (FP8, Int8 and Int4 with scales, MXFP4) into ``"BFloat16"``, ``"Float16"`` or
            ``"Float32"``; scales are left out.
        cast: a type for all floating-point weights, or ``"PATTERN=TYPE"`` or ``{"PATTERN": "TYPE"}``; the last match
            wins. Types are ``"Float32"``, ``"Float16"`` and ``"BFloat16"``, in short ``"fp32"``, ``"fp16"`` and
            ``"bf16"``.
        exactly: other names of single tensors, after the rules; None for skipped ones.
    """

    include: Accepts[str | Iterable[str], tuple[str, ...]] = _option(
        (),
        "Select only parameters that match GLOB (repeatable).",
        "Parameters",
        kind=TEXTS,
        metavar="GLOB",
        shown="all",
        identity=VALUE,
    )
    exclude: Accepts[str | Iterable[str], tuple[str, ...]] = _option(
        (),
        "Skip parameters that match GLOB (repeatable; overrides --include).",
        "Parameters",
        kind=TEXTS,
        metavar="GLOB",
        shown="none",
        identity=VALUE,
    )
    allow_missing: Accepts[str | Iterable[str], tuple[str, ...]] = _option(
        (),
        "Go on although the source lacks parameters that match GLOB and that the target strategy lists (repeatable).",
        "Parameters",
        kind=TEXTS,
        metavar="GLOB",
        shown="none",
    )
    names: Accepts[Path | None, str | None] = _option(
        None,
        "Convert names and packing to another framework's: a built-in table (`reshard names list`) or a TOML file. "
        "none: keep them, those of fused experts, too.",
        "Names and types",
        metavar="RULES",
        completes="tables",
        shown="unchanged",
        identity="edits",
    )
    reverse: bool = _option(
        False,
        "Apply the table from right to left; by default the side that fits SRC is the left.",
        "Names and types",
        kind=FLAG,
        identity="edits",
    )
    config: Accepts[Path | None, str | None] = _option(
        None,
        "config.json with the model's type, and sizes for the table, such as heads and experts; --to huggingface "
        "copies it, and of a DIR also the tokenizer's files.",
        "Names and types",
        metavar="FILE|DIR",
        completes="paths",
        shown="config.json in SRC",
        identity="edits division",
    )
    optimizer: str | None = _option(
        None,
        "keep: apply the table to optimizer state, too.",
        "Names and types",
        choices=("keep",),
        shown="left out",
        identity="edits",
    )
    rename: Accepts[str | Iterable[str] | Mapping[str, str], tuple[str, ...]] = _option(
        (),
        "Rename a parameter; a * in OLD and NEW renames all that match (repeatable).",
        "Names and types",
        kind=TEXTS,
        metavar="OLD=NEW",
        identity="edits",
    )
    dequantize: str | None = _option(
        None,
        "Turn quantised weights (FP8, Int8 and Int4 with scales, MXFP4) into BFloat16, Float16 or Float32; "
        "scales are left out.",
        "Names and types",
        metavar="DTYPE",
        completes="types",
        shown="unchanged",
        identity="edits",
    )
    cast: Accepts[str | Iterable[str] | Mapping[str, str], tuple[str, ...]] = _option(
        (),
        "Cast all floating-point weights, or tensors that match GLOB, to Float32, Float16 or BFloat16 (also fp32, "
        "fp16, bf16; repeatable; the last match wins).",
        "Names and types",
        kind=TEXTS,
        metavar="[GLOB=]DTYPE",
        completes="types",
        shown="unchanged",
        identity="edits",
    )
    exactly: tuple[tuple[str, str | None], ...] = ()


CHANGES = tuple(name for name, (option, _) in fields_of(Edits).items() if option.section == "Names and types")
"""The fields of names and types."""


def has_changes(edits: Edits) -> bool:
    """Whether names, packing or types are asked for."""
    return any(getattr(edits, name) for name in CHANGES)


@dataclass(frozen=True, repr=False)
class Effort(Group):
    """How much of the machine is used, and what is checked; no byte that is written depends on it.

    Attributes:
        jobs: number of CPUs to use; by default all available ones.
        max_memory: memory of all buffers together, in bytes, or ``"512M"`` or ``"2G"`` (binary); by default 8 MiB for
            each CPU, at least 64 MiB.
        io: how sources are read: ``"pread"``, which ``"auto"`` chooses, or ``"mmap"``, with which a file that is
            truncated meanwhile kills the process.
        crc: ``"auto"`` checks the CRCs of source files, and of tensors in archives, that are read whole; ``"never"``.
        check_replicas: compare replicas on the source ranks before writing: ``"auto"`` compares samples, ``"all"`` or
            ``"never"``.
    """

    jobs: int | None = _option(
        None,
        "Number of CPUs to use.",
        "Effort",
        "--jobs",
        "-j",
        kind=NUMBER,
        metavar="N",
        limits=(1, 1024),
        shown="all available",
    )
    max_memory: Accepts[int | str, int] = _option(
        MAX_MEMORY,
        "Memory for all buffers together (binary units: 512M, 2G).",
        "Effort",
        kind=MEMORY,
        metavar="SIZE",
        limits=_SIZES,
        shown="8M for each CPU, at least 64M",
    )
    io: str = _option(
        "auto",
        "How sources are read; auto is pread. With mmap, a file that is truncated meanwhile kills the run.",
        "Effort",
        choices=("auto", "mmap", "pread"),
    )
    crc: str = _option(
        "auto",
        "Check the CRCs of source files, and of tensors in archives, that are read whole.",
        "Checks",
        choices=("auto", "never"),
    )
    check_replicas: str = _option(
        "auto",
        "Compare replicas on the source ranks before writing: auto compares samples, and all that recover uses.",
        "Checks",
        choices=("auto", "all", "never"),
    )


def cpus_of(effort: Effort) -> int:
    """The CPUs to keep busy."""
    return effort.jobs or usable_cpus()


GROUPS: dict[str, type[Group]] = {"source": Source, "target": Target, "edits": Edits, "effort": Effort}


@dataclass(frozen=True, repr=False)
class Conversion(Group):
    """A conversion of a checkpoint to another layout, form, names or types; `reshard.Conversion` documents it."""

    source: Source
    target: Target
    edits: Edits = Edits()
    effort: Effort = Effort()
    files: Accepts[str | Iterable[SupportsIndex] | None, tuple[int, ...] | None] = _option(
        None,
        "Write only these target ranks; with --to, these files.",
        "Target",
        "--ranks",
        kind=RANKS,
        metavar="0-7,12",
        shown="all",
    )
    shard: Accepts[Iterable[SupportsIndex] | None, tuple[int, int] | None] = _option(
        None,
        "Write only share I of N, counted from 0; auto reads I/N from Slurm, MPI, Kubernetes, torchrun or MindSpore.",
        "Target",
        kind=SHARE,
        metavar="I/N|auto",
    )


def is_in_part(asked: Conversion) -> bool:
    """Whether only some of the files are written."""
    return asked.files is not None or asked.shard is not None


def groups_of(asked: Conversion) -> tuple[Group, ...]:
    """The four groups, and the conversion itself for the choice of files."""
    return (asked.source, asked.target, asked.edits, asked.effort, asked)


class Task(NamedTuple):
    """What a run does with a conversion.

    Attributes:
        recover: lost ranks are made from replicas, and intact files are copied.
        lost_only: when recovering, only lost and damaged ranks are written.
        by_rank: one of several runs that fill the same directory rank by rank.
        in_memory: nothing is written: the one target file is read.
        dry_run: plan and check everything, write nothing.
        verify: the caller verifies the result afterwards; it is recorded.
        merge: an adapter is added to the weights.
        by_function: it comes from a function, with parameters that no command line has.
    """

    recover: bool = False
    lost_only: bool = False
    by_rank: bool = False
    in_memory: bool = False
    dry_run: bool = False
    verify: bool = False
    merge: bool = False
    by_function: bool = False
