"""The conversion functions under MindSpore's own names and signatures."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Optional

from reshard.convert import Options, transform, usable_cpus
from reshard.errors import UsageError
from reshard.forms.ranks.naming import as_prefix
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.request import Request
from reshard.storage import real
from reshard.strategies import read_group_info, read_strategy
from reshard.strategies.written import merge_pipeline
from reshard.text.report import logged

LOG = logging.getLogger("reshard")


def transform_checkpoints(
    src_checkpoints_dir: str,
    dst_checkpoints_dir: str,
    ckpt_prefix: str,
    src_strategy_file: Optional[str] = None,
    dst_strategy_file: Optional[str] = None,
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
        ReshardError: see `reshard.convert.transform`.
    """
    request = Request(
        src=str(src_checkpoints_dir),
        dst=str(dst_checkpoints_dir),
        source=read_strategy(path_of(src_strategy_file)),
        target=read_strategy(path_of(dst_strategy_file)),
        prefix=as_prefix(ckpt_prefix),
        format=checked_format(output_format),
    )
    transform(request, Options(jobs=process_num if process_num > 1 else usable_cpus()), logged())


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str],
    save_checkpoint_file_name: str,
    src_strategy_file: Optional[str] = None,
    dst_strategy_file: Optional[str] = None,
) -> None:
    """Convert a checkpoint for one rank of a target strategy.

    Args:
        rank_id: target rank.
        checkpoint_files_map: path per source rank of `rank_list_for_transform`.
        save_checkpoint_file_name: the file to write, replaced if it exists. Its suffix selects the format.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_strategy_file: the same for the target.

    Raises:
        ReshardError: see `reshard.convert.transform`.
    """
    name = str(save_checkpoint_file_name)
    request = Request(
        src={int(rank): str(path) for rank, path in checkpoint_files_map.items()},
        # The directory may be a link; in a rank tree links are refused.
        dst=os.path.join(real(os.path.dirname(name)), os.path.basename(name)),
        source=read_strategy(path_of(src_strategy_file)),
        target=read_strategy(path_of(dst_strategy_file)),
        files=(rank_id,),
        format="safetensors" if name.endswith(".safetensors") else "ckpt",
        exact_file=True,
    )
    transform(request, Options(usable_cpus()), logged())


def rank_list_for_transform(
    rank_id: int, src_strategy_file: Optional[str] = None, dst_strategy_file: Optional[str] = None
) -> list[int]:
    """The source ranks that a target rank needs, ascending; all of them are needed.

    Raises:
        ReshardError: a strategy cannot be read, or ``rank_id`` is out of range.
    """
    source, target = read_strategy(path_of(src_strategy_file)), read_strategy(path_of(dst_strategy_file))
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


def path_of(strategy: Optional[str]) -> Optional[str]:
    """A strategy's path as a text; None for an unsharded checkpoint."""
    return None if strategy is None else str(strategy)


def checked_format(name: str) -> str:
    """The format, if it is supported.

    Raises:
        UsageError: it is not.
    """
    if name not in ("ckpt", "safetensors"):
        raise UsageError(f"output_format {name!r} is neither 'ckpt' nor 'safetensors'")
    return name
