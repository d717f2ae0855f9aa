"""verl's rank files as a form, which is read and not written."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import ChunkedForm, FormOptions, Layouts, ReadRequest, check_latest
from reshard.storage import caches_listings, is_directory, names_in

MODEL = re.compile(r"model_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt")


class VerlForm(ChunkedForm):
    """The files ``model_world_size_N_rank_R.pt`` of a directory."""

    name = "verl"
    options = FormOptions(title="verl's rank files", layouts=Layouts.RECORDED, formats=(), mindspore=False)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        if not is_directory(src):
            return MODEL.fullmatch(os.path.basename(src)) is not None
        return any(map(MODEL.fullmatch, names_in(src) if names is None else names))

    @caches_listings
    def read(self, request: ReadRequest) -> Checkpoint:
        """From the pickle of every file, which lists its tensors.

        Replicas stand in for a file that is missing or damaged.
        """
        from reshard.forms.verl.reading import read_ranks

        check_latest(self, request)
        return read_ranks(self.name, request)
