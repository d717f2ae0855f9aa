"""What makes two runs the same conversion, so that one may go on where the other stopped.

Strategies' content, step, filters, format and prefix are one part of it. The source files are the
other (`sources`): a run may have only some of them at hand, so each file is remembered by itself, and
runs agree where they have read the same ones. Ranks, jobs and ways of reading are no part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

from reshard.checkpoints import Literal, OutputLayout
from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import MOST_DEVICES
from reshard.forms.ranks import FileNames
from reshard.forms.registry import FORMS
from reshard.layout import Layout
from reshard.storage.json_text import Fields, JsonError, parse_json
from reshard.strategies import Strategy
from reshard.text.wording import quoted

_DIGEST_LENGTH = 16
# How members of a record are taken, by the attribute's annotation.
_TAKEN_AS: dict[str, Callable[[Fields, str], Any]] = {
    "str": Fields.text,
    "Optional[str]": Fields.optional_text,
    "tuple[str, ...]": Fields.texts,
    "FileNames": lambda fields, key: FileNames.from_fields(fields.fields(key)),
    "int": lambda fields, key: fields.integer(key, 1, MOST_DEVICES + 1),
}


@dataclass(frozen=True)
class Identity:
    """The part of a conversion's identity that every run knows.

    Attributes:
        source_strategy: digest of the source strategy's content.
        target_strategy: likewise of the target's; ``same`` where it is made of the source's under other names.
        ranks: target ranks of the whole conversion.
        step: the step that is converted; None where file names tell none.
        include: what is written, by name.
        exclude: what is not.
        format: of the target files.
        names: of the target files.
        task: ``convert`` or ``recover``.
        form: that is written.
        division: digest of which tensors are in which file, where the strategy does not tell.
        edits: digest of what was asked of names and types; empty where they stay.
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

    @property
    def digest(self) -> str:
        """The whole of it in a few characters."""
        return short_digest(self.to_json().encode())

    def file_of(self, rank: int) -> str:
        """The file of a target rank, relative to the target directory."""
        return f"{self.names.of(rank)}.{self.format}"

    def to_json(self) -> str:
        """As text, the same for equal identities."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> Identity:
        """What `to_json` made.

        Raises:
            JsonError: the text is something else.
        """
        return cls.from_fields(Fields(parse_json(text), "the record"))

    @classmethod
    def from_fields(cls, fields: Fields) -> Identity:
        """An identity of members that are named as its attributes.

        Raises:
            JsonError: they are not what an identity has.
        """
        attributes = {attribute.name: attribute for attribute in dataclasses.fields(cls)}
        unknown = [key for key in fields if key not in attributes]
        if unknown:
            raise JsonError(f"{quoted(unknown[0])} is not known")
        found: dict[str, Any] = {}
        for name, attribute in attributes.items():
            if name in fields or attribute.default is dataclasses.MISSING:
                found[name] = _TAKEN_AS[str(attribute.type)](fields, name)
        made = cls(**found)
        if made.format not in ALL_FORMATS:
            raise JsonError(f"{quoted(made.format)} is no format")
        if all(form.name != made.form for form in FORMS):
            raise JsonError(f"{quoted(made.form)} is no form")
        return made


def strategy_digest(strategy: Strategy) -> str:
    """A digest of what a strategy says, whatever files it was read from."""
    known: dict[Layout, bytes] = {}
    hashed = hashlib.sha256()
    for stage in strategy.stages:
        hashed.update(f"{stage.number} {stage.first_rank} {stage.device_count}\n".encode())
        for name in sorted(stage.layouts):
            layout = stage.layouts[name]
            said = known.get(layout)
            if said is None:
                said = known[layout] = repr(dataclasses.astuple(layout)).encode()
            hashed.update(name.encode(errors="surrogateescape") + b"\0" + said + b"\n")
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def header_digest(layout: OutputLayout) -> Optional[str]:
    """A digest of all bytes of a file that are not tensor contents, in file order; None without any."""
    literals = (segment.data for segment in layout.segments() if isinstance(segment, Literal))
    first = next(literals, None)
    return None if first is None else digest_of(itertools.chain([first], literals))


def short_digest(*parts: bytes) -> str:
    """A digest in a few characters, of bytes in parts; how they are divided does not matter."""
    return digest_of(parts)


def digest_of(parts: Iterable[Union[bytes, memoryview]]) -> str:
    """Likewise, of parts that are made one by one."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:_DIGEST_LENGTH]
