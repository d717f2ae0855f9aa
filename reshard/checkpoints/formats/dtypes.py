"""Element types: names in MindSpore and in safetensors, sizes, and formats that can hold them.

A dtype is always MindSpore's name, as in `.ckpt` files. safetensors has more types than MindSpore; those get a
similar name (``Float8E8M0``). Elements are opaque: only their size matters, so types that NumPy lacks need no
special case.
"""

from __future__ import annotations

from typing import NamedTuple

TEXT = "str"
MAP_TENSOR = "MapTensor"
NO_ARRAYS = (TEXT, MAP_TENSOR)
"""Types without elements, which have no layout."""

INT4 = "Int4"

MEMORY = "memory"
"""The format of tensors that are read and never written. It can hold all elements, and text."""


class DType(NamedTuple):
    """An element type.

    Attributes:
        name: MindSpore's name.
        size: bytes of an element in files.
        safetensors: its name in a safetensors file; None without one.
        ckpt: its name in a `.ckpt` file; None if MindSpore has none.
        numpy: NumPy's name; None if NumPy lacks it.
        extended: the name in ml_dtypes, if NumPy lacks it.
    """

    name: str
    size: int
    safetensors: str | None
    ckpt: str | None
    numpy: str | None = None
    extended: str | None = None


_TABLE = (
    DType("Bool", 1, "BOOL", "Bool", "?"),
    # Two values share a byte; files and this package count the packed bytes. safetensors files mark such a tensor in
    # their metadata.
    DType(INT4, 1, "I8", INT4, "i1"),
    DType("Int8", 1, "I8", "Int8", "i1"),
    DType("UInt8", 1, "U8", "UInt8", "u1"),
    DType("Float8E4M3FN", 1, "F8_E4M3", None, None, "float8_e4m3fn"),
    DType("Float8E5M2", 1, "F8_E5M2", None, None, "float8_e5m2"),
    # Only an exponent, without a sign.
    DType("Float8E8M0", 1, "F8_E8M0", None, None, "float8_e8m0fnu"),
    DType("Float8E4M3FNUZ", 1, "F8_E4M3FNUZ", None, None, "float8_e4m3fnuz"),
    DType("Float8E5M2FNUZ", 1, "F8_E5M2FNUZ", None, None, "float8_e5m2fnuz"),
    DType("Int16", 2, "I16", "Int16", "<i2"),
    DType("UInt16", 2, "U16", "UInt16", "<u2"),
    DType("Float16", 2, "F16", "Float16", "<f2"),
    DType("BFloat16", 2, "BF16", "BFloat16", None, "bfloat16"),
    DType("Int32", 4, "I32", "Int32", "<i4"),
    DType("UInt32", 4, "U32", "UInt32", "<u4"),
    DType("Float32", 4, "F32", "Float32", "<f4"),
    DType("Int64", 8, "I64", "Int64", "<i8"),
    DType("UInt64", 8, "U64", "UInt64", "<u8"),
    DType("Float64", 8, "F64", "Float64", "<f8"),
    DType("Complex64", 8, "C64", "Complex64", "<c8"),
    DType("Complex128", 16, None, "Complex128", "<c16"),
)

DTYPES = {row.name: row for row in _TABLE}
"""The element types of fixed size, by MindSpore's name."""

ITEM_SIZES = {row.name: row.size for row in _TABLE}
"""Bytes of one element."""

NUMPY_NAMES = {row.name: row.numpy for row in _TABLE if row.numpy is not None}
"""NumPy's name of a type."""

SAFETENSORS_NAMES = {row.name: row.safetensors for row in _TABLE if row.safetensors is not None}
"""The safetensors name of a type."""

FROM_SAFETENSORS = {stored: dtype for dtype, stored in SAFETENSORS_NAMES.items() if dtype != INT4}
"""MindSpore's name of a safetensors type; an I8 tensor is Int4 where the metadata says so."""

TORCH_NAMES = {row.name: f"torch.{row.extended or row.name.lower()}" for row in _TABLE if row.name != INT4}
"""torch's name of a type."""

FROM_TORCH = {stored: dtype for dtype, stored in TORCH_NAMES.items()}
"""MindSpore's name of torch's type."""

PT = "pt"
"""The format of files of ``torch.save``: an archive of several tensors."""

ARCHIVES = "distcp"
"""The format of files of archives, as torch DCP writes them."""

# Types of safetensors with elements that are not whole bytes, so that no byte range is a slice.
SUB_BYTE_TYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

CAST_TO = ("Float32", "Float16", "BFloat16")
"""Types that elements may be cast to."""

CASTABLE = ("Float64", *CAST_TO)
"""Types that elements may be cast from."""

_SHORT = {"bf16": "BFloat16", "fp16": "Float16", "half": "Float16", "fp32": "Float32", "float": "Float32"}


def dtype_named(text: str) -> str | None:
    """MindSpore's name of ``bf16``, ``torch.bfloat16`` or ``F32``; None if unknown."""
    word = text.strip().lower().rpartition(".")[2].replace("_", "")
    own_names = {dtype.lower(): dtype for dtype in ITEM_SIZES}
    stored = {name.lower().replace("_", ""): dtype for name, dtype in FROM_SAFETENSORS.items()}
    return {**stored, **_SHORT, **own_names}.get(word)


INTEGERS = frozenset(name for name, numpy in NUMPY_NAMES.items() if numpy.strip("<")[0] in "iu")
"""NumPy's integer types, without Bool."""


def mindspore_reads(dtype: str) -> bool:
    """Whether MindSpore 2.7.0 and 2.10.0 read safetensors files with a tensor of this type.

    MindSpore refuses the whole file if one type is missing in its own list.
    """
    return can_hold("safetensors", dtype) and not dtype.startswith(("Float8", "Complex"))


def can_hold(format: str, dtype: str) -> bool:
    """Whether a file of this format can hold tensors of this type.

    A `.ckpt` file records types by name, so it can hold unknown types too, but no 8-bit floats, which have no `.ckpt`
    type in MindSpore. safetensors has a closed list of types, without text.

    Args:
        format: ``"ckpt"``, ``"safetensors"``, `ARCHIVES` or `MEMORY`.
        dtype: MindSpore's name of the type, ``"str"`` for text, ``"MapTensor"`` for map tensors.
    """
    if dtype == MAP_TENSOR:
        return False
    if format == MEMORY:
        return True
    if format in (ARCHIVES, PT):
        return dtype in TORCH_NAMES
    if format == "ckpt":
        return dtype not in DTYPES or DTYPES[dtype].ckpt is not None
    return dtype in SAFETENSORS_NAMES
