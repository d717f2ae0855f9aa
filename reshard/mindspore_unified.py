"""MindSpore's functions for unified weights, under their own names and signatures; only for files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from reshard.asked import Conversion, Edits, Effort, Source, Target
from reshard.convert import run
from reshard.defaults import usable_cpus
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.full.form import UNIFIED
from reshard.forms.registry import form_named, form_of
from reshard.forms.request import Request
from reshard.mindspore_api import LOG, checked_format, strategy_of
from reshard.plan.edits import edit_rules
from reshard.storage import real
from reshard.strategies import Strategy, read_strategy
from reshard.text.globs import pattern_of
from reshard.text.messages import listing, logged
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight

# Parameters of MindSpore's `load_distributed_checkpoint` with one possible value here.
_ONLY = {
    "network": None,
    "return_param_dict": False,
    "format": "safetensors",
    "checkpoint_filenames": None,
    "train_strategy_filename": None,
    "strict_load": False,
    "dec_key": None,
    "dec_mode": "AES-GCM",
}


def unified_safetensors(
    src_dir: str,
    src_strategy_file: str | None,
    dst_dir: str,
    merge_with_redundancy: bool = True,
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: Callable[[str], bool | str] | None = None,
    split_dst_file: Sequence[int] = (),
) -> None:
    """Convert the checkpoint of a training job to a directory of unified weights.

    Args:
        src_dir: tree of rank directories, one file, or a path with ``{rank}``.
        src_strategy_file: strategy file or directory; None for an unsharded checkpoint.
        dst_dir: directory for ``part0.safetensors`` and so on, ``hyper_param.safetensors`` if there are such values,
            and last ``param_name_map.json``; existing targets are refused.
        merge_with_redundancy: no effect: files record whether they are de-duplicated.
        file_suffix: suffix of the stems of source files to read.
        max_process_num: maximum number of threads.
        choice_func: called with every parameter's name: False skips it, a string is its new name.
        split_dst_file: number of this run and of all runs, as in ``(1, 4)``; the last one to end writes the map.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    del merge_with_redundancy
    strategy = strategy_of(src_strategy_file)
    source = read_strategy(strategy)
    names = _chosen(source, choice_func)
    dropped = [name for name, new in names.items() if new is None]
    renamed = any(new is not None and new != name for name, new in names.items())
    # As options of the command line where possible, so that `reshard resume` works.
    exclude = () if renamed else tuple(map(pattern_of, dropped))
    asked = Conversion(
        Source(src_dir, strategy=strategy, file_suffix=file_suffix),
        Target(dst_dir, form=UNIFIED),
        Edits(exclude=exclude, exactly=tuple(names.items()) if renamed else ()),
        _effort(max_process_num),
        shard=_share(split_dst_file),
    )
    ranks, edits = form_named(DEFAULT_FORM), edit_rules(asked.source.path, asked.edits)
    run(Request(asked, ranks, source, form_named(UNIFIED), Strategy.none(), edits), logged())


def load_distributed_checkpoint(
    network: None,
    checkpoint_filenames: None = None,
    predict_strategy: str | None = None,
    train_strategy_filename: None = None,
    strict_load: bool = False,
    dec_key: None = None,
    dec_mode: str = "AES-GCM",
    format: str = "ckpt",
    unified_safetensors_dir: str | None = None,
    dst_safetensors_dir: str | None = None,
    rank_id: int | None = None,
    output_format: str = "safetensors",
    name_map: Mapping[str, str] | None = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
) -> bool:
    """Convert a directory of full weights to files for the ranks of a job.

    Loading into a network needs MindSpore; here ``network`` is None and ``format`` is ``safetensors``.

    Args:
        network: None.
        checkpoint_filenames: None.
        predict_strategy: strategy file or directory; None for full weights.
        train_strategy_filename: None.
        strict_load: False.
        dec_key: None.
        dec_mode: its default.
        format: ``safetensors``.
        unified_safetensors_dir: directory of unified or Hugging Face weights.
        dst_safetensors_dir: directory for ``rank_{rank_id}/net.{output_format}``, replaced if it exists.
        rank_id: the rank to write; None for all ranks.
        output_format: ``ckpt`` or ``safetensors``.
        name_map: new names of parameters, mapped to their names in the files.
        max_process_num: maximum number of threads.
        return_param_dict: False.

    Returns:
        True.

    Raises:
        ReshardError: see `reshard.convert.run`.
    """
    given = locals()
    for name, only in _ONLY.items():
        if given[name] != only:
            raise UsageError(
                f"load_distributed_checkpoint: another {name} than {only!r} needs MindSpore",
                hint="this function writes files, which mindspore.load_checkpoint('rank_0/net.safetensors') loads; "
                "transform_checkpoints converts files of ranks, and reshard decrypt those with a key",
            )
    if unified_safetensors_dir is None or dst_safetensors_dir is None:
        raise UsageError(
            "load_distributed_checkpoint: unified_safetensors_dir or dst_safetensors_dir is missing", hint="pass both"
        )
    if predict_strategy is not None and not isinstance(predict_strategy, (str, os.PathLike)):
        raise UsageError(
            "load_distributed_checkpoint: predict_strategy is not a path", hint="pass the path of its file"
        )
    src, target = str(unified_safetensors_dir), read_strategy(strategy_of(predict_strategy))
    form = form_of(src)
    if form.options.cut:
        raise UsageError(
            f"{src}: holds files of ranks, not unified weights",
            file=src,
            hint="unified_safetensors makes them; transform_checkpoints converts files of ranks",
        )
    # Full weights are the same for every rank.
    ranks = range(target.device_count) if rank_id is None else (rank_id,)
    # Networks for inference have parameters that are in no file, such as caches of keys and values.
    asked_edits = Edits(allow_missing=("*",), exactly=_in_network(name_map))
    edits = edit_rules(src, asked_edits)
    for rank in ranks:
        path = os.path.join(real(dst_safetensors_dir), f"rank_{rank}", f"net.{checked_format(output_format)}")
        asked = Conversion(
            Source(src),
            Target(path, format=output_format, is_file=True),
            asked_edits,
            _effort(max_process_num),
            (0 if target.is_none else rank,),
        )
        request = Request(asked, form, Strategy.none(), form_named(DEFAULT_FORM), target, edits)
        summary = run(request, logged()).summary
        parameters = frozenset(target.parameters)
        missing = [name for name in summary.missing if is_weight(name, parameters)]
        if missing:
            LOG.warning("%s", f"in {target.path}, but not in {src}: {listing(missing)}")
    return True


def _chosen(source: Strategy, choice: Callable[[str], bool | str] | None) -> dict[str, str | None]:
    """New names of parameters; None for skipped ones and accumulated gradients."""
    if choice is not None and source.is_none:
        raise UsageError(
            "choice_func needs src_strategy_file, which lists the parameters",
            hint="remove choice_func; reshard convert has --include, --exclude and --rename",
        )
    names: dict[str, str | None] = {}
    for name in source.parameters:
        if name.startswith(ACCUMULATED_GRADIENTS):
            names[name] = None
            continue
        chosen = True if choice is None else choice(name)
        if not isinstance(chosen, (bool, str)):
            raise UsageError(f"choice_func returns {chosen!r} for {name!r}", hint="return True, False or a name")
        if isinstance(chosen, str) and not chosen:
            raise UsageError(f"choice_func returns an empty name for {name!r}", hint="return True, False or a name")
        if chosen is not True:
            names[name] = chosen if isinstance(chosen, str) else None
    return names


def _effort(threads: int) -> Effort:
    return Effort(jobs=max(1, min(threads, usable_cpus())))


def _in_network(name_map: Mapping[str, str] | None) -> tuple[tuple[str, str | None], ...]:
    """The renaming from names in files to names in the network."""
    names: dict[str, str | None] = {}
    for new, name in (name_map or {}).items():
        if names.setdefault(name, new) != new:
            raise UsageError(
                f"name_map: {names[name]!r} and {new!r} are both {name!r} in the files",
                hint="pass one of them, and copy the other after loading",
            )
    return tuple(names.items())


def _share(split: Sequence[int]) -> tuple[int, int] | None:
    """Number of this run, from 0, and of all runs; MindSpore's pair counts from 1."""
    if not split:
        return None
    if len(split) != 2 or not 1 <= split[0] <= split[1]:
        raise UsageError(
            f"split_dst_file {tuple(split)} is not a pair such as (1, 4)",
            hint="pass the number of this run, from 1, and the number of runs",
        )
    return split[0] - 1, split[1]
