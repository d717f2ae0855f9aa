"""A reader of the results of `reshard fingerprint --json`, to merge them.

Results of large checkpoints have hundreds of MB, and are untrusted input: they are parsed slice by slice, into a few
bytes each.
"""

from __future__ import annotations

from reshard.defaults import MAX_DEVICES
from reshard.errors import InputError
from reshard.storage import ReadableFile, UnfitError, opened_regular, reading_error, windows_in
from reshard.storage.json_text import Fields, JsonError, JsonStream, integers
from reshard.text.wording import quoted
from reshard.verification.boxes import Box
from reshard.verification.fingerprint import SEVERAL, Fingerprints, ParameterSums, SharedPlaces, ValueSum
from reshard.verification.sums import PRIME, VERSION

_LARGEST = 1 << 30
_MOST_TENSORS = 1 << 20
_MOST_SLICES = 1 << 22
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62
_LONGEST_ITEM = 1 << 16


def read_fingerprints(path: str) -> Fingerprints:
    """Read a saved result.

    Raises:
        InputError: the file is not a result, or of another version.
        RetryableError: reading failed.
    """
    try:
        with opened_regular(path) as file:
            size = file.size()
            if size > _LARGEST:
                raise UnfitError(f"has {size:,} bytes; the limit is {_LARGEST:,}")
            return _SavedResult(file).result
    except OSError as error:
        raise reading_error(path, error) from error
    except UnfitError as error:
        raise InputError(
            f"{path}: is not a result of `reshard fingerprint --json` of this version ({VERSION}): {error}",
            file=path,
            hint="pass a file with the output of that command alone",
        ) from error


class _SavedResult:
    """The parser of one file.

    Attributes:
        result: its content.
    """

    def __init__(self, file: ReadableFile) -> None:
        self.result = Fingerprints()
        self._slices = 0
        self._shared = SharedPlaces()
        self._stream = stream = JsonStream(windows_in(file), _LONGEST_ITEM)
        parts = {"parameters": self._parameter, "values": self._value}
        missing = {"version", "files", *parts}
        for key in stream.members():
            missing.discard(key)
            if key in parts:
                for _ in stream.elements():
                    parts[key]()
                    if len(self.result.parameters) + len(self.result.values) > _MOST_TENSORS:
                        raise JsonError(f"it holds more than {_MOST_TENSORS} tensors")
            elif key == "files":
                self._files()
            elif stream.value() != VERSION and key == "version":
                raise JsonError("it is of another version")
        stream.end()
        if missing:
            raise JsonError(f"{min(missing)} is missing")

    def _files(self) -> None:
        for key in self._stream.members():
            for _ in self._stream.elements():
                if key == "read":
                    fields = Fields(self._stream.value(), "files: read")
                    self.result.read[fields.integer("file", 0, MAX_DEVICES)] = fields.text("names")
                    continue
                ends = integers(self._stream.value(), f"files: {key}", 0, MAX_DEVICES + 1)
                if len(ends) != 2:
                    raise JsonError(f"files: {key} are not pairs of numbers")
                self.result.groups.add((ends[0], ends[1]))
        if not self.result.groups:
            raise JsonError("files: groups is missing")
        if sum(stop - start for start, stop in self.result.groups) > MAX_DEVICES:
            raise JsonError(f"there are more than {MAX_DEVICES} files")

    def _parameter(self) -> None:
        members: dict[str, object] = {}
        parts: list[tuple[tuple[int, Box], int]] = []
        for key in self._stream.members():
            if key == "slices":
                parts = [self._slice() for _ in self._stream.elements()]
            else:
                members[key] = self._stream.value()
        fields = Fields(members, "parameters")
        name, shape = fields.text("name"), fields.integers("shape", 0, _MOST_ELEMENTS)
        for (_, box), _ in parts:
            if len(box) != len(shape) or not all(stop <= size for (_, stop), size in zip(box, shape)):
                raise JsonError(f"{quoted(name)}: a slice is not one of its shape")
        if name in self.result.parameters or len({place for place, _ in parts}) < len(parts):
            raise JsonError(f"it lists {quoted(name)}, or a slice of it, twice")
        slices = self._shared.sums((place for place, _ in parts), (total for _, total in parts))
        self.result.parameters[name] = parameter = ParameterSums(name, fields.text("dtype"), shape, slices)
        parameter.check_cuts()

    def _slice(self) -> tuple[tuple[int, Box], int]:
        self._slices += 1
        if self._slices > _MOST_SLICES:
            raise JsonError(f"it holds more than {_MOST_SLICES} slices")
        fields = Fields(self._stream.value(), "slices")
        box: list[tuple[int, int]] = []
        for interval in fields.entries("box"):
            ends = integers(interval, "slices: box", 0, _MOST_ELEMENTS)
            if len(ends) != 2 or ends[0] > ends[1] or len(box) == _MOST_DIMENSIONS:
                raise JsonError("slices: box is not a box")
            box.append((ends[0], ends[1]))
        stage = SEVERAL if fields.is_null("stage") else fields.integer("stage", 0, MAX_DEVICES)
        return (stage, tuple(box)), _sum(fields)

    def _value(self) -> None:
        members: dict[str, object] = {}
        copies: dict[int, ValueSum] = {}
        for key in self._stream.members():
            if key != "copies":
                members[key] = self._stream.value()
                continue
            for _ in self._stream.elements():
                fields = Fields(self._stream.value(), "copies")
                rank = fields.integer("rank", 0, MAX_DEVICES)
                shape = fields.integers("shape", 0, _MOST_ELEMENTS)
                copies[rank] = ValueSum(fields.text("dtype"), shape, _sum(fields))
        name = Fields(members, "values").text("name")
        if name in self.result.values:
            raise JsonError(f"it lists {quoted(name)} twice")
        if copies:
            self.result.values[name] = copies


def _sum(fields: Fields) -> int:
    try:
        total = int(fields.text("sum"), 16)
    except ValueError:
        total = -1
    if not 0 <= total < PRIME:
        raise JsonError("a sum is invalid")
    return total
