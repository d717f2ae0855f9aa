"""A reader of the results of `reshard fingerprint --json`, to merge them."""

from __future__ import annotations

from reshard.defaults import MAX_DEVICES
from reshard.errors import InputError
from reshard.storage import UnfitError, read_small, reading_error
from reshard.storage.json_text import Fields, JsonError, integers, parse_json
from reshard.text.wording import quoted
from reshard.verification.boxes import Box
from reshard.verification.fingerprint import SEVERAL, Fingerprints, ParameterSums, SharedPlaces, ValueSum
from reshard.verification.sums import PRIME, VERSION

_LARGEST = 1 << 30
_MOST_ELEMENTS = 1 << 62


def read_fingerprints(path: str) -> Fingerprints:
    """Read a saved result.

    Raises:
        InputError: the file is not a result, or of another version.
        RetryableError: reading failed.
    """
    try:
        return _SavedResult(Fields(parse_json(read_small(path, _LARGEST)), "the file")).result
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

    def __init__(self, content: Fields) -> None:
        if content.text("version") != VERSION:
            raise JsonError("it is of another version")
        self.result = Fingerprints()
        self._shared = SharedPlaces()
        self._files(content.fields("files"))
        for parameter in content.entries("parameters"):
            self._parameter(Fields(parameter, "parameters"))
        for value in content.entries("values"):
            self._value(Fields(value, "values"))

    def _files(self, content: Fields) -> None:
        for entry in content.entries("read") if "read" in content else ():
            fields = Fields(entry, "files: read")
            self.result.read[fields.integer("file", 0, MAX_DEVICES)] = fields.text("names")
        for entry in content.entries("groups"):
            self.result.groups.add(_interval(entry, "files: groups", MAX_DEVICES + 1))
        if not self.result.groups:
            raise JsonError("files: groups is empty")
        if sum(stop - start for start, stop in self.result.groups) > MAX_DEVICES:
            raise JsonError(f"there are more than {MAX_DEVICES} files")

    def _parameter(self, fields: Fields) -> None:
        name, shape = fields.text("name"), fields.integers("shape", 0, _MOST_ELEMENTS)
        parts = [_slice(Fields(entry, "slices")) for entry in fields.entries("slices")]
        for (_, box), _ in parts:
            if len(box) != len(shape) or not all(stop <= size for (_, stop), size in zip(box, shape)):
                raise JsonError(f"{quoted(name)}: a slice is not one of its shape")
        if name in self.result.parameters or len({place for place, _ in parts}) < len(parts):
            raise JsonError(f"it lists {quoted(name)}, or a slice of it, twice")
        slices = self._shared.sums((place for place, _ in parts), (total for _, total in parts))
        self.result.parameters[name] = parameter = ParameterSums(name, fields.text("dtype"), shape, slices)
        parameter.check_cuts()

    def _value(self, content: Fields) -> None:
        name = content.text("name")
        if name in self.result.values:
            raise JsonError(f"it lists {quoted(name)} twice")
        copies: dict[int, ValueSum] = {}
        for entry in content.entries("copies"):
            fields = Fields(entry, "copies")
            shape = fields.integers("shape", 0, _MOST_ELEMENTS)
            copies[fields.integer("rank", 0, MAX_DEVICES)] = ValueSum(fields.text("dtype"), shape, _sum(fields))
        if copies:
            self.result.values[name] = copies


def _slice(fields: Fields) -> tuple[tuple[int, Box], int]:
    box = tuple(_interval(entry, "slices: box", _MOST_ELEMENTS) for entry in fields.entries("box"))
    stage = SEVERAL if fields.is_null("stage") else fields.integer("stage", 0, MAX_DEVICES)
    return (stage, box), _sum(fields)


def _interval(entry: object, label: str, end: int) -> tuple[int, int]:
    start_stop = integers(entry, label, 0, end)
    if len(start_stop) != 2 or start_stop[0] > start_stop[1]:
        raise JsonError(f"{label} holds something that is no interval")
    return start_stop[0], start_stop[1]


def _sum(fields: Fields) -> int:
    try:
        total = int(fields.text("sum"), 16)
    except ValueError:
        total = -1
    if not 0 <= total < PRIME:
        raise JsonError("a sum is invalid")
    return total
