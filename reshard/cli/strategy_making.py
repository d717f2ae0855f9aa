"""Shared parts of `strategy make`, `derive` and `rules`: sizes, the target's options, output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import click

from reshard._version import __version__
from reshard.cli import completion, options
from reshard.cli.command import option
from reshard.cli.output import echo_json, is_quiet, say, show_notes
from reshard.errors import UsageError
from reshard.strategies import Strategy
from reshard.text.wording import plural, rank_ranges

if TYPE_CHECKING:
    from reshard.strategies.rules import LayoutRules, MadeStage, ModelTensors, TargetRun

F = TypeVar("F", bound=Callable[..., Any])

SIZES = "dp=N,mp=N"


class SizesType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Devices per kind of parallelism: ``dp=2,mp=4``."""

    name = "sizes"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The sizes."""
        from reshard.strategies.rules import AxisSizes, parse_sizes

        if isinstance(value, AxisSizes):
            return value
        try:
            return parse_sizes(str(value))
        except UsageError as error:
            self.fail(error.message, param, ctx)


class _LayersType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Layers per stage: ``8,8``."""

    name = "layers"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\s*[0-9]{1,6}(\s*,\s*[0-9]{1,6})*\s*", str(value)):
            self.fail(f"{value!r} is not a list of layer counts such as 8,8", param, ctx)
        return tuple(int(number) for number in str(value).split(","))


class _ShardsType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Optimizer shards per weight: ``off``, ``-1`` or a number."""

    name = "shards"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> int:
        """0 for off."""
        if value == "off":
            return 0
        if re.fullmatch(r"-1|[1-9][0-9]{0,6}", str(value)):
            return int(value)
        self.fail(f"{value!r} is neither off, nor -1, nor a number of shards", param, ctx)


def making(command: F) -> F:
    """The options of the target."""
    for decorator in reversed(
        [
            option(
                "Target",
                "--layers-per-stage",
                type=_LayersType(),
                metavar="N,N",
                show_default="even",
                help="Layers per pipeline stage (MindFormers: offset, num_layer_list); in rounds of all stages where "
                "they are interleaved (vpp, pp_interleave_num).",
            ),
            option(
                "Target",
                "--optimizer-shards",
                type=_ShardsType(),
                metavar="off|-1|N",
                help="How the optimizer shards each weight: not at all, over all replicas, or in N.",
            ),
            option(
                "Target",
                "--optimizer-threshold",
                type=click.IntRange(min=0, max=2**31),
                metavar="KIB",
                show_default="64, as in MindSpore",
                help="Smaller tensors are not sharded.",
            ),
            option("Target", "--weights-only", is_flag=True, help="Leave optimizer state out, as for inference."),
            option("Target", "--overwrite", is_flag=True, help="Replace existing strategies at OUT."),
            options.json_output,
            options.verbose("Name every parameter in messages."),
            options.common,
        ]
    ):
        command = decorator(command)
    return command


def shapes(text: str) -> Callable[[F], F]:
    """--shapes, and the key of encrypted files that it names."""
    shape = option("Source", "--shapes", metavar="CKPT|INDEX|STRATEGY.json", shell_complete=completion.paths, help=text)
    return lambda command: shape(options.decryption(command))


def target_of(sizes: Any, typed: dict[str, Any]) -> TargetRun:
    """The run that the options describe."""
    from reshard.strategies.rules import DEFAULT_THRESHOLD, ShardSetting, TargetRun

    threshold = typed["optimizer_threshold"]
    setting = ShardSetting(typed["optimizer_shards"] or 0, DEFAULT_THRESHOLD if threshold is None else threshold)
    return TargetRun(sizes, setting, typed["layers_per_stage"], typed["weights_only"])


def shapes_of(path: str, strategy: Optional[Strategy], typed: dict[str, Any]) -> ModelTensors:
    """The tensors that --shapes names."""
    from reshard.checkpoints import FileHandles
    from reshard.forms.model_shapes import read_shapes
    from reshard.text.report import Report

    decryption = options.decryption_of(typed["decrypt_key_file"], typed["decrypt_mode"])
    with FileHandles(decryption=decryption) as handles:
        return read_shapes(path, strategy, handles, Report())


def finish(
    command: str,
    out: str,
    stages: Sequence[MadeStage],
    rules: LayoutRules,
    tensors: ModelTensors,
    target: TargetRun,
    more: dict[str, Any],
    made_of: Sequence[Optional[str]],
    typed: dict[str, Any],
) -> None:
    """Write a strategy and its record; refuses to overwrite its own input."""
    from reshard.strategies.one_file import record_path
    from reshard.strategies.rules import write_strategy

    sizes, shards = target.sizes, target.shards
    assumed = list(more.get("assumed", ()))
    if typed["optimizer_shards"] is None and not target.weights_only:
        assumed.append("the optimizer does not shard, since --optimizer-shards is not given")
    record = {
        "reshard": __version__,
        "command": command,
        "sizes": {name: size for name, size in sizes.named.items()},
        "shapes": tensors.path,
        "layers_per_stage": None if target.layers_per_stage is None else list(target.layers_per_stage),
        "optimizer_shards": shards.size or "off",
        "optimizer_threshold": shards.threshold,
        "weights_only": target.weights_only,
        "rules": rules.text,
        **more,
        "assumed": assumed,
    }
    files, notes = write_strategy(
        out, stages, record, typed["overwrite"], [path for path in made_of if path is not None]
    )
    show_notes(notes)
    parameters = {name for stage in stages for name in stage.layouts}
    if typed["as_json"]:
        echo_json(
            {
                "files": files,
                "record": record_path(out),
                "devices": sizes.stage_devices * sizes.stages,
                "sizes": record["sizes"],
                "parameters": len(parameters),
                "stages": [
                    {
                        "stage": stage.number,
                        "first_rank": stage.first_rank,
                        "devices": sizes.stage_devices,
                        "parameters": len(stage.layouts),
                        "optimizer_sharded": sum(layout.shard_size != 0 for layout in stage.layouts.values()),
                    }
                    for stage in stages
                ],
                "assumed": assumed,
            }
        )
        return
    if is_quiet():
        return
    devices = plural(sizes.stage_devices * sizes.stages, "device")
    lines = [f"{out}: {devices} in {plural(len(stages), 'stage')}, {plural(len(parameters), 'parameter')}"]
    for stage in stages:
        sharded = sum(layout.shard_size != 0 for layout in stage.layouts.values())
        ranks = rank_ranges(range(stage.first_rank, stage.first_rank + sizes.stage_devices))
        lines.append(
            f"  stage {stage.number}: {ranks}, {plural(len(stage.layouts), 'parameter')}"
            + (f", {sharded} with optimizer shards" if sharded else "")
        )
    lines.append(f"optimizer shards: {_shards_in_words(target)}")
    lines += [f"assumed: {assumption}" for assumption in assumed]
    lines.append(f"how it was made: {record_path(out)}")
    say("\n".join(lines))


def _shards_in_words(target: TargetRun) -> str:
    size, threshold = target.shards
    if not size:
        return "off"
    return f"{'as many as replicas' if size < 2 else size} for tensors of {threshold} KiB and more"
