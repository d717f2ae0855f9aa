"""The recorded CRCs of source files, checked before anything is made of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

from reshard.checkpoints import CheckpointIndex, FileHandles, check_crc
from reshard.errors import DamagedCheckpointError
from reshard.execute import ExecutionOptions, Progress
from reshard.plan.conversion import Conversion
from reshard.report import Report
from reshard.wording import plural, some_names


def files_to_check(conversion: Conversion, report: Report) -> list[CheckpointIndex]:
    """The source files that record a CRC and are read whole; says of which others only a part is read."""
    indexes = {index.path: index for index in conversion.step.indexes.values()}
    read = conversion.files_read()
    partly = [path for path, all_of_it in read.items() if not all_of_it]
    if partly:
        report.note(
            f"the CRC of {plural(len(partly), 'source file')} was not checked, because only a part of the file is "
            f"read: {some_names(partly, 3)}"
        )
    return [indexes[path] for path, all_of_it in read.items() if all_of_it]


def check_source_crcs(
    indexes: Sequence[CheckpointIndex],
    execution: ExecutionOptions,
    handles: FileHandles,
    report: Report,
    progress: Progress,
) -> None:
    """Check the CRCs of source files.

    Raises:
        DamagedCheckpointError: a file's bytes are not those its CRC was made of.
    """
    for error in damaged_files(indexes, execution, handles, report, progress, stop_at_first=True).values():
        raise error


def damaged_files(
    indexes: Sequence[CheckpointIndex],
    execution: ExecutionOptions,
    handles: FileHandles,
    report: Report,
    progress: Progress,
    stop_at_first: bool = False,
) -> dict[str, DamagedCheckpointError]:
    """Files whose bytes are not those their CRC was made of, with the error of each, by path."""
    stop = threading.Event()
    found: dict[str, DamagedCheckpointError] = {}

    telling = threading.Lock()

    def go_on(count: int) -> None:
        if stop.is_set():
            raise CancelledError
        with telling:
            progress.wrote(count)

    def check(index: CheckpointIndex) -> None:
        try:
            go_on(0)
            outcome = check_crc(handles, index, execution.block_bytes, go_on)
        except CancelledError:
            return
        except DamagedCheckpointError as error:
            found[index.path] = error
            if stop_at_first:
                stop.set()
            return
        if not outcome.checked:
            report.note(f"{index.path}: its CRC was not checked: {outcome.reason}")

    progress.begin(sum(index.size for index in indexes if index.crc is not None), "checking CRCs")
    with ThreadPoolExecutor(execution.threads) as pool:
        try:
            for future in [pool.submit(check, index) for index in indexes]:
                future.result()
        except BaseException:
            # Also Ctrl-C: nobody waits for terabytes to be read.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            progress.end()
    return dict(sorted(found.items()))
