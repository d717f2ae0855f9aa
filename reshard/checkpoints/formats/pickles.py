"""Pickles as data: a small machine of its own that reads them, imports nothing and calls nothing.

It knows the opcodes that Python's picklers emit for protocols 2 to 5. A class or function is a `Global`, an
allowed name and no more; what calls it becomes a `PickledInstance`, which holds the arguments and the state. So a
pickle can only make numbers, text, lists, dictionaries, tuples and these two. Time and memory are at most a multiple of
the bytes that were given; nothing recurses.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Iterator
from typing import Any, Callable, Optional, Union

from reshard.named_tuple import NamedTuple

MAX_OPERATIONS = 1 << 26
"""Operations of one pickle. Metadata takes some 30 for each chunk of a tensor."""

MEMORY_PER_BYTE = 24
"""Bytes of objects for each byte of a pickle; metadata of torch takes 14. Numbers and references come on top."""

MAX_SIZES = 64
"""Dimensions of a tensor, or of a mesh of ranks."""

# For pickles that are small anyway.
_MIN_MEMORY = 4 << 20
# Approximate memory of objects; of a dictionary, that of a few pairs.
_LIST_BYTES, _DICT_BYTES, _PAIR_BYTES, _TUPLE_BYTES, _TEXT_BYTES, _INSTANCE_BYTES = 88, 150, 32, 64, 56, 88
# Of an item of a list, or a character, that is copied.
_COPY_BYTES = 8
# A batch of a dictionary is 1,000 pairs, in each of the dictionaries and lists around it.
_MAX_STACK = 1 << 20
_MAX_MARKS = 1 << 10
_MAX_INTEGER_BYTES = 64
_MAX_NAME = 256
# A key of a dictionary is hashed by Python, in C and as deep as tuples are nested: a tuple that holds another one many
# times takes few bytes and is hashed as often.
_MAX_KEY_DEPTH = 4
_MAX_KEY_PARTS = 256
# Python's hash of an integer is its remainder, so that any number of larger ones have equal hashes.
_MAX_KEY_BITS = 64

# Values of a tuple that is compared with others.
_MAX_SHARED = 16

# Pairs of a dictionary that are set at once.
_BATCH = 1000

_LATIN_BYTES = "_codecs.encode"
_NO_BYTES = "__builtin__.bytes"
_ORDERED = "collections.OrderedDict"
_SIZE = "torch.Size"
_INTERPRETED = frozenset({_LATIN_BYTES, _NO_BYTES, _ORDERED, _SIZE})


class PickleError(ValueError):
    """A pickle that is damaged, or has unreadable contents; its text is the end of a sentence about the file."""


class Global(NamedTuple):
    """A class, a function or a constant of Python, by name only.

    Attributes:
        name: module and name, joined by a dot.
    """

    name: str


class PickledInstance:
    """The result of a call of a `Global`, which is never made.

    Attributes:
        name: the class or function, as `Global.name`; ``""`` for a persistent id, whose value is the only argument.
        args: positional arguments.
        items: appended values, or pairs of keys and values; None without any.
        called: by a call, and not by ``__new__`` of a class; both are pickled, differently.
    """

    __slots__ = ("_keys", "_state", "args", "called", "items", "name")

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None, called: bool = False) -> None:
        self.name = name
        self.args = args
        self.items: Optional[list[Any]] = None
        self.called = called
        self._state = state
        # The keys of a state that is a dictionary, whose values are then a tuple: dictionaries take half of the memory
        # of metadata, and instances of one class share their keys.
        self._keys: Optional[tuple[Any, ...]] = None

    @property
    def state(self) -> Any:
        """Its pickled state; None without one."""
        return self._state if self._keys is None else dict(zip(self._keys, self._state))

    def build(self, state: Any, keys: Optional[tuple[Any, ...]] = None) -> None:
        """Set its state; with keys, the dictionary of these keys and the values ``state``."""
        self._state, self._keys = state, keys

    def added(self) -> list[Any]:
        """The list of its items, created at the first use."""
        if self.items is None:
            self.items = []
        return self.items

    @property
    def fields(self) -> dict[str, Any]:
        """Its state by name; empty where the state is something else."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and not state[0]:
            # Of a class with slots.
            state = state[1]
        return state if isinstance(state, dict) else {}


def read_pickle(
    data: bytes, allowed: Callable[[str], bool], persistent: bool = False, operations: int = MAX_OPERATIONS
) -> Any:
    """The object that a pickle describes.

    Args:
        data: the pickle, and nothing after it.
        allowed: whether a class or function of this name, such as ``torch.Size``, may be named.
        persistent: persistent ids may occur, as they do for the storages of tensors.
        operations: more than so many are refused.

    Returns:
        Numbers, text, bytes, None, lists, tuples and dictionaries of these, `Global` and `PickledInstance`.
        ``torch.Size`` is a tuple, an ordered dictionary is a dictionary. Lists and dictionaries may hold themselves.

    Raises:
        PickleError: it is damaged, or holds something else.
    """
    try:
        try:
            return _Machine(data, allowed, persistent).run(operations)
        except _ReleasedError:
            return _Machine(data, allowed, persistent, releasing=False).run(operations)
    except (IndexError, struct.error) as error:
        raise PickleError("is a pickle that ends early, or is damaged") from error


def among(names: Collection[str]) -> Callable[[str], bool]:
    """Whether a name is one of these, or stands for plain values; for `read_pickle`."""
    return frozenset({*names, *_INTERPRETED}).__contains__


_Operation = Callable[["_Machine"], None]


class _ReleasedError(Exception):
    """A pickle refers to a released object."""


class _Machine:
    """Reads a pickle.

    Picklers number all objects, so that later ones can refer to them. Dictionaries of states and tuples of arguments
    are made for one instance each: they are released once it has them, which halves the memory of metadata.

    Args:
        data: the pickle.
        allowed: as for `read_pickle`.
        persistent: as for `read_pickle`.
        releasing: whether objects are released; a reference to one then raises `_ReleasedError`.
    """

    def __init__(self, data: bytes, allowed: Callable[[str], bool], persistent: bool, releasing: bool = True) -> None:
        self._data = data
        self._allowed = allowed
        self._persistent = persistent
        self._position = 0
        self._stack: list[Any] = []
        # The first one is the bottom of the stack.
        self._marks = [0]
        self._memory = MEMORY_PER_BYTE * len(data) + _MIN_MEMORY
        self._releasing = releasing
        # Picklers count from 0; only a strange one leaves numbers out. None replaces released objects.
        self._memo: list[Any] = []
        # Dictionaries whose instances may not have them yet, by identity: each with its number and its height on the
        # stack. Higher ones come later.
        self._open_dicts: dict[int, tuple[dict[Any, Any], int, int]] = {}
        # Equal keys of states, and equal sizes, are one object.
        self._shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._sparse_memo: dict[int, Any] = {}
        self._globals: dict[str, Global] = {}

    def run(self, operations: int) -> Any:
        data, stack, marks, memo = self._data, self._stack, self._marks, self._memo
        position = 0
        for _ in range(operations):
            code = data[position]
            position += 1
            # Two thirds of metadata are these operations: a call for each would double the time.
            if code == _MEMOIZE and not self._sparse_memo and len(stack) > marks[-1]:
                memo.append(stack[-1])
            elif (
                code == _LONG_GET
                and (place := int.from_bytes(data[position : position + 4], "little")) < len(memo)
                and (value := memo[place]) is not None
            ):
                stack.append(value)
                position += 4
            elif code == _BYTE:
                stack.append(data[position])
                position += 1
            elif code == _GET and data[position] < len(memo) and (value := memo[data[position]]) is not None:
                stack.append(value)
                position += 1
            elif code == _STOP:
                return self._pop()
            else:
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise PickleError(f"is a pickle with operation 0x{code:02x}, which is not read")
                self._position = position
                operation(self)
                position = self._position
                if len(stack) > _MAX_STACK or len(marks) > _MAX_MARKS or self._memory < 0:
                    raise PickleError("is a pickle whose objects would take too much memory")
        raise PickleError(f"is a pickle of more than {operations:,} operations")

    # Parts of operations.

    def _take(self, count: int) -> bytes:
        start = self._position
        if count > len(self._data) - start:
            raise PickleError("is a pickle that ends early")
        self._position = start + count
        return self._data[start : self._position]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _pop(self) -> Any:
        if len(self._stack) <= self._marks[-1]:
            raise PickleError("is a damaged pickle: there is nothing on the stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= self._marks[-1]:
            raise PickleError("is a damaged pickle: there is nothing on the stack")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        if len(self._marks) == 1:
            raise PickleError("is a damaged pickle: a mark is missing")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _arguments(self) -> tuple[Any, ...]:
        args = self._pop()
        if not isinstance(args, tuple):
            raise PickleError("is a damaged pickle: arguments are no tuple")
        return args

    def _named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > _MAX_NAME:
            raise PickleError("is a damaged pickle: a class has no name")
        full = f"{module}.{name}"
        known_global = self._globals.get(full)
        if known_global is None:
            if not self._allowed(full):
                raise PickleError(f"names {full[:_MAX_NAME]!r}, which is not read: nothing of the file is run")
            known_global = self._globals[full] = Global(full)
        self._stack.append(known_global)

    def _called(self, args: tuple[Any, ...], called: bool) -> Any:
        target = self._pop()
        if not isinstance(target, Global):
            raise PickleError("is a damaged pickle: something is called that is no class")
        self._memory -= _INSTANCE_BYTES
        if target.name in _INTERPRETED:
            # A copy of its argument.
            self._memory -= sum(_COPY_BYTES * len(each) for each in args[:1] if isinstance(each, (str, list)))
            return _interpreted(target.name, args)
        return PickledInstance(target.name, args, None, called)

    def _set(self, pairs: list[Any]) -> None:
        target = self._top()
        if len(pairs) % 2 or not isinstance(target, (dict, PickledInstance)):
            raise PickleError("is a damaged pickle: items are set in what holds none")
        self._memory -= _PAIR_BYTES * len(pairs) // 2
        if isinstance(target, PickledInstance):
            self._memory -= _TUPLE_BYTES * len(pairs) // 2
            target.added().extend(zip(pairs[::2], pairs[1::2]))
            return
        for key, value in zip(pairs[::2], pairs[1::2]):
            if not _is_key(key):
                raise PickleError("is a pickle with a dictionary whose keys are not read")
            target[key] = value

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, (list, PickledInstance)):
            raise PickleError("is a damaged pickle: something is appended to what is no list")
        (target if isinstance(target, list) else target.added()).extend(values)

    def _get(self, place: int) -> None:
        if place < len(self._memo):
            if self._releasing and self._memo[place] is None:
                raise _ReleasedError
            self._stack.append(self._memo[place])
        elif place in self._sparse_memo:
            self._stack.append(self._sparse_memo[place])
        else:
            raise PickleError("is a damaged pickle: it refers to what is not there")

    def _open(self, new: dict[Any, Any]) -> None:
        # Its number, if it gets one.
        self._open_dicts[id(new)] = new, len(self._memo), len(self._stack)
        self._stack.append(new)

    # Operations of more than one line.

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def proto(self) -> None:
        if not 2 <= self._number(1) <= 5:
            raise PickleError("is a pickle of another protocol than 2 to 5")

    def pop(self) -> None:
        self._pop()

    def pop_mark(self) -> None:
        self._since_mark()

    def frame(self) -> None:
        # How much follows: for readers of streams.
        self._take(8)

    def integer(self) -> None:
        self._stack.append(struct.unpack("<i", self._take(4))[0])

    def long(self, size: int) -> None:
        count = self._number(size)
        if count > _MAX_INTEGER_BYTES:
            raise PickleError(f"is a pickle with a number of {count:,} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def text(self, size: int) -> None:
        self._memory -= _TEXT_BYTES
        try:
            self._stack.append(self._take(self._number(size)).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise PickleError("is a damaged pickle: a text is not UTF-8") from error

    def named(self) -> None:
        names = []
        for _ in range(2):
            end = self._data.find(b"\n", self._position, self._position + _MAX_NAME)
            if end < 0:
                raise PickleError("is a damaged pickle: a class has no name")
            names.append(self._take(end - self._position).decode("utf-8", "replace"))
            self._position += 1
        self._named(*names)

    def named_on_stack(self) -> None:
        name = self._pop()
        self._named(self._pop(), name)

    def empty_list(self) -> None:
        self._memory -= _LIST_BYTES
        self._stack.append([])

    def empty_dict(self) -> None:
        self._memory -= _DICT_BYTES
        self._open({})

    def tuple_of(self, count: int) -> None:
        stack = self._stack
        if len(stack) - count < self._marks[-1]:
            raise PickleError("is a damaged pickle: there is nothing on the stack")
        self._memory -= _TUPLE_BYTES
        values = tuple(stack[-count:])
        del stack[-count:]
        stack.append(values)

    def tuple_since_mark(self) -> None:
        self._memory -= _TUPLE_BYTES
        self._stack.append(tuple(self._since_mark()))

    def set_item(self) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def new_with_names(self) -> None:
        names = self._pop()
        if names != {}:
            raise PickleError("is a pickle with arguments by name, which are not read")
        self.new()

    def new(self) -> None:
        args = self._arguments()
        self._stack.append(self._called(args, False))

    def reduce(self) -> None:
        args = self._arguments()
        value = self._called(args, True)
        if type(value) is dict:
            self._open(value)
        else:
            self._stack.append(self._one(value) if type(value) is tuple else value)
        memo = self._memo
        if self._releasing and memo and memo[-1] is args:
            memo[-1] = None
            if len(memo) > 1 and args and memo[-2] is args[0] and type(args[0]) is tuple:
                memo[-2] = None

    def build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, PickledInstance):
            if type(state) is dict:
                self._finish(state)
            if type(state) is dict and self._releasing:
                target.build(tuple(state.values()), self._one(tuple(state)))
            else:
                target.build(state)
        elif not isinstance(target, dict):
            # An ordered dictionary may have attributes, which are no part of its items.
            raise PickleError("is a damaged pickle: a state is set on what has none")

    def _finish(self, state: dict[Any, Any]) -> None:
        """Release the dictionary of a state.

        Raises:
            PickleError: it is not complete, because it is the state of an instance in itself.
        """
        opened, height = self._open_dicts, len(self._stack)
        entry = opened.get(id(state))
        if entry is not None and entry[2] < height and self._stack[entry[2]] is state:
            raise PickleError("is a pickle with a state that contains itself, which is not read")
        # All that were begun after it are complete.
        while opened:
            identity, (last, number, at) = opened.popitem()
            if at < height:
                opened[identity] = last, number, at
                return
            if last is state:
                if self._releasing and number < len(self._memo) and self._memo[number] is state:
                    self._memo[number] = None
                return

    def _one(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same object for all short tuples of equal texts or of equal sizes."""
        # Sizes below 2^60 have different hashes, others may not.
        if len(values) > _MAX_SHARED or not all(
            0 <= each < 1 << 60 if type(each) is int else type(each) is str for each in values
        ):
            return values
        return self._shared.setdefault(values, values)

    def persistent_id(self) -> None:
        if not self._persistent:
            raise PickleError("is a pickle with persistent ids, which have no meaning here")
        self._memory -= _INSTANCE_BYTES + _TUPLE_BYTES
        self._stack.append(PickledInstance("", (self._pop(),)))

    def put(self, place: int) -> None:
        if place == len(self._memo):
            self._memo.append(self._top())
        elif place < len(self._memo):
            self._memo[place] = self._top()
        else:
            self._memory -= _DICT_BYTES
            self._sparse_memo[place] = self._top()

    def memoize(self) -> None:
        self.put(len(self._memo) + len(self._sparse_memo))


def _interpreted(name: str, args: tuple[Any, ...]) -> Any:
    """The plain value that a call stands for."""
    if name == _ORDERED and not args:
        return {}
    if name == _SIZE and len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    if not args and name in (_SIZE, _NO_BYTES):
        return () if name == _SIZE else b""
    if name == _LATIN_BYTES and len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
        try:
            return args[0].encode("latin1")
        except UnicodeEncodeError:
            pass
    raise PickleError(f"is a pickle with other arguments for {name} than are read")


def _is_key(key: Any) -> bool:
    """Whether a value may be a key of a dictionary; hashing it takes no longer than the limits allow."""
    if type(key) is not tuple:
        return _is_plain_key(key)
    level, parts = [key], 0
    for _ in range(_MAX_KEY_DEPTH):
        parts += sum(map(len, level))
        if parts > _MAX_KEY_PARTS:
            return False
        values = [value for each in level for value in each]
        level = [value for value in values if type(value) is tuple]
        if not all(_is_plain_key(value) for value in values if type(value) is not tuple):
            return False
        if not level:
            return True
    return False


def _is_plain_key(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _MAX_KEY_BITS
    return value is None or isinstance(value, (str, float, bytes, Global, PickledInstance))


_STOP, _MEMOIZE, _LONG_GET, _GET, _BYTE = ord("."), 0x94, ord("j"), ord("h"), ord("K")
_Push = Union[None, bool]


def _push(value: _Push) -> _Operation:
    return lambda machine: machine._stack.append(value)


_OPERATIONS: dict[int, _Operation] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.pop_mark,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("G"): lambda m: m._stack.append(struct.unpack(">d", m._take(8))[0]),
    ord("J"): _Machine.integer,
    ord("K"): lambda m: m._stack.append(m._number(1)),
    ord("M"): lambda m: m._stack.append(m._number(2)),
    0x8A: lambda m: m.long(1),
    0x8B: lambda m: m.long(4),
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("C"): lambda m: m._stack.append(m._take(m._number(1))),
    ord("B"): lambda m: m._stack.append(m._take(m._number(4))),
    0x8E: lambda m: m._stack.append(m._take(m._number(8))),
    0x96: lambda m: m._stack.append(m._take(m._number(8))),
    ord("]"): _Machine.empty_list,
    ord("a"): lambda m: m._extend([m._pop()]),
    ord("e"): lambda m: m._extend(m._since_mark()),
    ord(")"): lambda m: m._stack.append(()),
    ord("t"): _Machine.tuple_since_mark,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("}"): _Machine.empty_dict,
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m._set(m._since_mark()),
    ord("q"): lambda m: m.put(m._number(1)),
    ord("r"): lambda m: m.put(m._number(4)),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m._get(m._number(1)),
    ord("j"): lambda m: m._get(m._number(4)),
    ord("c"): _Machine.named,
    0x93: _Machine.named_on_stack,
    0x81: _Machine.new,
    0x92: _Machine.new_with_names,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent_id,
}


def sizes_of(numbers: Any) -> Optional[tuple[int, ...]]:
    """Numbers of elements or bytes, as in a shape; None for anything else."""
    if not isinstance(numbers, (tuple, list)) or len(numbers) > MAX_SIZES:
        return None
    return tuple(numbers) if all(type(each) is int and 0 <= each < 1 << 62 for each in numbers) else None


class NotPlain(ValueError):
    """A value that is more than numbers, text, lists and dictionaries."""


def plain(value: Any, nodes: int = 1 << 16, depth: int = 64) -> Any:
    """A value as JSON has it, for people: tuples are lists, bytes hexadecimal, types their names.

    Args:
        value: a result of `read_pickle`.
        nodes: larger values are refused.
        depth: deeper nests of lists are refused.

    Raises:
        NotPlain: it holds something that is not plain, or too much.
    """
    remaining = [nodes]

    def walk(value: Any, depth: int) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0 or depth < 0:
            raise NotPlain("it is too large to be shown")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, Global):
            return value.name
        if isinstance(value, (list, tuple)):
            return [walk(each, depth - 1) for each in value]
        if isinstance(value, PickledInstance) and value.name == NAMESPACE:
            value = value.fields
        if isinstance(value, dict):
            if not all(isinstance(key, (str, int)) for key in value):
                raise NotPlain("its keys are more than text and numbers")
            return {str(key): walk(each, depth - 1) for key, each in value.items()}
        raise NotPlain(f"it holds {getattr(value, 'name', '') or 'what is no plain value'}")

    return walk(value, depth)


NAMESPACE = "argparse.Namespace"


# Writing.


def pickled(value: Any) -> Iterator[bytes]:
    """A pickle of protocol 2 in parts, of a possible result of `read_pickle`; ``{}`` stays a dictionary.

    Dictionaries may be `Pairs`, so that a large pickle is never in memory.

    Raises:
        TypeError: it holds something else.
    """
    yield b"\x80\x02"
    yield from _Emitter().value(value)
    yield b"."


class Pairs(NamedTuple):
    """A dictionary to be pickled whose pairs are made one by one."""

    pairs: Iterator[tuple[Any, Any]]


class _Emitter:
    def __init__(self) -> None:
        self._memo: dict[Union[str, Global], int] = {}

    def value(self, value: Any) -> Iterator[bytes]:
        if value is None or value is True or value is False:
            yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, (str, Global)):
            yield self._remembered(value)
        elif isinstance(value, int):
            yield _integer(value)
        elif isinstance(value, float):
            yield b"G" + struct.pack(">d", value)
        elif isinstance(value, tuple) and not isinstance(value, Pairs):
            yield b"("
            for each in value:
                yield from self.value(each)
            yield b"t"
        elif isinstance(value, list):
            yield b"](" + b"".join(part for each in value for part in self.value(each)) + b"e"
        elif isinstance(value, (dict, Pairs)):
            yield b"}"
            pairs = iter(value.items()) if isinstance(value, dict) else value.pairs
            # As Python does it, so that readers need little memory.
            while batch := list(itertools.islice(pairs, _BATCH)):
                yield b"("
                for key, each in batch:
                    yield from self.value(key)
                    yield from self.value(each)
                yield b"u"
        elif isinstance(value, PickledInstance) and not value.name:
            yield b"".join(self.value(value.args[0])) + b"Q"
        elif isinstance(value, PickledInstance):
            yield self._remembered(Global(value.name)) + b"".join(self.value(value.args))
            yield b"R" if value.called else b"\x81"
            if value.state is not None:
                yield from self.value(value.state)
                yield b"b"
        else:
            raise TypeError(f"{type(value).__name__} is not pickled")

    def _remembered(self, value: Union[str, Global]) -> bytes:
        place = self._memo.get(value)
        if place is not None:
            return b"j" + struct.pack("<I", place)
        place = self._memo[value] = len(self._memo)
        put = b"r" + struct.pack("<I", place)
        if isinstance(value, Global):
            module, _, name = value.name.rpartition(".")
            return f"c{module}\n{name}\n".encode() + put
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text + put


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
