"""What --args states of a run: its arguments, and the parameter groups of its optimizer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.asked import Target
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import StoredObject
from reshard.errors import CheckpointError
from reshard.forms.megatron.arguments import ARGUMENTS, arguments_of, configuration_of
from reshard.forms.megatron.common import Common, common_of, read_common, stored_in
from reshard.forms.megatron.iterations import choose
from reshard.forms.megatron.keys import LEGACY
from reshard.forms.pytorch.dcp import read_metadata
from reshard.forms.pytorch.form import METADATA
from reshard.names.sizes import Configuration
from reshard.storage import is_directory, read_json, status_at
from reshard.strategies import NONE, target_named
from reshard.text.messages import Report
from reshard.text.names import TRAINING_STEP

OPTIMIZER = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
"""Arguments of the optimizer, without which no groups can be made."""

_GROUPS = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/")
_MAX_JSON = 16 << 20


def numbers_layers(args: Mapping[str, Any]) -> bool:
    """Whether Megatron's keys have the numbers of layers with these arguments, in place of one tensor of all layers."""
    frequencies = (args.get("moe_layer_freq"), args.get("linear_attention_freq"))
    if any(isinstance(each, (list, tuple)) or (type(each) is int and each > 1) for each in frequencies):
        return True
    return bool(args.get("hetereogenous_dist_checkpoint") or args.get("heterogeneous_layers_config_path"))


class Stated(NamedTuple):
    """What --args states: the arguments of a JSON file, or the common state and the objects of a checkpoint."""

    args: Mapping[str, Any]
    common: Common | None = None
    objects: Mapping[str, StoredObject] = {}

    @property
    def all_args(self) -> Mapping[str, Any]:
        """The arguments of either."""
        return self.args if self.common is None else self.common.args


def stated_arguments(path: str, handles: FileHandles) -> Stated:
    hint = "name a JSON file of Megatron's arguments, or a checkpoint of Megatron"
    status = status_at(path)
    if status is None:
        raise CheckpointError(f"{path}: does not exist (--args)", file=path, hint=hint)
    directory = is_directory(path)
    if not directory and path.endswith(".json"):
        return Stated(read_json(path, _MAX_JSON, CheckpointError, hint) or {})
    objects: dict[str, StoredObject] = {}
    if directory:
        place = choose(path, "latest", Report()).path
        common, metadata = common_of(place, handles), os.path.join(place, METADATA)
        if status_at(metadata) is not None:
            for name, record in read_metadata([metadata]).objects.items():
                objects[name] = stored_in(place, record)
    else:
        common = read_common(StoredObject(path, 0, status.size, True), handles)
    if common is None or not common.args:
        raise CheckpointError(f"{path}: holds no arguments of Megatron (--args)", file=path, hint=hint)
    return Stated({}, common, objects)


def groups_among(objects: Mapping[str, StoredObject], handles: FileHandles) -> list[Mapping[str, Any]]:
    """The parameter groups of a distributed optimizer, where the common state does not have them."""
    groups: list[Mapping[str, Any]] = []
    for name, stored in objects.items():
        if _GROUPS.match(name):
            held = read_common(stored, handles).state.get("param_groups")
            groups += [group for group in held if isinstance(group, Mapping)] if isinstance(held, list) else []
    return groups


_SHARDS = 16


class MegatronTraining:
    """The facet of the form; see `forms.form.RecordedTraining`."""

    counters: tuple[str, ...] = (TRAINING_STEP,)

    def configuration(self, src: str, step: str, args: str | None) -> Mapping[str, object] | None:
        with FileHandles() as handles:
            common = common_of(choose(src, step, Report()).path, handles)
            stated = {} if args is None else stated_arguments(args, handles).all_args
        if common is None or not (common.args or stated):
            return None
        return Configuration(configuration_of({**common.args, **stated}, common.path), common.path)

    def stated_configuration(self, args: str) -> Mapping[str, object]:
        with FileHandles() as handles:
            stated = stated_arguments(args, handles)
        return Configuration(configuration_of(stated.all_args, args), args, ARGUMENTS)

    def table_options(self, asked: Target, config: Mapping[str, object] | None) -> Mapping[str, str]:
        """Whether keys have the numbers of layers and norms are beside layers, where this is known."""
        options: dict[str, str] = {}
        args: dict[str, Any] = {} if config is None else arguments_of(config)
        if asked.args is not None:
            with FileHandles() as handles:
                args.update(stated_arguments(asked.args, handles).all_args)
        if args:
            numbered = asked.format == LEGACY or numbers_layers(args)
            options["layer_keys"] = "numbered" if numbered else "stacked"
        if args.get("transformer_impl") == "local":
            # Layers without Transformer Engine have norms of their own, under names that depend on attention.
            latent = bool(args.get("multi_latent_attention"))
            options["experts_norm"] = "beside" if latent else "inside"
            options.update(dict.fromkeys(("dense_norm", "mla_norms"), "beside") if latent else {})
        return options

    def default_strategy(self, asked: Target) -> str | None:
        return NONE if asked.format == LEGACY else target_named(None, _SHARDS)

    def sizes_note(self, src: str, step: str) -> str:
        from reshard.forms.megatron.sizes import sizes_note

        return sizes_note(src, step)
