"""The manifest of a complete target directory: its conversion, and every file's size.

It contains no times, and its list of files does not depend on the runs that wrote them, or on their order.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import NamedTuple

from reshard.defaults import MAX_DEVICES
from reshard.errors import CheckpointError
from reshard.forms.ranks.naming import check_inside
from reshard.records.ledger import DoneRecord, ledger_in
from reshard.records.record import VERSION, Record, old_hint, read_record
from reshard.storage import exists, read_json, reading, remove_file, write_whole, writing
from reshard.storage.json_text import Fields, JsonError
from reshard.text.messages import quoted
from reshard.text.names import similar_path_hint

MANIFEST_NAME = "reshard-manifest.json"

# Some hundred bytes per rank.
_MAX_BYTES = 64 << 20
_HINT = "remove it and run the conversion's command again, which rewrites it"


class FinishingRecord(NamedTuple):
    """A small file that completes a directory of its form, such as an index.

    Attributes:
        file: name, relative to the manifest's directory.
        size: bytes.
        crc32: CRC-32 of the whole file as 8 hexadecimal digits.
    """

    file: str
    size: int
    crc32: str


class Manifest(NamedTuple):
    """A complete conversion.

    Attributes:
        record: what was asked, and found out.
        files: every target file, by rank, or by number where its form has no ranks.
        finishing: files that complete the directory, in the order of writing; empty for rank directories.
        beside: names of copied files of the model, such as ``config.json``; users may edit them.
    """

    record: Record
    files: tuple[DoneRecord, ...]
    finishing: tuple[FinishingRecord, ...] = ()
    beside: tuple[str, ...] = ()

    def write(self, directory: str) -> str:
        """Write it into its directory atomically; returns its path.

        Raises:
            ReshardError: it cannot be written.
        """
        path = os.path.join(directory, MANIFEST_NAME)
        content = {
            "version": VERSION,
            "conversion": self.record.to_json(),
            "files": [file.entry for file in self.files],
            "finishing": [file._asdict() for file in self.finishing],
            "beside": list(self.beside),
        }
        with writing(path):
            write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
        return path

    @staticmethod
    def remove(directory: str) -> None:
        """Remove the manifest of a directory that is no longer complete."""
        remove_file(os.path.join(directory, MANIFEST_NAME))


def read_manifest(directory: str) -> Manifest:
    """The manifest of a directory.

    Raises:
        CheckpointError: it is missing or damaged, or of another version.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    content = read_json(path, _MAX_BYTES, hint=_HINT, file_names=True)
    if content is None:
        raise _missing(directory, path)
    with reading(path, hint=f"{_HINT}; {old_hint(directory)}"):
        fields = Fields(content, "the manifest")
        record = read_record(fields)
        files = tuple(_file(Fields(entry, "files")) for entry in fields.entries("files"))
        finishing = fields.entries("finishing") if "finishing" in fields else ()
        finished = tuple(_finishing(Fields(entry, "finishing")) for entry in finishing)
        beside = fields.texts("beside") if "beside" in fields else ()
        for name in beside:
            check_inside(name)
        return Manifest(record, files, finished, beside)


def _missing(directory: str, path: str) -> CheckpointError:
    ledger = ledger_in(directory)
    if not exists(directory):
        hint = similar_path_hint(directory) or "name the DST of a conversion"
        return CheckpointError(f"{directory}: does not exist", file=directory, hint=hint)
    if ledger is None:
        name = shlex.quote(directory)
        return CheckpointError(
            f"{directory}: is no directory that reshard wrote: it has no {MANIFEST_NAME}",
            file=directory,
            hint=f"name its source: reshard verify {name} --src SRC; or look at it: reshard inspect {name}",
        )
    hint = "it is written when all target files are converted; run the same command again to continue"
    if ledger.record.is_repeatable:
        hint = f"it is written last; to complete the conversion: reshard resume {shlex.quote(directory)}"
        if ledger.record.asked.files is not None:
            hint += "; for ranks that were not requested, run the whole command without --ranks"
    if ledger.record.lost:
        hint = (
            "recover --lost-only writes none; copy the lost ranks back to the others, and verify all together with "
            "--replicas --strategy S"
        )
    return CheckpointError(f"{path}: does not exist", file=path, hint=hint)


def _file(entry: Fields) -> DoneRecord:
    name = entry.text("file")
    check_inside(name)
    headers, crc = entry.optional_text("headers"), entry.optional_text("crc32")
    for digest in (headers, crc):
        if digest is not None and not re.fullmatch("[0-9a-f]{1,64}", digest):
            raise JsonError(f"{quoted(digest)} is not a digest")
    return DoneRecord(entry.integer("rank", 0, MAX_DEVICES), name, entry.integer("size", 0, 1 << 63), headers, crc)


def _finishing(entry: Fields) -> FinishingRecord:
    name, crc = entry.text("file"), entry.text("crc32")
    check_inside(name)
    if not re.fullmatch("[0-9a-f]{8}", crc):
        raise JsonError(f"{quoted(crc)} is not a CRC-32")
    return FinishingRecord(name, entry.integer("size", 0, 1 << 63), crc)
