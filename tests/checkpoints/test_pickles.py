"""Pickles are read as data: plain values are returned; code, memory bombs and recursion are refused."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.pickles import (
    Global,
    NotPlain,
    Pairs,
    PickledInstance,
    PickleError,
    among,
    pickled,
    plain,
    read_pickle,
)
from tests.sampling import some_of

NOTHING = among([])
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers(-5, 5) | st.tuples(st.text(), st.integers(-(1 << 64) + 1, (1 << 64) - 1))
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.tuples(),
)


class _Runs:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@given(VALUES, st.integers(2, 5))
def test_pickles_of_plain_values_are_read(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), NOTHING) == value


@given(VALUES)
def test_written_pickles_are_read_by_python_and_reshard(value: Any) -> None:
    # Bytes are written only where they came in a pickle of their own.
    assumed = _without_bytes(value)
    data = b"".join(pickled(assumed))
    assert pickle.loads(data) == assumed
    assert read_pickle(data, NOTHING) == assumed


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_bytes, value))
    if isinstance(value, dict):
        return {key: _without_bytes(each) for key, each in value.items()}
    return value


def test_a_large_dictionary_is_written_in_batches() -> None:
    count = 2500
    data = b"".join(pickled(Pairs((str(number), [number]) for number in range(count))))
    assert pickle.loads(data) == {str(number): [number] for number in range(count)}


def test_an_ordered_dictionary_with_attributes_is_read_as_a_dictionary() -> None:
    value: OrderedDict[str, int] = OrderedDict(a=1, b=2)
    value.extra = 5  # type: ignore[attr-defined]
    for protocol in range(2, 6):
        assert read_pickle(pickle.dumps(value, protocol), NOTHING) == {"a": 1, "b": 2}


class _Reduced:
    """An object that is pickled as a call."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return _Stateful, self.args


class _Stateful:
    """An object with a state."""


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_states_and_arguments_may_be_shared(protocol: int) -> None:
    """Readers may drop neither as soon as one instance has it."""
    first, second = _Stateful(), _Stateful()
    first.__dict__ = second.__dict__ = {"size": (1, 2), "name": "w"}
    pair = (3, 4)
    args = ([pair],)
    value = [first, second, first.__dict__, _Reduced(*args), _Reduced(*args), args, pair]
    read = read_pickle(pickle.dumps(value, protocol), lambda name: name.endswith("._Stateful"))
    assert [each.fields for each in read[:2]] == [first.__dict__] * 2
    assert read[2] == first.__dict__ and read[6] == pair
    assert [each.args for each in read[3:5]] == [args] * 2 and read[5] == args


@pytest.mark.parametrize("ordered", [False, True], ids=["dict", "OrderedDict"])
@pytest.mark.parametrize("shared_before", [False, True], ids=["alone", "after a shared state"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_state_that_contains_itself_is_refused(protocol: int, shared_before: bool, ordered: bool) -> None:
    """The inner instance would get a state without the items that come after it."""
    shared = [_with_state({"a": 1}), _with_state({})] if shared_before else []
    if shared_before:
        shared[1].__dict__ = shared[0].__dict__
    state: dict[str, Any] = OrderedDict() if ordered else {}
    outer, inner = _with_state(state), _with_state(state)
    state.update(first=1, inner=[inner], last=2)
    with pytest.raises(PickleError, match="a state that contains itself"):
        read_pickle(pickle.dumps([*shared, outer], protocol), _is_allowed)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_instance_may_be_in_its_own_state(protocol: int) -> None:
    instance = _with_state({})
    instance.__dict__.update(before=1, itself=[instance], nested={"state": _with_state({"a": 2})}, after=3)
    read = read_pickle(pickle.dumps(instance, protocol), _is_allowed)
    assert (read.fields["before"], read.fields["after"]) == (1, 3)
    assert read.fields["itself"][0] is read
    assert read.fields["nested"]["state"].fields == {"a": 2}


def test_states_that_share_a_dictionary_take_linear_time() -> None:
    count = 200_000
    # An open dictionary at every height of the stack, and the same state again and again.
    state = b"ctests\nThing\n)\x81q\x00}q\x01b"
    data = b"\x80\x04" + b"}K\x00" * count + state + b"h\x00h\x01b" * count + b"."
    start = time.process_time()
    read_pickle(data, lambda name: True)
    assert time.process_time() - start < 10


def _with_state(state: dict[str, Any]) -> _Stateful:
    instance = _Stateful()
    instance.__dict__ = state
    return instance


def _is_allowed(name: str) -> bool:
    return name.endswith("._Stateful") or name == "collections.OrderedDict"


def test_sizes_of_torch_may_share_their_numbers() -> None:
    numbers = b"K\x02K\x03\x86\x94"
    size = b"ctorch\nSize\n"
    twice = b"\x80\x04(" + size + numbers + b"\x85\x94R" + size + b"h\x00\x85\x94R" + size + b"h\x01Rh\x00t."
    assert read_pickle(twice, among(())) == ((2, 3),) * 4


def test_instances_of_one_class_share_their_keys() -> None:
    """Metadata has three instances for each chunk of a tensor."""
    value = []
    for number in range(1000):
        value.append(_Stateful())
        value[-1].__dict__ = {"offset": (number, 0), "sizes": (1, 16), "file": "name"}
    data = pickle.dumps(value, 4)
    tracemalloc.start()
    try:
        read = read_pickle(data, lambda name: True)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert [each.fields for each in read] == [each.__dict__ for each in value]
    assert used < 400 * len(value)


def test_allowed_classes_become_records_and_are_not_imported() -> None:
    data = b"\x80\x02cno.such.module\nThing\n)\x81}X\x01\x00\x00\x00aK\x05sb."
    value = read_pickle(data, among(["no.such.module.Thing"]))
    assert isinstance(value, PickledInstance)
    assert (value.name, value.args, value.fields) == ("no.such.module.Thing", (), {"a": 5})


def _text(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data


TUPLE_OF_ECHO = b"(" + _text("touch EXECUTED") + b"t"
ATTACKS = {
    "os.system by GLOBAL": b"\x80\x02cos\nsystem\n" + TUPLE_OF_ECHO + b"R.",
    "os.system by STACK_GLOBAL": b"\x80\x04" + _text("os") + _text("system") + b"\x93" + TUPLE_OF_ECHO + b"R.",
    "names glued on the stack": b"\x80\x04" + _text("torch._utils") + _text("os.system") + b"\x93.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "INST": b"(S'touch EXECUTED'\nios\nsystem\n.",
    "INST in protocol 2": b"\x80\x02(ios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\n" + _text("touch EXECUTED") + b"o.",
    "eval": pickle.dumps(_Runs(eval, "open('EXECUTED', 'w')")),
    "getattr": pickle.dumps(_Runs(getattr, "x", "upper")),
    "protocol 0": pickle.dumps(_Runs(os.system, "touch EXECUTED"), 0),
    "NEWOBJ of a class that is not allowed": b"\x80\x02csubprocess\nPopen\n" + TUPLE_OF_ECHO + b"\x81.",
    "a number is called": b"\x80\x02K\x05)R.",
    "a text is called": b"\x80\x02X\x02\x00\x00\x00os)R.",
    "BUILD on a number": b"\x80\x02K\x05}b.",
    "BUILD on a list": b"\x80\x02]}b.",
    "BUILD on a global": b"\x80\x02ctorch\nSize\n}b.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"\x80\x02Pnumber\n.",
    "BINPERSID": b"\x80\x02K\x05Q.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "DUP": b"\x80\x02]2.",
    "LONG4 of gigabytes": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x.",
    "LONG4 of a negative size": b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
    "LONG4 that is there": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b".",
    "BINUNICODE8 of exabytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "BINBYTES8 of all": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "BYTEARRAY8 of exabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "a reference to nothing": b"\x80\x02h\x07.",
    "no mark": b"\x80\x02K\x01t.",
    "nothing on the stack": b"\x80\x02.",
    "POP below a mark": b"\x80\x02K\x01(0.",
    "an odd number of items": b"\x80\x02}(K\x01u.",
    "items of a number": b"\x80\x02K\x01(K\x01K\x02u.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "a list in a tuple as a key": b"\x80\x02}]\x85K\x01s.",
    "arguments by name": b"\x80\x04ctorch\nSize\n)}X\x01\x00\x00\x00aK\x01s\x92.",
    "text that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "sizes of a text": b"\x80\x02ctorch\nSize\nX\x01\x00\x00\x00a\x85R.",
    "no end": b"\x80\x02K\x01",
    "nothing": b"",
    "a name without an end": b"\x80\x02c" + b"a" * 1000,
    "another protocol": b"\x80\x09K\x01.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_pickles_are_refused_and_run_nothing(
    attack: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(PickleError):
            read_pickle(ATTACKS[attack], NOTHING)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert not list(tmp_path.iterdir())


DEPTH = 30_000


@pytest.mark.parametrize(("opening", "closing"), [(b"]", b"a"), (b"}X\x01\x00\x00\x00a", b"s"), (b"", b"\x85")])
def test_deep_nesting_does_not_recurse(opening: bytes, closing: bytes) -> None:
    value = read_pickle(b"\x80\x02" + opening * DEPTH + b"N" + closing * DEPTH + b".", NOTHING)
    with pytest.raises(NotPlain):
        plain(value)


def test_deeply_nested_marks_are_refused() -> None:
    with pytest.raises(PickleError, match="too much memory"):
        read_pickle(b"\x80\x02" + b"(" * DEPTH + b"N" + b"t" * DEPTH + b".", NOTHING)


def test_deep_tuples_are_refused_as_keys() -> None:
    deep = b"\x80\x02}N" + b"\x85" * DEPTH + b"K\x01s."
    with pytest.raises(PickleError):
        read_pickle(deep, NOTHING)


def test_lists_with_exponential_content_take_bounded_memory_and_are_not_shown() -> None:
    # Each level holds the one before twice: 2 ** 60 leaves in some hundred bytes.
    data = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1]) for level in range(60)
    )
    value = read_pickle(data + b".", NOTHING)
    with pytest.raises(NotPlain):
        plain(value)


def test_a_list_that_contains_itself_is_not_shown() -> None:
    value: list[Any] = []
    value.append(value)
    content = read_pickle(pickle.dumps(value, 4), NOTHING)
    assert content[0] is content
    with pytest.raises(NotPlain):
        plain(content)


HOSTILE = {
    "a number under many names": (b"N", b"\x94"),
    "references": (b"N", b"N"),
    "empty lists": (b"", b"]"),
    "empty lists in a list": (b"](", b"]"),
    "empty dictionaries": (b"", b"}"),
    "dictionaries of a pair": (b"](", b"}NNs"),
    "pairs of a dictionary": (b"}(", b"M\xff\xffN"),
    "marks": (b"", b"("),
    "tuples in tuples": (b")", b"\x85"),
    "empty tuples since a mark": (b"](", b"(t"),
    "persistent ids in persistent ids": (b"N", b"Q"),
    "instances": (b"](cno.such\nThing\nq\x000", b"h\x00)R"),
    "short texts": (b"](", b"\x8c\x02ab"),
    "numbers": (b"](", b"M\xff\xff"),
    "names that are left out": (b"N", b"r\xff\xff\xff\x7f0Nr\xfe\xff\xff\x7f"),
    "copies of a list": (b"]q\x00(" + b"N" * 50_000 + b"e0ctorch\nSize\nq\x010", b"h\x01h\x00\x85R"),
    "copies of a text": (
        b"X\x50\xc3\x00\x00" + b"a" * 50_000 + b"q\x00X\x06\x00\x00\x00latin1q\x01c_codecs\nencode\nq\x02",
        b"h\x02h\x00h\x01\x86R",
    ),
}


@pytest.mark.parametrize("attack", some_of(HOSTILE, 3))
def test_memory_of_reading_pickles_is_a_small_multiple_of_their_size(attack: str) -> None:
    first, repeated = HOSTILE[attack]
    data = b"\x80\x02" + first + repeated * ((1 << 18) // len(repeated))
    tracemalloc.start()
    try:
        with pytest.raises(PickleError):
            read_pickle(data, among(["no.such.Thing"]), persistent=True)
        assert tracemalloc.get_traced_memory()[1] < (8 << 20) + 40 * len(data)
    finally:
        tracemalloc.stop()


def test_items_of_an_instance_take_linear_time() -> None:
    count = 200_000
    data = b"\x80\x02cno.such\nThing\n)\x81" + b"K\x01a" * count + b"K\x01K\x02s" * count + b"."
    began = time.monotonic()
    value = read_pickle(data, among(["no.such.Thing"]))
    assert len(value.items) == 2 * count
    assert time.monotonic() - began < 30


def test_memo_numbers_may_have_gaps() -> None:
    assert read_pickle(b"\x80\x02K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.", NOTHING) == 7
    assert read_pickle(b"\x80\x04K\x01q\x05\x94K\x02\x94h\x05\x86.", NOTHING) == (2, 1)


def test_the_number_of_operations_is_limited() -> None:
    with pytest.raises(PickleError, match="more than 10 operations"):
        read_pickle(b"\x80\x02" + b"N0" * 100 + b"N.", NOTHING, operations=10)


def test_plain_values_are_shown_as_json() -> None:
    namespace = PickledInstance("argparse.Namespace", (), {"layers": 2})
    value = {"a": (1, 2.5, None, True), "b": [b"\x01\xff"], "args": namespace, "type": Global("torch.float32")}
    shown = {"a": [1, 2.5, None, True], "b": ["01ff"], "args": {"layers": 2}, "type": "torch.float32"}
    assert plain(value) == shown
    with pytest.raises(NotPlain):
        plain(PickledInstance("torch.Generator"))


def test_keys_take_linear_time() -> None:
    # A tuple that holds another one many times, level by level: a billion elements to hash in some hundred bytes.
    nested = b"(" + b"N" * 180 + b"tq\x000"
    for level in range(3):
        nested += b"(" + (b"h" + bytes([level])) * 180 + b"tq" + bytes([level + 1]) + b"0"
    # Python's hash of each is 0.
    equal = b"".join(
        b"\x8a\x10" + (number * ((1 << 61) - 1)).to_bytes(16, "little") + b"N" for number in range(1 << 14)
    )
    for data in (nested + b"}h\x03Ns.", b"}(" + equal + b"u."):
        began = time.monotonic()
        with pytest.raises(PickleError, match="keys are not read"):
            read_pickle(b"\x80\x02" + data, NOTHING)
        assert time.monotonic() - began < 2
