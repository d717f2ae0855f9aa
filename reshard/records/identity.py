"""What makes two runs the same conversion, so that one may go on where the other stopped.

Strategies' content, step, filters, format and prefix are one part of it. The source files are the
other (`sources`): a run may have only some of them at hand, so each file is remembered by itself, and
runs agree where they have read the same ones. Ranks, jobs and ways of reading are no part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Optional

from reshard.checkpoints import FileNames, Literal, OutputLayout
from reshard.layout import Layout
from reshard.strategies import Strategy

_DIGEST_LENGTH = 16


@dataclass(frozen=True)
class Identity:
    """The part of a conversion's identity that every run knows.

    Attributes:
        source_strategy: digest of the source strategy's content.
        target_strategy: likewise of the target's.
        ranks: target ranks of the whole conversion.
        step: the step that is converted; None where file names tell none.
        include: what is written, by name.
        exclude: what is not.
        format: of the target files.
        names: of the target files.
        task: ``convert`` or ``recover``.
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
    def from_json(cls, text: str) -> Identity:
        """What `to_json` made.

        Raises:
            ValueError: the text is something else.
        """
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("no identity")
        try:
            names = FileNames.from_json(found["names"])
            patterns = {field: tuple(found[field]) for field in ("include", "exclude")}
            return cls(**{**found, **patterns, "names": names})
        except (KeyError, TypeError) as error:
            raise ValueError("no identity") from error

    def differences(self, other: Identity) -> list[str]:
        """How this conversion differs from another, for people."""
        names = {
            "source_strategy": "the source strategy",
            "target_strategy": "the target strategy",
            "step": "the step",
            "include": "--include",
            "exclude": "--exclude",
            "format": "the format",
            "names": "the names of the files",
            "task": "what is done",
        }
        found = []
        for field, name in names.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                said = "" if field.endswith("_strategy") else f" ({_said(theirs)} there, {_said(mine)} here)"
                found.append(name + said)
        return found


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
    literals = [segment.data for segment in layout.segments() if isinstance(segment, Literal)]
    return short_digest(*literals) if literals else None


def short_digest(*parts: bytes) -> str:
    """A digest in a few characters, of bytes in parts; how they are divided does not matter."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def _said(value: object) -> str:
    if isinstance(value, FileNames):
        return value.template
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
