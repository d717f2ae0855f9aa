"""What makes two runs the same conversion, so that one may go on where the other stopped.

One part is the content of the strategies, step, filters, format and prefix. The other is the source files
(`sources`): a run may read only some of them, so each file is recorded by itself, and
runs agree if the files that both have read are the same. Ranks, jobs and I/O options do not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, Optional, Union, get_type_hints

from reshard.checkpoints import Literal, OutputLayout
from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import MAX_DEVICES
from reshard.forms import FORM_CLASSES
from reshard.forms.ranks.naming import FileNames
from reshard.layout import Layout
from reshard.storage.json_text import Fields, JsonError
from reshard.strategies import Strategy
from reshard.text.messages import quoted

_DIGEST_LENGTH = 16
# Readers of a record's members, by the attribute's type.
_READERS: dict[object, Callable[[Fields, str], Any]] = {
    str: Fields.text,
    Optional[str]: Fields.optional_text,
    tuple[str, ...]: Fields.texts,
    bool: Fields.flag,
    Optional[int]: lambda fields, key: None if fields.is_null(key) else fields.integer(key, 1, 1 << 63),
    FileNames: lambda fields, key: FileNames.from_fields(fields.fields(key)),
    tuple[int, ...]: lambda fields, key: fields.integers(key, 0, MAX_DEVICES),
    int: lambda fields, key: fields.integer(key, 1, MAX_DEVICES + 1),
}


class Identity(NamedTuple):
    """The part of a conversion's identity that does not depend on source files.

    Attributes:
        source_strategy: digest of the source strategy's content.
        target_strategy: likewise of the target's; ``same`` if it is the source's under other names.
        ranks: number of target ranks of the whole conversion.
        step: the converted step; None if file names contain none.
        include: patterns of written parameters.
        exclude: patterns of skipped parameters.
        format: of the target files.
        names: of the target files.
        task: ``convert`` or ``recover``.
        form: the target form.
        division: digest of the division of tensors into files, if the strategy does not determine it.
        edits: digest of requested names and types; empty if unchanged.
        without_ranks: source ranks that counted as lost, ascending: they decide which replicas are read.
    """

    source_strategy: str
    target_strategy: str
    ranks: int
    step: Optional[str]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    format: str
    names: FileNames
    task: str = "convert"
    form: str = "ranks"
    division: str = ""
    edits: str = ""
    without_ranks: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """A short digest of all attributes."""
        return short_digest(self.to_json().encode())

    def file_of(self, rank: int) -> str:
        """The file of a target rank, relative to the target directory."""
        return f"{self.names.of(rank)}.{self.format}"

    def to_fields(self) -> dict[str, object]:
        """The JSON record, which `from_fields` reads."""
        return {**self._asdict(), "names": self.names.to_fields()}

    def to_json(self) -> str:
        """As text, the same for equal identities."""
        return json.dumps(self.to_fields(), sort_keys=True)

    @classmethod
    def from_fields(cls, fields: Fields) -> Identity:
        """An identity from members with its attributes' names.

        Raises:
            JsonError: a member is missing, unknown or invalid.
        """
        identity = cls(**attributes_of(cls, fields))
        if identity.format not in ALL_FORMATS:
            raise JsonError(f"{quoted(identity.format)} is not a format")
        if identity.form not in FORM_CLASSES:
            raise JsonError(f"{quoted(identity.form)} is not a form")
        return identity


def attributes_of(record: type[NamedTuple], fields: Fields) -> dict[str, Any]:
    """The values of a record's attributes, read by their types; those that are missing have defaults.

    Raises:
        JsonError: a member is missing, unknown or invalid.
    """
    unknown = [key for key in fields if key not in record._fields]
    if unknown:
        raise JsonError(f"{quoted(unknown[0])} is unknown")
    return {
        name: _READERS[kind](fields, name)
        for name, kind in get_type_hints(record).items()
        if name in fields or name not in record._field_defaults
    }


def strategy_digest(strategy: Strategy) -> str:
    """A digest of a strategy's content as read, independent of its files."""
    strategy = strategy.original or strategy
    texts: dict[Layout, bytes] = {}
    hashed = hashlib.sha256()
    for stage in strategy.stages:
        hashed.update(f"{stage.number} {stage.first_rank} {stage.device_count}\n".encode())
        for name in sorted(stage.layouts):
            layout = stage.layouts[name]
            text = texts.get(layout)
            if text is None:
                text = texts[layout] = repr(dataclasses.astuple(layout)).encode()
            hashed.update(name.encode(errors="surrogateescape") + b"\0" + text + b"\n")
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def header_digest(layout: OutputLayout) -> Optional[str]:
    """A digest of all bytes of a file except tensor contents, in file order; None without any."""
    literals = (segment.data for segment in layout.segments() if isinstance(segment, Literal))
    first = next(literals, None)
    return None if first is None else digest_of(itertools.chain([first], literals))


def short_digest(*parts: bytes) -> str:
    """A short digest of bytes in parts; their division does not matter."""
    return digest_of(parts)


def digest_of(parts: Iterable[Union[bytes, memoryview]]) -> str:
    """Likewise, of parts from an iterator."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:_DIGEST_LENGTH]
