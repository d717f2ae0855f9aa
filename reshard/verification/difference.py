"""Differences between checkpoints."""

from __future__ import annotations

from typing import NamedTuple, Optional

from reshard.checkpoints import Tensor
from reshard.text.messages import one_line, quoted, rank_ranges, some_names


class Difference(NamedTuple):
    """One difference.

    Attributes:
        kind: ``file`` (missing or damaged), ``missing``, ``extra``, ``type``, ``shape``, ``content``,
            ``replica`` (a minority of copies differs), ``replicas`` (copies differ without a majority), ``stages``
            (pipeline stages disagree) or ``strategy`` (files do not fit it).
        parameter: the parameter, or None for a whole file.
        ranks: the wrong ranks, ascending; all candidates if unknown. Empty for forms without ranks.
        detail: the problem; printed after the parameter's name, ranks and files.
        files: for forms without ranks, the wrong files, relative to the directory.
    """

    kind: str
    parameter: Optional[str]
    ranks: tuple[int, ...]
    detail: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line: parameter, ranks, problem."""
        return self.of("" if self.parameter is None else quoted(self.parameter))

    def of(self, names: str) -> str:
        """The line for several parameters with the same difference."""
        where = f" on {rank_ranges(self.ranks)}" if self.ranks else ""
        if self.files:
            files = some_names([one_line(name) for name in self.files], 3)
            where = f" in {files}" if names else files
        subject = f"{names}{where}".lstrip()
        return f"{subject}: {self.detail}" if subject else self.detail


def kind_of_tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    """Type, shape and size, which must agree before contents are compared."""
    return tensor.dtype, tensor.shape, tensor.nbytes
