"""Pickles as data: Python's unpickler, for which every class and function is an inert class that is made here.

Calling an inert class keeps the arguments, and setting a state keeps the state. Names that are not listed are refused,
and nothing is imported. So a pickle can only make numbers, text, bytes, lists, dictionaries, sets, tuples, inert
classes and their instances.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from reshard.errors import ReshardError
from reshard.text.messages import quoted

MAX_PICKLE = 1 << 30
"""Bytes of one pickle. Metadata takes some 140 for each chunk of a tensor, and its objects eight times as many."""

MAX_SIZES = 64
"""Dimensions of a tensor, or of a mesh of ranks."""

NAMESPACE = "argparse.Namespace"

_MAX_NAME, _MAX_BITS, _MAX_DEPTH = 256, 1024, 100
# Pairs of a dictionary that are set at once, as Python does it.
_BATCH = 1000


class PickleError(ValueError):
    """A pickle that is damaged, or has unreadable contents; its text is the end of a sentence about the file."""


class Global(type):
    """An inert class: a class, a function or a constant of Python, by name only.

    Attributes:
        name: module and name, joined by a dot.
    """

    name: str


class PickledInstance(metaclass=Global):
    """The result of a call of a `Global`, which is never made.

    Attributes:
        name: the class or function, as `Global.name`; ``""`` for a persistent id, which is the only argument.
        args: positional arguments.
        state: the pickled state; None without one.
    """

    __slots__ = ("args", "state")

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> PickledInstance:
        """Keep the arguments of a call."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep a pickled state; without this method, a pickle could set attributes of the class itself."""
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """Its state by name; empty where the state is something else."""
        return named(self.state)


def named(state: Any) -> dict[str, Any]:
    """A pickled state by name; that of a class with slots is a pair."""
    if isinstance(state, tuple) and len(state) == 2:
        return {key: each for part in state if isinstance(part, dict) for key, each in part.items()}
    return state if isinstance(state, dict) else {}


@functools.lru_cache(maxsize=1024)
def inert_class(name: str) -> type[PickledInstance]:

    class Inert(PickledInstance):
        __slots__ = ()

    Inert.name = name
    return Inert


def inert(name: str, *args: Any, state: Any = None) -> PickledInstance:
    instance = inert_class(name)(*args)
    instance.state = state
    return instance


class _OrderedDict(dict[Any, Any]):
    """An ordered dictionary, which may have attributes, such as the versions of modules: they are no items."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _DefaultDict(dict[Any, Any]):
    """A dictionary with a factory of missing values, which stays unused."""

    __slots__ = ()

    def __init__(self, factory: Any = None) -> None:
        super().__init__()


class _Bytes:
    """Bytes, which protocol 2 pickles as a call with text."""

    __slots__ = ()

    def __call__(self, text: str = "", encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise ValueError(f"bytes in {encoding}")
        return text.encode("latin1")


_PLAIN: dict[str, Any] = {
    "_codecs.encode": _Bytes(),
    "__builtin__.bytes": _Bytes(),
    "collections.OrderedDict": _OrderedDict,
    "collections.defaultdict": _DefaultDict,
    "torch.Size": tuple,
}
"""What stands for plain values. No state can be set of any of these themselves."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Callable[[str], bool], persistent: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if not self._allowed(full):
            raise PickleError(f"names {full[:_MAX_NAME]!r}, which is not read: nothing of the file is run")
        return _PLAIN.get(full) or inert_class(full)

    def persistent_load(self, identity: Any) -> PickledInstance:
        if not self._persistent:
            raise PickleError("is a pickle with persistent ids, which have no meaning here")
        return PickledInstance(identity)


def read_pickle(data: bytes, allowed: Callable[[str], bool], persistent: bool = False) -> Any:
    """The object that a pickle describes: plain values, `Global` and `PickledInstance`.

    ``torch.Size`` is a tuple, an ordered dictionary is a dictionary. Without persistent ids, lists and dictionaries
    may hold themselves.

    Args:
        data: the pickle.
        allowed: whether a class or function of this name, such as ``torch.Size``, may be named.
        persistent: persistent ids may occur, as they do for the storages of tensors.

    Raises:
        PickleError: it is damaged, or holds something else.
    """
    # A million objects are made, and all of them stay: looking for unreachable ones takes half of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = _Unpickler(data, allowed, persistent).load()
        if persistent:
            # Metadata, which has a million values, is read by its structure: what else it holds is not followed.
            _check_values(value, len(data))
        return value
    except (PickleError, ReshardError):
        raise
    except Exception as error:
        raise PickleError(f"is a damaged pickle: {quoted(str(error) or type(error).__name__)}") from error
    finally:
        if collecting:
            gc.enable()


def _check_values(value: Any, most: int) -> None:
    """Refuse values that hold themselves or are nested deeply, large numbers, and more than ``most`` of one depth."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH):
        level = [each for each in gc.get_referents(*level) if not isinstance(each, (type, str))]
        if len(level) > most or any(type(each) is int and each.bit_length() > _MAX_BITS for each in level):
            break
        if not level:
            return
    raise PickleError(f"nests values more than {_MAX_DEPTH} deep, or has a number of more than {_MAX_BITS} bits")


def among(names: Collection[str]) -> Callable[[str], bool]:
    """Whether a name is one of these, or stands for plain values; for `read_pickle`."""
    return frozenset({*names, *_PLAIN}).__contains__


def sizes_of(numbers: Any) -> tuple[int, ...] | None:
    """Numbers of elements or bytes, as in a shape; None for anything else."""
    if not isinstance(numbers, (tuple, list)) or len(numbers) > MAX_SIZES:
        return None
    return tuple(numbers) if all(type(each) is int and 0 <= each < 1 << 62 for each in numbers) else None


class NotPlain(ValueError):
    """A value that is more than numbers, text, lists and dictionaries."""


def plain(value: Any, depth: int = 64) -> Any:
    """A value as JSON has it, for people: tuples are lists, bytes hexadecimal, types their names.

    Lists that are nested deeper than ``depth``, among them lists that hold themselves, are `NotPlain`.
    """
    if depth < 0:
        raise NotPlain("it is nested too deeply to be shown")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, Global):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(each, depth - 1) for each in value]
    if isinstance(value, PickledInstance) and value.name == NAMESPACE:
        value = value.fields
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise NotPlain("its keys are more than text and numbers")
        return {str(key): plain(each, depth - 1) for key, each in value.items()}
    raise NotPlain(f"it holds {getattr(value, 'name', '') or 'a value that is not plain'}")


class Repeated(NamedTuple):
    """A value that is pickled many times, with the same bytes from the second time on."""

    value: Any


def pickled(value: Any, protocol: int = 2) -> bytes:
    """A pickle of a possible result of `read_pickle`, in which any value may be `Repeated`.

    An instance with a state is pickled with ``__new__`` of its class, others with a call. An iterator of pairs is
    pickled as a dictionary, whose pairs need not be in memory together.

    Args:
        value: the object.
        protocol: 2, which torch reads in archives, or 4. Its references have no numbers: one with a flipped bit
            makes Python's unpickler ask for gigabytes.
    """
    emitter = _Emitter(protocol)
    emitter.put(value)
    emitter.out += b"."
    return bytes(emitter.out)


class _Emitter:
    def __init__(self, protocol: int) -> None:
        self.out = bytearray([0x80, protocol])
        self._numbered = protocol < 4
        self._places: dict[str | Global, int] = {}
        self._repeated: dict[Repeated, bytes] = {}

    def put(self, value: Any) -> None:
        out = self.out
        if value is None or value is True or value is False:
            out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, (str, Global)):
            self._put_once(value)
        elif isinstance(value, int):
            out += _integer(value)
        elif isinstance(value, Repeated):
            if value in self._repeated:
                out += self._repeated[value]
                return
            start, places = len(out), len(self._places)
            self.put(value.value)
            if len(self._places) == places:
                self._repeated[value] = bytes(out[start:])
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, bytes):
            self.put(inert("_codecs.encode", value.decode("latin1"), "latin1"))
        elif isinstance(value, tuple):
            self._put_all(b"(", value, b"t")
        elif isinstance(value, list):
            self._put_all(b"](", value, b"e")
        elif isinstance(value, (dict, Iterator)):
            out += b"}"
            pairs = iter(value.items()) if isinstance(value, dict) else value
            while batch := list(itertools.islice(pairs, _BATCH)):
                self._put_all(b"(", itertools.chain.from_iterable(batch), b"u")
        elif isinstance(value, PickledInstance) and not value.name:
            self._put_all(b"", value.args, b"Q")
        elif isinstance(value, PickledInstance):
            self.put(type(value))
            self.put(value.args)
            out += b"R" if value.state is None else b"\x81"
            if value.state is not None:
                self._put_all(b"", [value.state], b"b")
        else:
            raise TypeError(f"{type(value).__name__} is not pickled")

    def _put_all(self, before: bytes, values: Iterable[Any], after: bytes) -> None:
        self.out += before
        for each in values:
            self.put(each)
        self.out += after

    def _put_once(self, value: str | Global) -> None:
        place = self._places.get(value)
        if place is not None:
            self.out += b"j" + struct.pack("<I", place)
            return
        place = self._places[value] = len(self._places)
        if isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(text)) + text
        else:
            module, _, name = value.name.rpartition(".")
            self.out += f"c{module}\n{name}\n".encode()
        self.out += b"r" + struct.pack("<I", place) if self._numbered else b"\x94"


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
