"""Element types: their names in MindSpore and in safetensors, their sizes, and what can hold them.

A dtype is always MindSpore's name, as a `.ckpt` file spells it. safetensors knows more types than
MindSpore has names for; those get a name of the same kind (``Float8E8M0``). Elements are opaque
here: nothing needs more than their size, so types that NumPy lacks are no special case.
"""

from __future__ import annotations

from typing import Optional

TEXT = "str"
MAP_TENSOR = "MapTensor"
NO_ARRAYS = (TEXT, MAP_TENSOR)
"""Types of what has no elements, so that nothing lays it out."""

INT4 = "Int4"

MEMORY = "memory"
"""In place of a format: tensors that are read and never written. It holds all that has elements, and text."""

# Two Int4 values share a byte; files count the packed bytes, and so does everything here.
ITEM_SIZES = {
    "Bool": 1,
    "Int4": 1,
    "Int8": 1,
    "UInt8": 1,
    "Float8E4M3FN": 1,
    "Float8E5M2": 1,
    "Float8E8M0": 1,
    "Float8E4M3FNUZ": 1,
    "Float8E5M2FNUZ": 1,
    "Int16": 2,
    "UInt16": 2,
    "Float16": 2,
    "BFloat16": 2,
    "Int32": 4,
    "UInt32": 4,
    "Float32": 4,
    "Int64": 8,
    "UInt64": 8,
    "Float64": 8,
    "Complex64": 8,
    "Complex128": 16,
}
"""Bytes of one element, for the types whose size does not depend on the file."""

SAFETENSORS_NAMES = {
    "Bool": "BOOL",
    "Int8": "I8",
    "UInt8": "U8",
    "Float8E4M3FN": "F8_E4M3",
    "Float8E5M2": "F8_E5M2",
    "Float8E8M0": "F8_E8M0",
    "Float8E4M3FNUZ": "F8_E4M3FNUZ",
    "Float8E5M2FNUZ": "F8_E5M2FNUZ",
    "Int16": "I16",
    "UInt16": "U16",
    "Float16": "F16",
    "BFloat16": "BF16",
    "Int32": "I32",
    "UInt32": "U32",
    "Float32": "F32",
    "Int64": "I64",
    "UInt64": "U64",
    "Float64": "F64",
    "Complex64": "C64",
    # Stored as I8, and marked in the file's metadata.
    "Int4": "I8",
}
"""What safetensors calls a type."""

FROM_SAFETENSORS = {stored: dtype for dtype, stored in SAFETENSORS_NAMES.items() if dtype != INT4}
"""MindSpore's name of a safetensors type; an I8 tensor is Int4 where the metadata says so."""

# Real types of safetensors whose elements are not whole bytes, so that no byte range is a slice.
SUB_BYTE_TYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

CAST_TO = ("Float32", "Float16", "BFloat16")
"""Types that elements may be cast to."""

CASTABLE = ("Float64", *CAST_TO)
"""Types that elements may be cast from."""

_SHORT = {"bf16": "BFloat16", "fp16": "Float16", "half": "Float16", "fp32": "Float32", "float": "Float32"}


def dtype_named(text: str) -> Optional[str]:
    """MindSpore's name of a type that is spelled ``bf16``, ``torch.bfloat16`` or ``F32``; None where there is none."""
    word = text.strip().lower().rpartition(".")[2].replace("_", "")
    named = {dtype.lower(): dtype for dtype in ITEM_SIZES}
    stored = {name.lower().replace("_", ""): dtype for name, dtype in FROM_SAFETENSORS.items()}
    return {**stored, **_SHORT, **named}.get(word)


INTEGERS = frozenset(
    {"Int4", "Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64"},
)
"""Types that NumPy holds as integers (Bool is none of them)."""


def mindspore_reads(dtype: str) -> bool:
    """Whether MindSpore reads safetensors files that hold a tensor of this type; of others it reads no tensor at all.

    So in 2.7.0 and 2.10.0, whose list of types is its own.
    """
    return can_hold("safetensors", dtype) and not dtype.startswith(("Float8", "Complex"))


def can_hold(format: str, dtype: str) -> bool:
    """Whether a file of this format can hold tensors of this type.

    A `.ckpt` file records types by name, so types unknown here pass through it; 8-bit floats do not,
    since MindSpore has no `.ckpt` type for them. safetensors has a closed list and no text.

    Args:
        format: ``"ckpt"``, ``"safetensors"`` or `MEMORY`.
        dtype: MindSpore's name of the type, ``"str"`` for text, ``"MapTensor"`` for map tensors.
    """
    if dtype == MAP_TENSOR:
        return False
    if format == MEMORY:
        return True
    if format == "ckpt":
        return not dtype.startswith("Float8")
    return dtype in SAFETENSORS_NAMES
