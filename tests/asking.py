"""What is asked, from the names of options: ``conversion_of(src, dst, src_strategy=..., cast="BFloat16")``."""

from __future__ import annotations

from typing import Any

import reshard
from reshard.api import Conversion
from reshard.asked import Edits, Effort, Group, Source, Target, fields_of
from reshard.convert.ends import request_of
from reshard.forms.request import Request
from reshard.opened import OpenedCheckpoint
from reshard.text.messages import Report
from tests.small import World


def _taken(group: type[Group], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, by field; they are removed."""
    names = {option.parameter: name for name, (option, _) in fields_of(group).items()}
    return {name: options.pop(parameter) for parameter, name in names.items() if parameter in options}


def conversion_of(src: Any, dst: Any, **options: Any) -> Conversion:
    """A conversion with these options."""
    target, source = Target(dst, **_taken(Target, options)), Source(src, **_taken(Source, options))
    edits, effort = Edits(**_taken(Edits, options)), Effort(**_taken(Effort, options))
    asked = Conversion(source, target, edits, effort, **_taken(Conversion, options))
    assert not options, options
    return asked


def open_checkpoint(src: Any, **options: Any) -> OpenedCheckpoint:
    """A checkpoint opened with these options."""
    source = Source(src, **_taken(Source, options))
    edits, effort = Edits(**_taken(Edits, options)), Effort(**_taken(Effort, options))
    return reshard.open(source, edits=edits, effort=effort, **options)


def request_between(world: World) -> Request:
    """The conversion of a world's checkpoint from the old strategy to the new one."""
    asked = conversion_of(world.src, world.dst, src_strategy=world.old, dst_strategy=world.new)
    return request_of(asked, Report())
