"""The conversion functions under MindSpore's own names and signatures."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from reshard.asked import Conversion, Edits, Effort, Source, Target
from reshard.convert import run
from reshard.errors import CheckpointError, UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.ranks.naming import RANK, as_prefix
from reshard.forms.registry import form_named
from reshard.forms.request import Request
from reshard.plan.edits import edit_rules
from reshard.plan.replicas import ReplicaChoice
from reshard.storage import is_directory, names_in, real
from reshard.strategies import NONE, read_group_info, read_strategy
from reshard.strategies.written import merge_pipeline
from reshard.text.messages import logged

LOG = logging.getLogger("reshard")


def transform_checkpoints(
    src_checkpoints_dir: str,
    dst_checkpoints_dir: str,
    ckpt_prefix: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
    process_num: int = 1,
    output_format: str = "ckpt",
) -> None:
    """Convert a checkpoint for every rank of a target strategy.

    Args:
        src_checkpoints_dir: tree of rank directories, one file, or a path with ``{rank}``.
        dst_checkpoints_dir: directory for ``rank_{r}/{ckpt_prefix}{r}.{output_format}``; existing targets are
            refused.
        ckpt_prefix: prefix of target file names.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_strategy_file: the same for the target.
        process_num: threads; 1, the default, means all CPUs of this process.
        output_format: ``ckpt`` or ``safetensors``.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    prefix = as_prefix(ckpt_prefix) or RANK
    asked = Conversion(
        Source(src_checkpoints_dir, strategy=strategy_of(src_strategy_file)),
        Target(
            dst_checkpoints_dir,
            strategy=strategy_of(dst_strategy_file),
            prefix=prefix,
            format=checked_format(output_format),
        ),
        effort=Effort(jobs=jobs_of(process_num)),
    )
    run(between_ranks(asked), logged())


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str],
    save_checkpoint_file_name: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
) -> None:
    """Convert a checkpoint for one rank of a target strategy.

    Args:
        rank_id: target rank.
        checkpoint_files_map: path per source rank of `rank_list_for_transform`.
        save_checkpoint_file_name: the file to write, replaced if it exists. Its suffix selects the format.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_strategy_file: the same for the target.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    name = str(save_checkpoint_file_name)
    files = {int(rank): str(path) for rank, path in checkpoint_files_map.items()}
    # The directory may be a link; in a rank tree links are refused.
    path = os.path.join(real(os.path.dirname(name)), os.path.basename(name))
    format = "safetensors" if name.endswith(".safetensors") else "ckpt"
    asked = Conversion(
        Source(os.path.dirname(name) or os.curdir, strategy=strategy_of(src_strategy_file), files=files),
        Target(path, strategy=strategy_of(dst_strategy_file), format=format, is_file=True),
        files=(rank_id,),
    )
    run(between_ranks(asked), logged())


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """The source ranks that a target rank needs, ascending; all of them are needed.

    Raises:
        ReshardError: a strategy cannot be read, or ``rank_id`` is out of range.
    """
    source, target = read_strategy(strategy_of(src_strategy_file)), read_strategy(strategy_of(dst_strategy_file))
    return list(ReplicaChoice(source, target).ranks(rank_id))


# Names since MindSpore 2.10.
convert_checkpoints = transform_checkpoints
convert_checkpoint_by_rank = transform_checkpoint_by_rank
rank_list_for_convert = rank_list_for_transform


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str) -> None:
    """Merge the pipeline stages' strategy files of a directory into one file.

    Raises:
        StrategyError: stages are missing, or copies of a stage differ.
    """
    for note in merge_pipeline(str(src_strategy_dirs), str(dst_strategy_file)):
        LOG.info("%s", note)


def restore_group_info_list(group_info_file_name: str) -> list[int]:
    """The ranks whose checkpoint is identical to that of the rank that wrote a group_info file.

    Raises:
        StrategyError: the file is not a group_info file.
    """
    return list(read_group_info(str(group_info_file_name)).restore_ranks)


def ckpt_to_safetensors(
    file_path: str,
    save_path: str | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Copy ``.ckpt`` files to safetensors files, each as it is cut.

    Args:
        file_path: a file, or a directory whose directories ``rank...`` hold files.
        save_path: target directory, with the same directories and names; by default beside the sources. Existing
            files are replaced.
        name_map: new names of tensors of several elements.
        file_name_regex: only files whose names contain a match.
        processes_num: threads; 1, the default, means all CPUs of this process.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    _change_format(file_path, save_path, name_map, file_name_regex, processes_num, "ckpt", "safetensors")


def safetensors_to_ckpt(
    file_path: str,
    save_path: str | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Copy safetensors files to ``.ckpt`` files, each as it is cut; the parameters are those of `ckpt_to_safetensors`.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    _change_format(file_path, save_path, name_map, file_name_regex, processes_num, "safetensors", "ckpt")


def _change_format(
    src: str,
    dst: str | None,
    names: Mapping[str, str] | None,
    pattern: str | None,
    threads: int,
    source: str,
    target: str,
) -> None:
    src = str(src)
    if is_directory(src):
        ranks = [name for name in names_in(src) if name.startswith("rank") and is_directory(os.path.join(src, name))]
        files = [os.path.join(rank, name) for rank in ranks for name in names_in(os.path.join(src, rank))]
        root = src
    else:
        root, name = os.path.split(src)
        files = [name]
    chosen = [f for f in files if f.endswith(f".{source}") and re.search(pattern or "", os.path.basename(f))]
    if not chosen:
        raise CheckpointError(f"{src}: no .{source} file to convert", file=src, hint="check file_name_regex")
    for name in chosen:
        place = os.path.join(root if dst is None else str(dst), os.path.splitext(name)[0])
        path = os.path.join(real(os.path.dirname(place)), f"{os.path.basename(place)}.{target}")
        asked = Conversion(
            Source(root or os.curdir, strategy=NONE, files={0: os.path.join(root, name)}),
            Target(path, strategy=NONE, format=target, is_file=True),
            Edits(exactly=tuple(names.items()) if names else ()),
            Effort(jobs=jobs_of(threads)),
            (0,),
        )
        run(between_ranks(asked), logged())


def between_ranks(asked: Conversion) -> Request:
    """The request of a conversion from ranks to ranks, whose strategies are named."""
    source, target = read_strategy(asked.source.strategy), read_strategy(asked.target.strategy)
    ranks = form_named(DEFAULT_FORM)
    return Request(asked, ranks, source, ranks, target, edit_rules(asked.source.path, asked.edits))


def strategy_of(path: str | None) -> str:
    """A strategy's path as a text; ``none`` for an unsharded checkpoint."""
    return NONE if path is None else str(path)


def jobs_of(threads: int) -> int | None:
    """MindSpore's number of threads; its default, 1, means all CPUs."""
    return threads if threads > 1 else None


def checked_format(name: str) -> str:
    """The format, if it is supported.

    Raises:
        UsageError: it is not.
    """
    if name not in ("ckpt", "safetensors"):
        raise UsageError(f"output_format {name!r} is neither 'ckpt' nor 'safetensors'")
    return name
