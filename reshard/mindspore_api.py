"""The conversion functions under MindSpore's own names and signatures."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Callable, Optional, Union

from reshard.checkpoints.forms import form_of
from reshard.checkpoints.full import HUGGINGFACE, UNIFIED
from reshard.checkpoints.rank_tree.naming import as_prefix
from reshard.convert import Options, transform, usable_cpus
from reshard.errors import UsageError
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.request import Request
from reshard.strategies import Strategy, merge_pipeline, read_group_info, read_strategy
from reshard.text.globs import pattern_of
from reshard.text.messages import listing
from reshard.text.name_filters import Filters
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight
from reshard.text.report import Report

_LOG = logging.getLogger("reshard")


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
        dst_checkpoints_dir: gets ``rank_{r}/{ckpt_prefix}{r}.{output_format}``; existing targets are
            refused.
        ckpt_prefix: target file names begin so.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_strategy_file: likewise for the target.
        process_num: threads; 1, the default, takes all CPUs this process may use.
        output_format: ``ckpt`` or ``safetensors``.

    Raises:
        ReshardError: see `reshard.convert.transform`.
    """
    request = Request(
        src=str(src_checkpoints_dir),
        dst=str(dst_checkpoints_dir),
        source=read_strategy(_path(src_strategy_file)),
        target=read_strategy(_path(dst_strategy_file)),
        prefix=as_prefix(ckpt_prefix),
        format=_format(output_format),
    )
    transform(request, Options(jobs=process_num if process_num > 1 else usable_cpus()), _logged())


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
        checkpoint_files_map: path per source rank; those of `rank_list_for_transform` suffice.
        save_checkpoint_file_name: exactly the file to write; replaced if it exists. Its ending
            decides the format.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_strategy_file: likewise for the target.

    Raises:
        ReshardError: see `reshard.convert.transform`.
    """
    name = str(save_checkpoint_file_name)
    request = Request(
        src={int(rank): str(path) for rank, path in checkpoint_files_map.items()},
        # The directory may be a link here; in a tree of ranks it may not.
        dst=os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name)),
        source=read_strategy(_path(src_strategy_file)),
        target=read_strategy(_path(dst_strategy_file)),
        ranks=(rank_id,),
        format="safetensors" if name.endswith(".safetensors") else "ckpt",
        exact_file=True,
    )
    transform(request, Options(), _logged())


def rank_list_for_transform(
    rank_id: int, src_strategy_file: Optional[str] = None, dst_strategy_file: Optional[str] = None
) -> list[int]:
    """The source ranks that a target rank needs, ascending; none of them could be left out.

    Raises:
        ReshardError: a strategy cannot be read, or ``rank_id`` is out of range.
    """
    source, target = read_strategy(_path(src_strategy_file)), read_strategy(_path(dst_strategy_file))
    return list(ReplicaChoice(source, target).ranks(rank_id))


# Since MindSpore 2.10 they are called so, too.
convert_checkpoints = transform_checkpoints
convert_checkpoint_by_rank = transform_checkpoint_by_rank
rank_list_for_convert = rank_list_for_transform


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str) -> None:
    """Merge the pipeline stages' strategy files of a directory into one file.

    Raises:
        StrategyError: stages are missing or copies of one disagree.
    """
    for note in merge_pipeline(str(src_strategy_dirs), str(dst_strategy_file)):
        _LOG.info("%s", note)


def restore_group_info_list(group_info_file_name: str) -> list[int]:
    """The ranks whose checkpoint is identical to that of the rank that wrote a group_info file.

    Raises:
        StrategyError: it is no group_info file.
    """
    return list(read_group_info(str(group_info_file_name)).restore_ranks)


def unified_safetensors(
    src_dir: str,
    src_strategy_file: Optional[str],
    dst_dir: str,
    merge_with_redundancy: bool = True,
    file_suffix: Optional[str] = None,
    max_process_num: int = 64,
    choice_func: Optional[Callable[[str], Union[bool, str]]] = None,
    split_dst_file: Sequence[int] = (),
) -> None:
    """Convert the checkpoint of a training job to a directory of unified weights.

    Args:
        src_dir: tree of rank directories, one file, or a path with ``{rank}``.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_dir: gets ``part0.safetensors`` and so on, ``hyper_param.safetensors`` where there is something for it,
            and ``param_name_map.json`` when all of them are there; existing targets are refused.
        merge_with_redundancy: without effect: the files themselves tell whether they are de-duplicated.
        file_suffix: only source files whose stem ends so.
        max_process_num: threads at the most.
        choice_func: asked for every parameter by its name: False leaves it out, a text is its new name.
        split_dst_file: which of how many runs this is, as in ``(1, 4)``; the last one to end writes the map.

    Raises:
        ReshardError: see `reshard.convert.transform`.
    """
    del merge_with_redundancy
    source = read_strategy(_path(src_strategy_file))
    request = Request(
        src=str(src_dir),
        dst=str(dst_dir),
        source=source,
        target=Strategy.none(),
        format="safetensors",
        file_suffix=file_suffix,
        filters=Filters(exclude=_dropped(source, choice_func)),
        to=UNIFIED,
    )
    jobs = max(1, min(max_process_num, usable_cpus()))
    transform(request, Options(jobs=jobs, share=_share(split_dst_file)), _logged())


def load_distributed_checkpoint(
    network: None,
    checkpoint_filenames: None = None,
    predict_strategy: Optional[str] = None,
    train_strategy_filename: None = None,
    strict_load: bool = False,
    dec_key: None = None,
    dec_mode: str = "AES-GCM",
    format: str = "ckpt",
    unified_safetensors_dir: Optional[str] = None,
    dst_safetensors_dir: Optional[str] = None,
    rank_id: Optional[int] = None,
    output_format: str = "safetensors",
    name_map: Optional[Mapping[str, str]] = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
) -> bool:
    """Write the files from which the ranks of a job load a directory of full weights.

    Loading into a network needs MindSpore; here ``network`` is None and ``format`` is ``safetensors``.

    Args:
        network: None.
        checkpoint_filenames: None.
        predict_strategy: strategy file or directory; None for weights that are not cut.
        train_strategy_filename: None.
        strict_load: False.
        dec_key: None.
        dec_mode: its default.
        format: ``safetensors``.
        unified_safetensors_dir: directory of unified or Hugging Face weights.
        dst_safetensors_dir: gets ``rank_{rank_id}/net.{output_format}``; replaced if it is there.
        rank_id: whose file is written; None for those of all ranks.
        output_format: ``ckpt`` or ``safetensors``.
        name_map: the name in the files of every parameter that is to be called otherwise.
        max_process_num: threads at the most.
        return_param_dict: False.

    Returns:
        True.

    Raises:
        ReshardError: see `reshard.convert.transform`.
    """
    if network is not None or return_param_dict:
        raise UsageError(
            "load_distributed_checkpoint: loading into a network, or into memory, needs MindSpore",
            hint="pass network=None and dst_safetensors_dir, and load what is written there: "
            "mindspore.load_checkpoint('rank_0/net.safetensors')",
        )
    if format != "safetensors":
        raise UsageError(
            f"load_distributed_checkpoint: format={format!r} loads files of ranks into a network, which needs "
            "MindSpore",
            hint="pass format='safetensors' and unified_safetensors_dir; transform_checkpoints converts files of ranks",
        )
    for name, given in {
        "checkpoint_filenames": checkpoint_filenames is not None,
        "train_strategy_filename": train_strategy_filename is not None,
        "strict_load": strict_load,
        "dec_key": dec_key is not None,
        "dec_mode": dec_mode != "AES-GCM",
    }.items():
        if given:
            raise UsageError(f"load_distributed_checkpoint: {name} goes with format='ckpt'", hint="leave it out")
    if unified_safetensors_dir is None or dst_safetensors_dir is None:
        raise UsageError(
            "load_distributed_checkpoint: unified_safetensors_dir or dst_safetensors_dir is missing", hint="pass both"
        )
    if predict_strategy is not None and not isinstance(predict_strategy, (str, os.PathLike)):
        raise UsageError(
            "load_distributed_checkpoint: predict_strategy is no path", hint="pass the file that it was read from"
        )
    src, target = str(unified_safetensors_dir), read_strategy(_path(predict_strategy))
    form = form_of(src)
    if form not in (UNIFIED, HUGGINGFACE):
        raise UsageError(
            f"{src}: holds no unified weights",
            file=src,
            hint="unified_safetensors makes them; transform_checkpoints converts files of ranks",
        )
    # Weights that are not cut are the same for whichever rank.
    ranks = range(target.device_count) if rank_id is None else (rank_id,)
    for rank in ranks:
        request = Request(
            src=src,
            dst=os.path.join(os.path.realpath(dst_safetensors_dir), f"rank_{rank}", f"net.{_format(output_format)}"),
            source=Strategy.none(),
            target=target,
            ranks=(0 if target.is_none else rank,),
            format=output_format,
            exact_file=True,
            form=form,
        )
        summary = transform(request, Options(jobs=max(1, min(max_process_num, usable_cpus()))), _logged())
        missing = [name for name in summary.missing if is_weight(name)]
        if missing:
            _LOG.warning("%s", f"in {target.path}, but not in {src}: {listing(missing)}")
    return True


def _dropped(source: Strategy, choice: Optional[Callable[[str], Union[bool, str]]]) -> list[str]:
    """Patterns of the parameters that are not wanted: accumulated gradients, and what the user leaves out."""
    if choice is not None and source.is_none:
        raise UsageError(
            "choice_func is asked for the parameters that src_strategy_file lists, and there is none",
            hint="leave it out; reshard convert has --include and --exclude",
        )
    dropped = []
    for name in source.parameters:
        chosen = True if choice is None else choice(name)
        if not isinstance(chosen, (bool, str)):
            raise UsageError(f"choice_func answers {chosen!r} for {name!r}", hint="let it answer True, False or a name")
        if chosen is False or name.startswith(ACCUMULATED_GRADIENTS):
            dropped.append(pattern_of(name))
    return dropped


def _share(split: Sequence[int]) -> Optional[tuple[int, int]]:
    """Which of how many runs, counted from 0, of MindSpore's pair, which counts from 1."""
    if not split:
        return None
    if len(split) != 2 or not 1 <= split[0] <= split[1]:
        raise UsageError(
            f"split_dst_file {tuple(split)} is no pair such as (1, 4)",
            hint="pass which of how many runs this is, counted from 1",
        )
    return split[0] - 1, split[1]


def _logged() -> Report:
    """Warnings and notes go to the logger ``reshard``; Python shows the warnings unless told otherwise."""
    return Report(lambda kind, text: _LOG.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", text))


def _path(strategy: Optional[str]) -> Optional[str]:
    return None if strategy is None else str(strategy)


def _format(name: str) -> str:
    if name not in ("ckpt", "safetensors"):
        raise UsageError(f"output_format {name!r} is neither 'ckpt' nor 'safetensors'")
    return name
