"""Convert distributed checkpoints between parallel layouts and forms: MindSpore's ranks, PyTorch's and Hugging Face's.

`Conversion` of a `Source` to a `Target` plans, converts and verifies; `open` reads tensors without a conversion. The
functions have MindSpore's names and signatures, so a script changes one import. Modules are imported on first use.
"""

from __future__ import annotations

from reshard._version import __version__

# Not imported from typing: nothing is loaded before signals are handled (`reshard.entry`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from reshard.api import Conversion
    from reshard.asked import Edits, Effort, Source, Target
    from reshard.errors import ReshardError as ReshardError
    from reshard.mindspore_api import (
        ckpt_to_safetensors,
        convert_checkpoint_by_rank,
        convert_checkpoints,
        merge_pipeline_strategys,
        rank_list_for_convert,
        rank_list_for_transform,
        restore_group_info_list,
        safetensors_to_ckpt,
        transform_checkpoint_by_rank,
        transform_checkpoints,
    )
    from reshard.mindspore_unified import load_distributed_checkpoint, unified_safetensors
    from reshard.opened import open as open

# Without `open`, so that `import *` keeps Python's own, and without `ReshardError`, which `reshard.errors` has.
__all__ = [
    "Conversion",
    "Edits",
    "Effort",
    "Source",
    "Target",
    "__version__",
    "ckpt_to_safetensors",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "load_distributed_checkpoint",
    "merge_pipeline_strategys",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "restore_group_info_list",
    "safetensors_to_ckpt",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
]

_ASKED = ("Edits", "Effort", "Source", "Target")
_UNIFIED = ("load_distributed_checkpoint", "unified_safetensors")


def __getattr__(name: str) -> object:
    if name == "open":
        from reshard import opened

        return opened.open
    if name == "Conversion":
        from reshard import api

        return api.Conversion
    if name == "ReshardError":
        from reshard import errors

        return errors.ReshardError
    if name in _ASKED:
        from reshard import asked

        return getattr(asked, name)
    if name in __all__:
        from reshard import mindspore_api, mindspore_unified

        return getattr(mindspore_unified if name in _UNIFIED else mindspore_api, name)
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "ReshardError", "open"])
