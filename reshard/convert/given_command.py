"""The command line of a run, as its target directory records it."""

from __future__ import annotations

from typing import Optional

from reshard.convert.options import Options
from reshard.plan.plan import Plan
from reshard.records.given import Given
from reshard.storage import absolute
from reshard.strategies import NONE, Strategy, names_files
from reshard.text.wording import number_ranges

# What is recorded of a request and of options, and what is not: the rest is how much of the machine is used, what
# follows from the step that was chosen, or concerns one run alone. A test sees that nothing is forgotten.
RECORDED_OF_REQUEST = (
    "src",
    "source",
    "target",
    "files",
    "prefix",
    "format",
    "step",
    "file_suffix",
    "filters",
    "strict",
    "recover",
    "to",
    "max_shard_size",
    "edits",
)
NOT_RECORDED_OF_REQUEST = ("dst", "fallback", "exact_file", "damaged", "form")
RECORDED_OF_OPTIONS = ("crc", "check_replicas", "checksum", "verify", "lost_only", "share", "adding")
NOT_RECORDED_OF_OPTIONS = (
    "jobs",
    "max_memory",
    "io",
    "overwrite",
    "accept_changed_source",
    "dry_run",
    "part",
    "decryption",
)


def given_command(plan: Plan, options: Options) -> Optional[Given]:
    """The command line of a run with absolute paths; None for a run that no command line repeats.

    Args:
        plan: with the step and format that were chosen.
        options: how it is carried out.
    """
    request = plan.request
    if not isinstance(request.src, str) or options.part is not None:
        return None
    words = request.edits.typed
    if words is None:
        return None
    # To resume one of several runs is to resume all of them.
    several = options.adding or options.share is not None
    try:
        src, source, target = absolute(request.src), _path(request.source), _path(request.target)
        config = None if words.config is None else absolute(words.config)
    except FileNotFoundError:
        # The working directory is gone.
        return None
    return Given(
        task="recover" if request.recover else "convert",
        src=src,
        source_strategy=source,
        target_strategy=target,
        step=plan.checkpoint.step,
        file_suffix=request.file_suffix,
        include=tuple(request.filters.include),
        exclude=tuple(request.filters.exclude),
        prefix=request.prefix,
        format=plan.form.format,
        strict=request.strict,
        crc=options.crc,
        check_replicas=options.check_replicas,
        checksum=options.checksum,
        verify=options.verify,
        ranks=None if request.files is None or several else number_ranges(request.files),
        lost_only=options.lost_only,
        to=request.to,
        max_shard_size=request.max_shard_size,
        names=words.names,
        rename=words.rename,
        config=config,
        reverse=words.reverse,
        optimizer=words.optimizer,
        cast=words.cast,
        dequantize=words.dequantize,
    )


def _path(strategy: Strategy) -> str:
    return NONE if strategy.is_none else absolute(strategy.path) if names_files(strategy.path) else strategy.path
