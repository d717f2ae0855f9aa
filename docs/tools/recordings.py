"""The recordings at the beginning of docs/screens.md: a conversion on a terminal, stopped by Ctrl-C, and going on.

What is recorded is real, but for two things: the checkpoint holds zeros, and the run waits a moment behind every file
and is sent the signal behind the second one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from docs.tools.pages import ROOT, Printed, blocks

PAGE = ROOT / "docs" / "screens.md"

_COLUMNS = 100
_PARAMETERS = 24
_SHAPE = (2048, 2048)
_CONVERT = "convert ckpt out --src-strategy four.json --dst-strategy eight.json"
_GO_ON = "resume out"
# Bars, sizes, rates and times differ from run to run, and from one size of the checkpoint to another.
_VARYING = re.compile(r"[█▏▎▍▌▋▊▉]+ *|\d+(\.\d+)?( [KMGT]?i?B)?")

_INTERRUPTED = """
import os, signal, sys, time
from reshard.entry import main
from reshard.convert import Counted

committed = Counted.committed

def slowly(self, rank, size):
    committed(self, rank, size)
    time.sleep(0.5)
    if self.files == 2:
        os.kill(os.getpid(), signal.SIGINT)

Counted.committed = slowly
sys.argv = ["reshard", *sys.argv[1:]]
main()
"""


def record(place: Path, shape: tuple[int, int] = _SHAPE) -> list[Printed]:
    """The recordings made anew, beside those of the page.

    Args:
        place: an empty directory.
        shape: of each of the checkpoint's tensors; both dimensions are multiples of 8.
    """
    _make_checkpoint(place, shape)
    frames, said = _on_terminal(place, _INTERRUPTED, *_CONVERT.split(), "--jobs", "1", "--max-memory", "1M")
    status = _reshard(place, "status out")
    went_on = _reshard(place, _GO_ON)
    shown = [
        f"$ reshard {_CONVERT}\n{frames[-1]}\n",
        f"$ reshard {_CONVERT}\n^C\n{said}$ echo $?\n130\n$ reshard status out\n{status}$ reshard {_GO_ON}\n{went_on}",
    ]
    shown = [text.replace(str(place), "/home/you") for text in shown]
    recorded = [block for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "console"]
    return [Printed(block, text) for block, text in zip(recorded, shown)]


def same(printed: Printed) -> bool:
    """Whether a recording says what is said today, but for what differs from run to run."""
    return _masked(printed.block.text) == _masked(printed.output)


def _masked(text: str) -> str:
    return _VARYING.sub("#", text)


def _make_checkpoint(place: Path, shape: tuple[int, int]) -> None:
    names = [f"backbone.blocks.{number}.weight" for number in range(_PARAMETERS)]
    for name, devices in (("four", 4), ("eight", 8)):
        layout = {"dev_matrix": [devices], "tensor_map": [0, -1], "tensor_shape": shape, "field": 0,
                  "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}  # fmt: skip
        said = {"current_stage": 0, "parallel_layout_item": {name: layout for name in names}}
        (place / f"{name}.json").write_text(json.dumps(said))
    size = shape[0] * shape[1]
    header = {
        name: {"dtype": "F32", "shape": [shape[0] // 4, shape[1]], "data_offsets": [number * size, (number + 1) * size]}
        for number, name in enumerate(names)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    for rank in range(4):
        path = place / "ckpt" / f"rank_{rank}" / "net-1_2000.safetensors"
        path.parent.mkdir(parents=True)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + len(names) * size)


def _on_terminal(place: Path, script: str, *words: str) -> tuple[list[str], str]:
    """The frames of the bar, and what was said besides, of a command that Ctrl-C ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _COLUMNS, 0, 0))
    environment = {**_environment(), "NO_COLOR": "1", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], cwd=place, env=environment, stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        said = b""
        # Linux tells the end of a terminal as an error.
        with contextlib.suppress(OSError):
            while part := os.read(master, 65536):
                said += part
        os.close(master)
    assert process.returncode == 130, said
    parts = [part.strip() for part in re.split(r"[\r\n]+", said.decode()) if part.strip()]
    return [part for part in parts if "█" in part], "".join(f"{part}\n" for part in parts if "█" not in part)


def _reshard(place: Path, words: str) -> str:
    command = [sys.executable, "-m", "reshard", *words.split()]
    done = subprocess.run(command, cwd=place, env=_environment(), capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
