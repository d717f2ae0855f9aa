"""Where the arguments, groups and schedule of a checkpoint to be written are from: --args, the source, config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.errors import CheckpointError
from reshard.forms.megatron.common import Common, common_of, read_common
from reshard.forms.megatron.form import MEGATRON, choose
from reshard.storage import is_directory, read_json, status_at
from reshard.text.messages import Report

OPTIMIZER = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
"""Arguments of the optimizer, without which no groups can be made."""

# Groups of a distributed optimizer, where the common state does not have them.
_GROUPS = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/")
_MAX_JSON = 16 << 20


class Origin(NamedTuple):
    """Where what is written beside tensors is from.

    Attributes:
        own: the common state of a source of Megatron.
        named: that of the checkpoint that --args names.
        args: arguments that one of them records, with those of a JSON file in their place.
        groups: parameter groups; none where settings of the optimizer are stated in a JSON file.
        schedule: the state of the learning rate's schedule, likewise.
        config: the model's config.json, where nothing of Megatron has its sizes.
    """

    own: Optional[Common]
    named: Optional[Common]
    args: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    schedule: Optional[Mapping[str, Any]]
    config: Optional[Mapping[str, object]]


def origin_of(source: Checkpoint, args: Optional[str], config: Optional[str], handles: FileHandles) -> Origin:
    """Where what is written beside tensors is from.

    Args:
        source: the source, without edits.
        args: the file or directory of --args.
        config: the model's configuration, or its directory.
        handles: open files.

    Raises:
        InputError: a file is damaged, or holds no arguments.
    """
    own = common_of(source.place, handles) if source.form == MEGATRON else None
    values, named = ({}, None) if args is None else stated_arguments(args, handles)
    recorded = named or own
    keys = None
    if recorded is None and config is not None:
        from reshard.names import read_config

        keys = read_config(config)
    groups: list[Mapping[str, Any]] = []
    schedule = None
    # Settings that are stated replace those of the source.
    if recorded is not None and values.keys().isdisjoint(OPTIMIZER):
        groups = recorded.groups or (_groups_among(source.objects, handles) if recorded is own else [])
        schedule = recorded.state.get("opt_param_scheduler")
    return Origin(
        own,
        named,
        {**({} if recorded is None else recorded.args), **values},
        groups,
        schedule if isinstance(schedule, dict) else None,
        keys,
    )


def stated_arguments(path: str, handles: FileHandles) -> tuple[Mapping[str, Any], Optional[Common]]:
    """The arguments of a JSON file, or the common state of a checkpoint."""
    hint = "name a JSON file of Megatron's arguments, or a checkpoint of Megatron"
    status = status_at(path)
    if status is None:
        raise CheckpointError(f"{path}: does not exist (--args)", file=path, hint=hint)
    directory = is_directory(path)
    if not directory and path.endswith(".json"):
        return read_json(path, _MAX_JSON, CheckpointError, hint) or {}, None
    if directory:
        common = common_of(choose(path, "latest", Report()).path, handles)
    else:
        common = read_common(StoredObject(path, 0, status.size, True), handles)
    if common is None or not common.args:
        raise CheckpointError(f"{path}: holds no arguments of Megatron (--args)", file=path, hint=hint)
    return {}, common


def _groups_among(objects: Mapping[str, StoredObject], handles: FileHandles) -> list[Mapping[str, Any]]:
    groups: list[Mapping[str, Any]] = []
    for name, stored in objects.items():
        if _GROUPS.match(name):
            held = read_common(stored, handles).state.get("param_groups")
            groups += [group for group in held if isinstance(group, Mapping)] if isinstance(held, list) else []
    return groups
