"""Pickles are read as data: plain values are returned, classes are inert, and nothing is run."""

from __future__ import annotations

import gc
import json
import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.pickles import (
    NotPlain,
    PickledInstance,
    PickleError,
    Repeated,
    among,
    inert,
    inert_class,
    pickled,
    plain,
    read_pickle,
)
from reshard.errors import CheckpointError

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


@given(VALUES, st.sampled_from([2, 4]))
def test_written_pickles_are_read_by_python_and_reshard(value: Any, protocol: int) -> None:
    # Bytes are written only where they came in a pickle of their own.
    assumed = _without_bytes(value)
    data = pickled(assumed, protocol)
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
    value = {str(number): [number] for number in range(2500)}
    assert pickle.loads(pickled(value)) == value


def test_repeated_values_and_pairs_made_on_the_way_have_the_bytes_of_others() -> None:
    entry = inert("torch.Size", ("a", 1, ("b", 2.5)))
    plain_pairs = {f"name{number}": [entry, "a", number] for number in range(2500)}
    repeated = Repeated(entry)
    for protocol in (2, 4):
        pairs = ((name, [repeated, *others]) for name, (_, *others) in plain_pairs.items())
        assert pickled(pairs, protocol) == pickled(plain_pairs, protocol)


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


def test_sizes_of_torch_may_share_their_numbers() -> None:
    numbers = b"K\x02K\x03\x86\x94"
    size = b"ctorch\nSize\n"
    twice = b"\x80\x04(" + size + numbers + b"\x85\x94R" + size + b"h\x00\x85\x94R" + size + b"h\x01Rh\x00t."
    assert read_pickle(twice, among(())) == ((2, 3),) * 4


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
    "OBJ": b"\x80\x02(cos\nsystem\n" + _text("touch EXECUTED") + b"o.",
    "eval": pickle.dumps(_Runs(eval, "open('EXECUTED', 'w')")),
    "getattr": pickle.dumps(_Runs(getattr, "x", "upper")),
    "NEWOBJ of a class that is not allowed": b"\x80\x02csubprocess\nPopen\n" + TUPLE_OF_ECHO + b"\x81.",
    "a number is called": b"\x80\x02K\x05)R.",
    "BUILD on a list": b"\x80\x02]}b.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"\x80\x02Pnumber\n.",
    "BINPERSID": b"\x80\x02K\x05Q.",
    "no end": b"\x80\x02K\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_pickles_are_refused_and_run_nothing(
    attack: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleError):
        read_pickle(ATTACKS[attack], NOTHING)
    assert not list(tmp_path.iterdir())
    assert gc.isenabled()


PLAIN = ["_codecs.encode", "__builtin__.bytes", "collections.OrderedDict", "torch.Size"]


@pytest.mark.parametrize("name", [*PLAIN, "no.such.Thing", "torch._utils._rebuild_tensor_v2"])
@pytest.mark.parametrize("key", ["name", "fields", "__setstate__", "__new__", "__call__", "__defaults__", "__class__"])
@pytest.mark.parametrize("slots", [False, True], ids=["state", "state of slots"])
def test_no_pickle_changes_what_stands_for_a_class(name: str, key: str, slots: bool) -> None:
    """Later pickles of the process get the same classes."""
    module, _, last = name.rpartition(".")
    state = b"}" + _text(key) + _text("changed") + b"s"
    build = b"\x80\x04c" + f"{module}\n{last}\n".encode() + (b"N" + state + b"\x86" if slots else state) + b"b."
    for operations in (build, build[:-2] + b"a.", build[:-2] + b"e."):
        with pytest.raises(PickleError):
            read_pickle(operations, among([name]))
    instance = read_pickle(b"\x80\x04c" + f"{module}\n{last}\n".encode() + b")R.", among([name]))
    if name in PLAIN:
        assert instance in (b"", {}, ())
    else:
        assert (instance.name, instance.args, instance.state, instance.fields) == (name, (), None, {})


def test_an_error_of_the_list_of_names_is_passed_on() -> None:
    def refuse(name: str) -> bool:
        raise CheckpointError(f"{name} is of another library")

    with pytest.raises(CheckpointError, match=r"os\.system"):
        read_pickle(ATTACKS["os.system by GLOBAL"], refuse)


def test_values_of_archives_may_be_shared_and_nested() -> None:
    layers = [*range(60)]
    value = {"args": [layers, layers], "nested": json.loads("[" * 40 + "1" + "]" * 40), "seed": 1 << 64}
    assert read_pickle(pickle.dumps(value, 2), NOTHING, persistent=True) == value


def test_plain_values_are_shown_as_json() -> None:
    namespace = inert("argparse.Namespace", state={"layers": 2})
    value = {"a": (1, 2.5, None, True), "b": [b"\x01\xff"], "args": namespace, "type": inert_class("torch.float32")}
    shown = {"a": [1, 2.5, None, True], "b": ["01ff"], "args": {"layers": 2}, "type": "torch.float32"}
    assert plain(value) == shown
    with pytest.raises(NotPlain):
        plain(inert("torch.Generator"))
