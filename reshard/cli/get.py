"""get: a tensor of a checkpoint, or a slice of one."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from reshard.asked import CHANGES, Edits, Effort, Source
from reshard.checkpoints.formats.dtypes import INT4, can_hold
from reshard.checkpoints.formats.elements import widen
from reshard.checkpoints.formats.output import Literal, OutputTensor, lay_out_safetensors
from reshard.checkpoints.formats.pickles import NotPlain
from reshard.cli import options
from reshard.cli.command import argument, command, option, paths
from reshard.cli.opened import opened, shape_words
from reshard.cli.output import echo_json, is_json, is_quiet, is_verbose, listener, say
from reshard.errors import CheckpointError, UsageError
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.opened.tensor import select
from reshard.storage import store_of, write_parts, writing_error
from reshard.text.globs import Glob
from reshard.text.messages import Report, listing, one_line, plural, quoted
from reshard.text.names import did_you_mean

Array = npt.NDArray[Any]

# Elements that are printed; more are for a file.
_MAX_PRINTED = 1 << 20
# Beyond these NumPy shows the ends only.
_MAX_SHOWN = 1000
_STANDARD_OUTPUT = "-"
_SAFETENSORS = ".safetensors"


@command(
    "get",
    """
reshard get ckpt/ model.norm.weight --strategy src.ckpt
reshard get unified/ '*.wq.weight' --slice '0:4,:8'
reshard get iterations/ lm_head.weight -o head.npy
""",
)
@argument("src")
@click.argument("name")
@options.group(Source, *options.STORED, path="src", strategy=options.SAVED)
@option(
    "Parameters", "--slice", "index", metavar="INDEX", help="Part of the tensor in NumPy's notation: '0:4,:', '-1'."
)
@option(
    "Output",
    "--output",
    "-o",
    metavar="FILE|-",
    callback=options.path_to_write("--output", ".npy", _SAFETENSORS, standard_output=True),
    shell_complete=paths,
    help="Write a .npy file for numpy.load, or a .safetensors file; - is a .npy file to standard output.",
)
@options.group(Edits, *CHANGES)
@options.group(Effort, *options.LIMITS)
@options.json_output
@options.verbose("Print all elements.")
@options.common
def get(
    name: str,
    index: str | None,
    output: str | None,
    source: Source,
    edits: Edits,
    effort: Effort,
) -> None:
    """Print the tensor NAME of the checkpoint in SRC, or write it to a file.

    The tensor is printed whole, however the checkpoint is sharded; --slice reads a part. NAME may be a pattern
    such as '*.norm.weight'. All matches are printed; --output needs exactly one. A .npy file has no BFloat16 and
    no 8-bit floats: they are written as Float32, which is exact. A .safetensors file keeps the type.
    Int4 tensors are printed as packed bytes. Objects of PyTorch's checkpoints, such as a learning rate,
    are printed as JSON.
    """
    report = Report(listener())
    chosen = _index(index)
    with opened(source, edits, effort, report) as checkpoint:
        if name in checkpoint.objects and name not in checkpoint:
            if output is not None or index is not None:
                raise UsageError(f"{quoted(name)} is no tensor", hint="leave out --output and --slice")
            value = checkpoint.get_object(name)
            if is_json():
                echo_json([{"name": name, "object": value}])
            else:
                _print_object(name, value)
            return
        names, objects = _names(checkpoint, name)
        if not names and (output is not None or index is not None):
            raise UsageError(f"{quoted(name)} matches no tensor", hint="leave out --output and --slice")
        if output is not None:
            if is_json():
                raise UsageError("--output and --json do not go together")
            if len(names) > 1:
                raise UsageError(
                    f"{quoted(name)} matches {plural(len(names), 'tensor')}, and --output holds one: " + listing(names)
                )
            _write(checkpoint, names[0], chosen, index, output, report)
            return
        arrays = [(checkpoint[match], _array(checkpoint[match], chosen, index)) for match in names]
        values = dict(_shown(checkpoint, objects, report))
        checkpoint.check_unchanged()
    if is_json():
        rows = [_row(tensor, array) for tensor, array in arrays]
        echo_json([*rows, *({"name": match, "object": value} for match, value in values.items())])
        return
    for tensor, array in arrays:
        if not is_quiet():
            packed = ", two values a byte" if tensor.dtype_name == INT4 else ""
            say(f"{one_line(tensor.name)}  {tensor.dtype_name}  {shape_words(tensor.shape)}{packed}")
        _print(array)
    for match, value in values.items():
        _print_object(match, value)


def _shown(checkpoint: OpenedCheckpoint, names: Sequence[str], report: Report) -> Iterator[tuple[str, Any]]:
    """The objects that a pattern matches, except those without an equivalent in JSON."""
    for name in names:
        try:
            yield name, checkpoint.get_object(name)
        except CheckpointError as error:
            if not isinstance(error.__cause__, NotPlain):
                raise
            report.warn(error.message)


def _print_object(name: str, value: Any) -> None:
    if not is_quiet():
        say(f"{one_line(name)}  object")
    click.echo(json.dumps(value, indent=2 if isinstance(value, (dict, list)) else None))


def _index(text: str | None) -> Any:
    """The index of --slice."""
    if text is None:
        return ...
    parts: list[Any] = []
    for part in text.strip().strip("[]").split(","):
        word = part.strip()
        try:
            if word == "...":
                parts.append(...)
            elif ":" in word:
                numbers = [int(number) if number.strip() else None for number in word.split(":")]
                parts.append(slice(*numbers))
            elif word:
                parts.append(int(word))
        except (TypeError, ValueError) as error:
            raise UsageError(f"--slice {text}: {word!r} is no position, range or ...", hint=_HOW) from error
    return tuple(parts)


_HOW = "write it as in NumPy: '0:4,:', '..., -1' or '::2'"


def _names(checkpoint: OpenedCheckpoint, typed: str) -> tuple[list[str], list[str]]:
    """The tensors and the objects of a name or pattern."""
    if typed in checkpoint:
        return [typed], []
    glob = Glob(typed)
    matches = [name for name in checkpoint if glob.matches(name)]
    objects = [name for name in checkpoint.objects if glob.matches(name)]
    if not matches and not objects:
        raise CheckpointError(
            f"no tensor {quoted(typed)}",
            parameter=typed,
            hint=did_you_mean(typed, [*checkpoint, *checkpoint.objects]) or "`reshard inspect SRC` lists them",
        )
    return matches, objects


def _shape(tensor: LazyTensor, chosen: Any, text: str | None) -> tuple[int, ...]:
    """The shape of the requested elements."""
    try:
        shape = select(chosen, tensor.shape).finished_shape
        if 0 in shape and 0 not in tensor.shape:
            raise IndexError("selects no element")
        return shape
    except (IndexError, ValueError) as error:
        raise UsageError(
            f"--slice {text}: {error} ({quoted(tensor.name)} has the shape {shape_words(tensor.shape)})", hint=_HOW
        ) from error


def _blocks(tensor: LazyTensor, chosen: Any) -> Iterator[Array]:
    """The elements in C order, as a NumPy type."""
    return (widen(block, tensor.dtype_name) for block in tensor.blocks(chosen))


def _array(tensor: LazyTensor, chosen: Any, text: str | None) -> Array:
    """All requested elements, for printing."""
    shape = _shape(tensor, chosen, text)
    if math.prod(shape) > _MAX_PRINTED:
        raise UsageError(
            f"{quoted(tensor.name)}: {plural(math.prod(shape), 'element')} are too many to print",
            hint="take some with --slice, or write all to a file with --output FILE.npy",
        )
    blocks = list(_blocks(tensor, chosen))
    array: Array = np.concatenate(blocks) if blocks else widen(tensor.empty((0,)), tensor.dtype_name)
    return array.reshape(shape)


def _write(
    checkpoint: OpenedCheckpoint,
    name: str,
    chosen: Any,
    text: str | None,
    path: str,
    report: Report,
) -> None:
    """Write a file atomically, from one version of the source."""
    tensor = checkpoint[name]
    shape = _shape(tensor, chosen, text)
    if path.lower().endswith(_SAFETENSORS):
        item_size, written = tensor.itemsize, tensor.dtype_name
        header, blocks = _safetensors_header(tensor, shape), tensor.blocks(chosen)
    else:
        dtype = widen(tensor.empty((0,)), tensor.dtype_name).dtype
        item_size, written = dtype.itemsize, str(dtype)
        header, blocks = _npy_header(dtype, shape), _blocks(tensor, chosen)
        if item_size != tensor.itemsize:
            report.note(
                f"{quoted(name)} is {tensor.dtype_name}, which .npy files cannot hold, and is written as Float32; "
                f"a file {_SAFETENSORS} keeps the type"
            )

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for block in blocks:
            yield block.view(np.uint8).data
        checkpoint.check_unchanged()

    try:
        if path == _STANDARD_OUTPUT:
            for part in parts():
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            return
        store_of(path).remove_dead(os.path.dirname(path))
        write_parts(path, len(header) + math.prod(shape) * item_size, parts())
    except OSError as error:
        raise writing_error(path, error) from error
    report.note(f"wrote {path}: {written} {shape_words(shape)}")


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _safetensors_header(tensor: LazyTensor, shape: tuple[int, ...]) -> bytes:
    if not can_hold("safetensors", tensor.dtype_name):
        raise UsageError(
            f"{quoted(tensor.name)} is {tensor.dtype_name}, which {_SAFETENSORS} files cannot hold",
            hint="write a .npy file",
        )
    output = OutputTensor(tensor.name, tensor.dtype_name, shape, math.prod(shape) * tensor.itemsize)
    return b"".join(part.data for part in lay_out_safetensors([output]).segments() if isinstance(part, Literal))


def _print(array: Array) -> None:
    """Print an array as NumPy does; of a long one the ends, unless -v was given."""
    if array.dtype.kind == "U":
        say("\n".join(map(str, array.reshape(-1))))
        return
    most = _MAX_PRINTED if is_verbose() else _MAX_SHOWN
    click.echo(np.array2string(array, threshold=most, separator=", ", floatmode="unique"))


def _row(tensor: LazyTensor, array: Array) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype_name,
        "shape": list(tensor.shape),
        "sliced_shape": list(array.shape),
        "values": array.tolist(),
    }
