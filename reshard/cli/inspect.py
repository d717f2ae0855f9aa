"""inspect: what is in a checkpoint file or a rank tree, from headers and names alone."""

from __future__ import annotations

import os

import click

from reshard.checkpoints import FileHandles, find_checkpoints, read_index
from reshard.cli import completion, options
from reshard.cli.command import command
from reshard.cli.output import echo_json, table
from reshard.wording import byte_size, number_ranges, plural


@command(
    "inspect",
    """
reshard inspect ckpt/
reshard inspect ckpt/rank_0/net-3_10.ckpt
""",
)
@click.argument("path", shell_complete=completion.paths)
@options.json_output
@options.debug
def inspect(path: str, as_json: bool) -> None:
    """Show what is in a checkpoint file, or the ranks and steps of a rank tree, at PATH."""
    if not os.path.lexists(path) or os.path.isdir(path) or "{rank}" in path:
        _inspect_tree(path, as_json)
    else:
        _inspect_file(path, as_json)


def _inspect_file(path: str, as_json: bool) -> None:
    with FileHandles() as handles:
        index = read_index(handles, path)
    tensors = list(index.tensors.values())
    if as_json:
        echo_json(
            {
                "file": path,
                "format": index.format,
                "bytes": index.size,
                "crc": index.crc,
                "metadata": dict(index.metadata),
                "tensors": [
                    {
                        "name": tensor.name,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "bytes": tensor.nbytes,
                        "records": len(tensor.extents),
                    }
                    for tensor in tensors
                ],
            }
        )
        return
    crc = "" if index.crc is None else f", CRC {index.crc:08x}"
    click.echo(f"{path}: {index.format}, {byte_size(index.size)}, {plural(len(tensors), 'tensor')}{crc}")
    rows = [[t.name, t.dtype, str(list(t.shape)), byte_size(t.nbytes)] for t in tensors]
    table("", ["tensor", "dtype", "shape", "size"], rows)


def _inspect_tree(path: str, as_json: bool) -> None:
    tree = find_checkpoints(path)
    steps: list[dict[str, object]] = []
    rows = []
    for step in tree.steps:
        files = sorted((file for file in tree.files if file.step == step), key=lambda file: (file.rank, file.path))
        ranks = sorted({file.rank for file in files})
        size = sum(os.stat(file.path).st_size for file in files)
        name = str(step) if step is not None else None
        steps.append({"step": name, "ranks": ranks, "files": [file.path for file in files], "bytes": size})
        rows.append([name or "-", number_ranges(ranks), str(len(files)), byte_size(size)])
    if as_json:
        echo_json({"path": path, "ranks": list(tree.ranks), "steps": steps})
        return
    held = len({file.rank for file in tree.files})
    click.echo(f"{path}: {plural(held, 'rank')}, {plural(len(steps), 'step')}")
    table("", ["step", "ranks", "files", "size"], rows)
