"""The error of functions that find a problem, for callers that know which file or tensor has it."""

from __future__ import annotations


class ProblemError(ValueError):
    """A problem; the text is the end of a sentence about the file, tensor or checkpoint that the caller names."""
