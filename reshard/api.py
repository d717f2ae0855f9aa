"""`Conversion`: planning, converting and verifying with the same parameters.

It is a class because ``reshard.convert`` and ``reshard.plan`` are packages, which would replace functions of the same
name when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

from reshard.convert import Options, Summary, prepare
from reshard.convert.ends import check_verifiable, options_of, request_between
from reshard.convert.transfers import Transfers, transfers_of
from reshard.defaults import CHOICES, DEFAULT_PREFIX, MAX_MEMORY
from reshard.errors import UsageError, VerificationError
from reshard.execute import Progress
from reshard.execute.destination import Space
from reshard.forms import FORM_CLASSES, SHORT_NAMES
from reshard.forms.full.written_files import parse_size
from reshard.opened.opening import Path, Texts, ranks_of, text_of, texts_of
from reshard.plan.request import Request
from reshard.strategies import target_named
from reshard.text.globs import Filters
from reshard.text.in_python import errors_in_python, in_python
from reshard.text.messages import Report, block, logged


class Planned(NamedTuple):
    """The plan of a conversion.

    Attributes:
        summary: as after the conversion; ``bytes_written`` and ``ranks`` are expected values.
        transfers: bytes of every target file from every source file, and bytes read from each.
        buffers: bytes of all buffers.
        space: needed and free bytes of every file system below the target directory.
    """

    summary: Summary
    transfers: Transfers
    buffers: int
    space: list[Space]


@dataclass(frozen=True)
class Conversion:
    """A conversion of a checkpoint to another layout, form, names or types.

    The parameters are the options of `reshard convert`. Warnings and notes go to the logger ``reshard``.

    Attributes:
        src: rank directories, a file, a path with ``{rank}`` in it, or a directory of another form.
        dst: the target directory.
        src_strategy: strategy file or directory of rank files; ``"none"`` for an unsharded checkpoint. Without it and
            ``dst_strategy``, ``format`` changes only the format of rank files.
        dst_strategy: strategy of the target; ``"none"`` for one unsharded rank, ``"same"`` for that of ``src``.
        to: form of the target: ``"ranks"``, ``"checkpoint2"``, ``"unified"``, ``"huggingface"`` or ``"hf"``, ``"dcp"``,
            ``"hf-sharded"`` or ``"hyper-parallel"``.
        ranks: only these target ranks, or numbers of target files; by default all.
        shard: write share I of N, ``(I, N)``.
        prefix: of target file names.
        format: ``"same"``, ``"ckpt"`` or ``"safetensors"``.
        shards: number of target files over which rows are cut, in place of ``dst_strategy``.
        max_shard_size: bytes in a file of full weights, or a text such as ``"5GB"``.
        step: ``"3_10"``, the number of an iteration, or ``"latest"``, the newest complete one.
        fallback: use an older step if the newest is incomplete.
        file_suffix: suffix of the stems of rank files to read.
        without_ranks: ranks of ``src`` that count as lost: replicas on other ranks are read.
        include: convert only names that match this pattern, or one of these.
        exclude: skip names that match; overrides ``include``.
        allow_missing: accept that ``src`` lacks parameters of the target strategy that match this pattern, or one of
            these.
        names: a built-in table of names and packing, or the file of one, with its options, such as
            ``"qwen3,gate_up=halves,qkv=grouped"``.
        rename: new names, ``"OLD=NEW"``; the text of a ``*`` is kept.
        config: file with the sizes that the table needs, by default the config.json of ``src``; Hugging Face targets
            get a copy, and of a directory also the tokenizer's files.
        reverse: read the table from right to left.
        optimizer: apply the table to optimizer state as well; otherwise optimizer state is skipped.
        cast: ``"BFloat16"`` for all floating-point weights, or ``"GLOB=Float32"``; the last match wins.
        dequantize: ``"BFloat16"``, ``"Float16"`` or ``"Float32"``: quantised weights are written in this type.
        jobs: CPUs to keep busy; by default those that this process may use.
        max_memory: bytes of all buffers.
        io: ``"auto"``, ``"mmap"`` or ``"pread"``.
        crc: ``"never"`` skips the CRCs that source files record.
        check_replicas: ``"all"`` compares replicas of the source in full, ``"never"`` not at all.
        checksum: ``"crc32"`` records a checksum of every target file, and in archives those of tensors.
        overwrite: replace existing targets.
    """

    src: Path
    dst: Path
    src_strategy: Optional[Path] = None
    dst_strategy: Optional[Path] = None
    to: Optional[str] = None
    ranks: Optional[Sequence[int]] = None
    shard: Optional[tuple[int, int]] = None
    prefix: Optional[str] = DEFAULT_PREFIX
    format: str = "same"
    shards: Optional[int] = None
    max_shard_size: Union[int, str, None] = None
    step: Union[str, int] = "latest"
    fallback: bool = True
    file_suffix: Optional[str] = None
    without_ranks: Sequence[int] = ()
    include: Texts = ()
    exclude: Texts = ()
    allow_missing: Texts = ()
    names: Optional[Path] = None
    rename: Texts = ()
    config: Optional[Path] = None
    reverse: bool = False
    optimizer: bool = False
    cast: Texts = ()
    dequantize: Optional[str] = None
    jobs: Optional[int] = None
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    crc: str = "auto"
    check_replicas: str = "auto"
    checksum: str = "none"
    overwrite: bool = False

    @errors_in_python()
    def plan(self) -> Planned:
        """Plan and check the conversion; nothing is written.

        Raises:
            ReshardError: the conversion would be refused.
        """
        report = logged(in_python)
        how = self._options(dry_run=True)
        with prepare(self._request(report), how, report) as prepared:
            summary = prepared.carry_out()
            state = prepared.state
            moved = transfers_of(state.plan, state.work, state.execution)
            return Planned(_in_python(summary), moved, state.execution.buffer_bytes, state.space)

    @errors_in_python()
    def convert(self, verify: bool = False) -> Summary:
        """Convert, or continue an interrupted conversion.

        Args:
            verify: compare the result with the source afterwards.

        Raises:
            VerificationError: the result differs from the source.
            ReshardError: the conversion cannot be made, or failed.
        """
        report = logged(in_python)
        how = self._options(verify=verify)
        request = self._request(report)
        check_verifiable(request, how)
        with prepare(request, how, report) as prepared:
            summary = prepared.carry_out()
            # Verification treats the files that the conversion found damaged as missing, too.
            damaged = prepared.plan.request.damaged
        if verify:
            from reshard.convert.verifying import verify_written

            _refuse(verify_written(request, damaged, how, summary, Progress()), request.dst)
        return _in_python(summary)

    @errors_in_python()
    def verify(self) -> None:
        """Compare ``dst`` with ``src``; strategies, step, names and types default to those in the records of ``dst``.

        Raises:
            VerificationError: they differ.
            ReshardError: a file is missing or cannot be read.
        """
        from reshard.convert.verifying import reading_sources, verify_with_source

        report = logged(in_python)
        filters = Filters(texts_of(self.include), texts_of(self.exclude))
        dst, src = os.fspath(self.dst), os.fspath(self.src)
        with reading_sources(self._options(), Progress(), report) as (means, crcs):
            differences = verify_with_source(dst, src, self._typed(), self._ranks(), filters, means, report, crcs)
        _refuse(differences, dst)

    def _typed(self) -> dict[str, Any]:
        """The parameters in the form of the command line's options."""
        paths = ("src_strategy", "names", "config")
        size = self.max_shard_size
        return {
            **vars(self),
            **{name: text_of(getattr(self, name)) for name in paths},
            "dst_strategy": target_named(text_of(self.dst_strategy), self.shards),
            "to": None if self.to is None else SHORT_NAMES.get(self.to, self.to),
            "step": str(self.step),
            "no_fallback": not self.fallback,
            **{
                name: texts_of(getattr(self, name))
                for name in ("include", "exclude", "allow_missing", "rename", "cast")
            },
            "without_ranks": ranks_of("without_ranks", self.without_ranks),
            "optimizer": "keep" if self.optimizer else None,
            "max_shard_size": parse_size(size) if isinstance(size, str) else size,
        }

    def _ranks(self) -> Optional[tuple[int, ...]]:
        return None if self.ranks is None else ranks_of("ranks", self.ranks)

    def _request(self, report: Report) -> Request:
        return request_between(os.fspath(self.src), os.fspath(self.dst), self._ranks(), self._typed(), report)

    def _options(self, dry_run: bool = False, verify: bool = False) -> Options:
        for name, value in vars(self).items():
            if "" in (value if isinstance(value, (list, tuple)) else (value,)):
                raise UsageError(f"{name} is empty", hint="leave it out for its default")
        for name, choices in {"to": (None, *FORM_CLASSES, *SHORT_NAMES), **CHOICES}.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name}={value!r} is none of {', '.join(map(repr, filter(None, choices)))}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"shard={self.shard} is not a share; the first of four is (0, 4)")
        return options_of(self._typed(), share=self.shard, dry_run=dry_run, verify=verify)


def _refuse(differences: Sequence[object], dst: str) -> None:
    if differences:
        raise VerificationError(block(f"{dst}: differs from its source:", [*map(str, differences)]), differences)


def _in_python(summary: Summary) -> Summary:
    summary.warnings = [*map(in_python, summary.warnings)]
    summary.notes = [*map(in_python, summary.notes)]
    return summary
