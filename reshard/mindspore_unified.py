"""The functions for unified weights under MindSpore's own names and signatures, as far as they convert files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Callable, Optional, Union

from reshard.convert import Options, transform, usable_cpus
from reshard.errors import UsageError
from reshard.forms.full import UNIFIED
from reshard.forms.registry import form_named, form_of
from reshard.forms.target import FileId
from reshard.mindspore_api import LOG, checked_format, path_of
from reshard.plan.edits import Edits
from reshard.plan.request import Request
from reshard.storage import real
from reshard.strategies import Strategy, read_strategy
from reshard.text.globs import pattern_of
from reshard.text.messages import listing
from reshard.text.name_filters import Filters
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight
from reshard.text.report import logged


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
    source = read_strategy(path_of(src_strategy_file))
    names = _chosen(source, choice_func)
    dropped = [name for name, new in names.items() if new is None]
    renamed = any(new is not None and new != name for name, new in names.items())
    request = Request(
        src=str(src_dir),
        dst=str(dst_dir),
        source=source,
        target=Strategy.none(),
        format="safetensors",
        file_suffix=file_suffix,
        # The words of the command line, so that it can go on, as far as they say it.
        filters=Filters(exclude=() if renamed else tuple(map(pattern_of, dropped))),
        edits=Edits(exactly=tuple(names.items()), words=None) if renamed else None,
        to=UNIFIED,
    )
    jobs = max(1, min(max_process_num, usable_cpus()))
    transform(request, Options(jobs=jobs, share=_share(split_dst_file)), logged())


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
    src, target = str(unified_safetensors_dir), read_strategy(path_of(predict_strategy))
    form = form_of(src)
    if form_named(form).options.cut:
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
            dst=os.path.join(real(dst_safetensors_dir), f"rank_{rank}", f"net.{checked_format(output_format)}"),
            source=Strategy.none(),
            target=target,
            files=(FileId(0 if target.is_none else rank),),
            format=output_format,
            exact_file=True,
            form=form,
            edits=_in_network(name_map),
        )
        summary = transform(request, Options(jobs=max(1, min(max_process_num, usable_cpus()))), logged())
        listed = frozenset(target.parameters)
        missing = [name for name in summary.missing if is_weight(name, listed)]
        if missing:
            LOG.warning("%s", f"in {target.path}, but not in {src}: {listing(missing)}")
    return True


def _chosen(source: Strategy, choice: Optional[Callable[[str], Union[bool, str]]]) -> dict[str, Optional[str]]:
    """New names of parameters, and None for those that are left out: by choice, or as accumulated gradients are."""
    if choice is not None and source.is_none:
        raise UsageError(
            "choice_func is asked for the parameters that src_strategy_file lists, and there is none",
            hint="leave it out; reshard convert has --include, --exclude and --rename",
        )
    names: dict[str, Optional[str]] = {}
    for name in source.parameters:
        if name.startswith(ACCUMULATED_GRADIENTS):
            names[name] = None
            continue
        chosen = True if choice is None else choice(name)
        if not isinstance(chosen, (bool, str)):
            raise UsageError(f"choice_func answers {chosen!r} for {name!r}", hint="let it answer True, False or a name")
        if isinstance(chosen, str) and not chosen:
            raise UsageError(
                f"choice_func answers an empty name for {name!r}", hint="let it answer True, False or a name"
            )
        if chosen is not True:
            names[name] = chosen if isinstance(chosen, str) else None
    return names


def _in_network(name_map: Optional[Mapping[str, str]]) -> Optional[Edits]:
    """The names that a network has, of a map from them to those in files."""
    if not name_map:
        return None
    names: dict[str, Optional[str]] = {}
    for new, name in name_map.items():
        if names.setdefault(name, new) != new:
            raise UsageError(
                f"name_map: {names[name]!r} and {new!r} are both {name!r} in the files",
                hint="give one of them, and copy the other from it after loading",
            )
    return Edits(exactly=tuple(names.items()), words=None)


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
