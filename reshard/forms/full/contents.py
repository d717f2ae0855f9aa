"""Reading a directory of full weights from headers alone, and comparing its map with its files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reshard.checkpoints.checkpoint import ByName, FileSharding, GlobalTensor
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.headers import read_headers
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.full.form import (
    HUGGINGFACE,
    HYPER_PARAMETERS,
    NUMBERED,
    ONE_COPY,
    PART,
    SINGLE,
    UNIFIED,
    UNIFIED_MAP,
    check_finished,
    extra_files_in,
    file_names,
    files_without_index,
    index_in,
    read_weight_map,
    report_unread,
)
from reshard.forms.pytorch.chunk_headers import INFO, entries_of
from reshard.forms.recorded import RecordedCheckpoint, sizes_of_files
from reshard.forms.request import Means, Request
from reshard.layout import Grid
from reshard.storage import is_directory, names_in
from reshard.text.messages import Report, listing, one_line, plural, quoted, some_names
from reshard.text.names import layers_in_order, natural_order, trained

_ONE_SAVE = "the files and this list are not of one save: copy or download the directory again"


class Contents:
    """Files of a directory and their contents."""

    def __init__(self, directory: str, files: Sequence[str], indexes: Mapping[int, CheckpointIndex]) -> None:
        self.paths = {number: os.path.join(directory, name) for number, name in enumerate(files)}
        self.indexes = indexes
        self._files = files

    @classmethod
    def read(cls, directory: str, files: Sequence[str], handles: FileHandles, damaged: Mapping[str, str]) -> Contents:
        """Read the headers of all files; a CheckpointError names all that are missing or damaged."""
        sizes, problems = sizes_of_files(directory, files, damaged, ONE_COPY)
        paths = enumerate(os.path.join(directory, name) for name in files)
        sound = {number: path for number, path in paths if path in sizes}
        indexes: dict[int, CheckpointIndex] = {}
        for number, header in read_headers(handles, sound, "file"):
            if isinstance(header, DamagedCheckpointError):
                problems.append(DamagedCheckpointError(header.message, file=header.file, hint=ONE_COPY))
            else:
                indexes[number] = header
        if problems:
            raise one_error(problems, f"{directory} is not complete")
        return cls(directory, files, indexes)

    def check(
        self,
        place: str,
        weight_map: Mapping[str, str] | None,
        count: int,
        scalars: Mapping[str, int],
        report: Report,
    ) -> None:
        """Refuse a tensor in several files or none, or not in the file of the map; warn of tensors outside the map.

        Args:
            place: the map, or the directory, for messages.
            weight_map: the map; None without one.
            count: the number of files in the map, which come first.
            scalars: entries of the other files, each with its file.
            report: gets the warning.
        """
        file_of, twice = self._located(count, scalars)
        unlisted = [name for name in file_of if weight_map is not None and name not in weight_map]
        numbers = {name: number for number, name in enumerate(self._files)}
        expected = weight_map or {}
        nowhere = [name for name in expected if name not in file_of]
        elsewhere = {
            name: [file_of[name]]
            for name, file in expected.items()
            if name in file_of and numbers[file] not in twice.get(name, [file_of[name]])
        }
        problems: list[InputError] = []
        if twice:
            problems.append(
                CheckpointError(
                    f"{place}: in several files, which need not agree: {self._places(twice)}",
                    file=place,
                    parameter=next(iter(twice)),
                    hint="take the files of one save only",
                )
            )
        if nowhere:
            files = natural_order({expected[name] for name in nowhere})
            problems.append(
                CheckpointError(
                    f"{place}: lists {plural(len(nowhere), 'tensor')} that its files do not hold: "
                    + listing(nowhere)
                    + f" (listed for {file_names(files)})",
                    file=place,
                    parameter=nowhere[0],
                    hint=_ONE_SAVE,
                )
            )
        if elsewhere:
            problems.append(
                CheckpointError(
                    f"{place}: names another file than the one that holds them: {self._places(elsewhere)}",
                    file=place,
                    parameter=next(iter(elsewhere)),
                    hint=_ONE_SAVE,
                )
            )
        if problems:
            raise one_error(problems, f"{place} does not fit its files")
        if unlisted:
            report.warn(
                f"{place}: does not list {plural(len(unlisted), 'tensor')} of its files: "
                + listing(unlisted)
                + "; they are read all the same"
            )

    def _located(self, count: int, scalars: Mapping[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """The first file of every tensor, and all files of tensors in several; see `check`."""
        file_of: dict[str, int] = {}
        twice: dict[str, list[int]] = {}
        for number in range(count):
            for name in self.indexes[number].tensors:
                if file_of.setdefault(name, number) != number:
                    twice.setdefault(name, [file_of[name]]).append(number)
        for name, number in scalars.items():
            if name in file_of:
                twice.setdefault(name, [file_of[name]]).append(number)
        return file_of, twice

    def _places(self, holders: Mapping[str, Sequence[int]]) -> str:
        places = []
        for name, numbers in holders.items():
            files = " and ".join(one_line(self._files[number]) for number in numbers)
            places.append(f"{quoted(name)} in {files}")
        return some_names(places)

    def tensors(self, count: int) -> tuple[Mapping[str, GlobalTensor], dict[str, int]]:
        """All tensors of the first ``count`` files, in the order of writing.

        Returns:
            The tensors, and per value outside the model, such as ``global_step``, its file.
        """
        file_of: dict[str, int] = {}
        values: dict[str, int] = {}
        for number in range(count):
            for name, tensor in self.indexes[number].tensors.items():
                (values if math.prod(tensor.shape) == 1 and tensor.is_value else file_of)[name] = number
        for name in trained({*file_of, *values}).intersection(values):
            file_of[name] = values.pop(name)
        return WholeTensors(self.indexes, {name: file_of[name] for name in layers_in_order(file_of)}), values


class WholeTensors(ByName[GlobalTensor]):
    """Tensors by name, each whole in one file; a `GlobalTensor` is made on demand."""

    def __init__(self, indexes: Mapping[int, CheckpointIndex], holders: Mapping[str, int]) -> None:
        super().__init__(holders)
        self._indexes = indexes
        self._holders = holders
        # Few shapes and files, and many tensors.
        self._shardings: dict[tuple[int, tuple[int, ...]], tuple[FileSharding]] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        number = self._holders[name]
        tensor = self._indexes[number].tensors[name]
        shardings = self._shardings.get((number, tensor.shape))
        if shardings is None:
            shardings = (FileSharding(Grid.whole(tensor.shape), ((number,),)),)
            self._shardings[number, tensor.shape] = shardings
        return GlobalTensor(name, tensor.dtype, tensor.item_size, tensor.shape, shardings)


@dataclass
class FullWeights(RecordedCheckpoint):
    """A directory of full weights: ``unified`` or ``huggingface``.

    Files are numbered in natural order. Tensors are in the order of the files, layers in natural order.

    Attributes:
        plain: per value outside the model its file.
    """

    plain: Mapping[str, int] = field(default_factory=dict)

    def order(self) -> list[str]:
        return list(self.tensors)

    def holders(self, name: str) -> list[int]:
        if name in self.tensors:
            return [number for numbers in self.present(self.tensors[name]) for number in numbers]
        return [self.plain[name]] if name in self.plain else []


def read_unified(request: Request, means: Means) -> FullWeights:
    """Read MindSpore's unified weights from headers; the path is the directory, or the map in it."""
    path, report = request.src, means.report
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    names = names_in(directory)
    map_path = os.path.join(directory, UNIFIED_MAP)
    if UNIFIED_MAP not in names:
        check_finished(directory, names)
        raise CheckpointError(
            f"{directory}: has no {UNIFIED_MAP}, which lists the file of each tensor",
            file=directory,
            hint=f"bring {UNIFIED_MAP} from where these files were written, or give one file alone as SRC",
        )
    weight_map = read_weight_map(map_path)
    files = natural_order(set(weight_map.values()))
    hyper_parameters = [HYPER_PARAMETERS] if HYPER_PARAMETERS in names and HYPER_PARAMETERS not in files else []
    contents = Contents.read(directory, [*files, *hyper_parameters], means.handles, request.damaged)
    scalars = {name: len(files) for _ in hyper_parameters for name in _scalars(contents.indexes[len(files)], report)}
    report_unread(directory, names, files, PART, map_path, report)
    contents.check(map_path, weight_map, len(files), scalars, report)
    tensors, values = contents.tensors(len(files))
    return FullWeights(UNIFIED, directory, contents.paths, contents.indexes, tensors, {**values, **scalars})


def read_huggingface(request: Request, means: Means) -> FullWeights:
    """Read Hugging Face's weights from headers; the path is the directory, one of its indexes, or its one file."""
    path, report = request.src, means.report
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    names = names_in(directory)
    single = os.path.basename(path) == SINGLE and directory != path
    index_path = None if single else path if directory != path else index_in(directory, names)
    weight_map: dict[str, str] | None = None
    if single:
        files = [SINGLE]
    elif index_path is None:
        files = files_without_index(directory, names, report)
    else:
        weight_map = read_weight_map(index_path)
        files = natural_order(set(weight_map.values()))
        if directory == path and SINGLE in names and SINGLE not in files:
            raise CheckpointError(
                f"{directory}: holds {SINGLE} and an index without it: two models",
                file=directory,
                hint=f"give {index_path} or {os.path.join(directory, SINGLE)} as SRC",
            )
    contents = Contents.read(directory, files, means.handles, request.damaged)
    _check_whole(contents)
    if not single:
        report_unread(directory, names, files, NUMBERED, index_path, report)
    contents.check(index_path or directory, weight_map, len(files), {}, report)
    tensors, values = contents.tensors(len(files))
    extra_files = extra_files_in(directory, names, files)
    return FullWeights(HUGGINGFACE, directory, contents.paths, contents.indexes, tensors, values, extra_files)


def _check_whole(contents: Contents) -> None:
    """Refuse files that hold parts of tensors."""
    are_whole: dict[str, bool] = {}
    for index in contents.indexes.values():
        text = index.metadata.get(INFO)
        if text is None:
            continue
        if text not in are_whole:
            are_whole[text] = all(entry.whole for entry in entries_of(index))
        if not are_whole[text]:
            raise CheckpointError(
                f"{index.path}: holds parts of tensors, by {INFO} in its header",
                file=index.path,
                hint="give its files the names that torch gave them, shard-00001-model-00001-of-00001.safetensors and "
                "so on, and the directory as SRC",
            )


def _scalars(index: CheckpointIndex, report: Report) -> list[str]:
    """Names of the values in the file of hyper-parameters that are certainly whole."""
    scalars = [name for name, tensor in index.tensors.items() if _is_whole(tensor)]
    skipped = [name for name in index.tensors if name not in set(scalars)]
    if skipped:
        report.warn(
            f"{index.path}: skipped, because it may contain only rank 0's part of "
            f"{'it' if len(skipped) == 1 else 'them'}: " + listing(skipped)
        )
    return scalars


def _is_whole(tensor: Tensor) -> bool:
    """Whether an entry is certainly not a slice; shape [1] may be one, such as an expert's bias."""
    return tensor.shape == () or (math.prod(tensor.shape) == 1 and tensor.is_value)
