"""Compares the JSON, exit statuses and files of two commits, for every fixture and corpus.

usage: python -m tests.compare_commits BASE [HEAD] [--only TEXT] [--keep FILE] [--jobs N]

BASE and HEAD are revisions; HEAD defaults to the working tree. Each commit converts, inspects and verifies the
same inputs in a directory of its own, with the interpreter that runs this module. Exit
status 1 when anything differs. Run it before and after a change that is to keep behaviour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from tests.corpus import FIXTURES, ROOT

SHARED = ROOT.parent / "shared"
VOLATILE_KEYS = {
    "seconds",
    "phases",
    "peak_memory",
    "memory",
    "requests",
    "io",
    "bytes_free",
    "version",
    "hint",
    "message",
}
"""Keys of JSON that hold measurements or sentences."""
RECORDS = re.compile(r"(^|/)\.reshard(/|$)")


class Job(NamedTuple):
    """Commands that run one after the other in a directory of their own, which they write into."""

    name: str
    commands: list[list[str]]


def full_weights(case: Path, directory: Path) -> Path:
    """An unsharded checkpoint of a compiled case: every parameter counts up from a start of its own."""
    description = json.loads((case / "case.json").read_text())
    classes = description["layout_classes"]
    tensors = {}
    for index, (name, labels) in enumerate(description["params"].items()):
        shape = classes[labels[0]]["full_shape"]
        tensors[name] = (np.arange(int(np.prod(shape)), dtype=np.float32) + 65537 * index).reshape(shape)
    path = directory / f"{case.name}.safetensors"
    save_file(tensors, str(path), {"format": "ms"})
    return path


def directories(*patterns: str) -> list[Path]:
    """Directories of the fixtures and corpora that match, one for each name."""
    files: dict[str, Path] = {}
    for root in (FIXTURES, SHARED / "corpus", SHARED / "corpus2", SHARED / "corpus_strategies"):
        for pattern in patterns:
            for path in sorted(root.glob(pattern)):
                files.setdefault(f"{pattern}:{path.parent.name}" if path.is_file() else f"{pattern}:{path.name}", path)
    return list(files.values())


def json_commands(*commands: list[str]) -> list[list[str]]:
    return [[*command, "--json"] for command in commands]


def jobs(inputs: Path) -> Iterator[Job]:
    """Everything that is compared."""
    yield from strategy_jobs()
    yield from compiled_jobs(inputs)
    yield from demo_jobs()
    yield from form_jobs()
    yield Job("names", json_commands(["names", "list"]))


def strategy_jobs() -> Iterator[Job]:
    cases = [path for path in directories("[0-9]*", "strategies/[0-9]*") if (path / "strategy").is_dir()]
    for case in cases:
        strategy = str(case / "strategy")
        commands = json_commands(["strategy", "show", strategy], ["replicas", "--strategy", strategy])
        commands.append(["merge-pipeline", strategy, "merged.ckpt"])
        commands.append(["merge-pipeline", strategy, "merged.json"])
        commands += json_commands(
            *(["group-info", "inspect", str(path)] for path in sorted(case.glob("group_info/*.pb"))[:2])
        )
        yield Job(f"strategy {case.name}", commands)
    # The corpora have thousands of pairs.
    sized = [case for case in cases if case.name.startswith("10") and case.parent == FIXTURES]
    for source, target in product(sized[::2], sized[1::2]):
        arguments = ["--src-strategy", str(source / "strategy"), "--dst-strategy", str(target / "strategy")]
        commands = json_commands(*(["rank-list", str(rank), *arguments] for rank in (0, 1, 3)))
        commands += json_commands(["strategy", "diff", str(source / "strategy"), str(target / "strategy")])
        yield Job(f"rank-list {source.name} {target.name}", commands)


def compiled_jobs(inputs: Path) -> Iterator[Job]:
    cases = [path for path in directories("[0-9]*") if (path / "slices.json").is_file()]
    for case in cases:
        strategy, full = str(case / "strategy"), str(full_weights(case, inputs))
        none = ["--src-strategy", "none", "--dst-strategy", strategy]
        back = ["--src-strategy", strategy, "--dst-strategy", "none"]
        commands = json_commands(
            ["convert", full, "ranks", *none, "--checksum", "crc32"],
            ["plan", "ranks", "full", *back],
            ["convert", "ranks", "full", *back, "--verify"],
            ["convert", "ranks", "unified", "--src-strategy", strategy, "--to", "unified", "--max-shard-size", "20KB"],
            ["convert", "ranks", "c2", "--src-strategy", strategy, "--dst-strategy", "same", "--to", "checkpoint2"],
            ["fingerprint", "ranks", "--strategy", strategy],
            ["inspect", "ranks", "--strategy", strategy],
            ["stats", "ranks", "--src-strategy", strategy],
            ["verify", "ranks"],
            ["status", "ranks"],
        )
        yield Job(f"compiled {case.name}", commands)


def demo_jobs() -> Iterator[Job]:
    demo = FIXTURES / "demo"
    source = ["--src-strategy", str(demo / "src_strategy.ckpt")]
    checkpoints = str(demo / "src_checkpoints")
    target = [*source, "--dst-strategy", str(demo / "dst_strategy.ckpt")]
    commands = json_commands(
        ["inspect", checkpoints],
        ["plan", checkpoints, "out", *target],
        ["convert", checkpoints, "out", *target, "--verify"],
        ["by-rank", "1", checkpoints, "one", *target],
        ["convert", checkpoints, "bf16", *target, "--cast", "BFloat16", "--verify"],
        ["convert", checkpoints, "renamed", *target, "--rename", "backbone.*=model.*", "--verify"],
        ["convert", checkpoints, "st", *target, "--format", "safetensors", "--exclude", "*bias"],
        ["convert", checkpoints, "hf", *source, "--to", "huggingface", "--max-shard-size", "100KB"],
        ["verify", "out", "--src", checkpoints, *target],
        ["diff", checkpoints, "hf", *source],
        ["get", checkpoints, "head.weight", *source],
        ["status", "one"],
    )
    yield Job("demo", commands)


def form_jobs() -> Iterator[Job]:
    sources = [
        path / "checkpoint" for path in directories("checkpoint2/*", "a*", "p*") if (path / "checkpoint").is_dir()
    ]
    sources += directories("full_weights/*", "u[0-9]*", "h[0-9]*", "models/qwen3")
    for path in sources:
        source = str(path)
        name = f"form {path.parent.parent.name}/{path.parent.name}/{path.name}"
        commands = [["inspect", source], ["fingerprint", source], ["stats", source]]
        for form, *options in (
            ("ranks", "--dst-strategy", "none"),
            ("ranks", "--dst-strategy", "same"),
            ("checkpoint2", "--dst-strategy", "same"),
            ("unified", "--max-shard-size", "20KB"),
            ("huggingface", "--max-shard-size", "20KB"),
        ):
            out = f"{form}{options[1]}"
            commands.append(["plan", source, out, "--to", form, *options])
            commands.append(["convert", source, out, "--to", form, *options, "--verify"])
            commands.append(["verify", out, "--headers-only"])
        if path.name == "qwen3":
            commands.append(
                [
                    "convert",
                    source,
                    "mf",
                    "--names",
                    "qwen3,gate_up=interleaved,qkv=grouped",
                    "--to",
                    "unified",
                    "--verify",
                ]
            )
            commands.append(
                [
                    "convert",
                    "mf",
                    "back",
                    "--names",
                    "qwen3,gate_up=interleaved,qkv=grouped",
                    "--to",
                    "huggingface",
                    "--verify",
                ]
            )
        yield Job(name, json_commands(*commands))


def plain(value: Any, place: str) -> Any:
    """A JSON value without the parts that vary between runs."""
    if isinstance(value, dict):
        return {key: plain(each, place) for key, each in value.items() if key not in VOLATILE_KEYS}
    if isinstance(value, list):
        return [plain(each, place) for each in value]
    return value.replace(place, "") if isinstance(value, str) else value


def contents(path: Path) -> str:
    """A digest of a file; of JSON, of its values."""
    data = path.read_bytes()
    if path.name == "reshard-manifest.json":
        data = json.dumps([entry["size"] for entry in json.loads(data)["files"]]).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def run(job: Job, tree: Path, place: Path) -> dict[str, Any]:
    """What a commit prints, exits with and writes; always in a directory of the same path, which outputs may hold."""
    place = place / job.name.replace("/", " ")
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "NO_COLOR": "1"}
    results: dict[str, Any] = {}
    for command in job.commands:
        typed = " ".join(command).replace(str(ROOT) + "/", "").replace(str(SHARED), "shared")
        done = subprocess.run(
            [sys.executable, "-m", "reshard", *command], cwd=place, env=environment, capture_output=True, text=True
        )
        try:
            printed = plain(json.loads(done.stdout), str(place)) if done.stdout else None
        except ValueError:
            printed = done.stdout
        results[typed] = {"status": done.returncode, "printed": printed}
        if "internal error" in done.stderr:
            results[typed]["error"] = done.stderr
    files = sorted(path for path in place.rglob("*") if path.is_file())
    results["files"] = {
        str(path.relative_to(place)): contents(path)
        for path in files
        if not RECORDS.search(str(path.relative_to(place)))
    }
    shutil.rmtree(place)
    return results


def differences(first: Any, second: Any, place: str = "") -> Iterator[str]:
    """Where two results differ, one line each."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            if key not in first or key not in second:
                yield f"{place}/{key}: only {'before' if key in first else 'after'}"
            else:
                yield from differences(first[key], second[key], f"{place}/{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (one, other) in enumerate(zip(first, second)):
            yield from differences(one, other, f"{place}/{number}")
    elif first != second:
        yield f"{place}: {str(first)[:200]!r} became {str(second)[:200]!r}"


def tree_of(revision: str, directory: Path) -> Path:
    """The package as it is in a revision; the working tree where none is named."""
    if not revision:
        return ROOT
    directory.mkdir()
    archive = subprocess.run(["git", "archive", revision, "reshard"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return directory


def main() -> int:
    """Compare and print differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", default="")
    parser.add_argument("--keep", metavar="FILE", help="write both results as JSON")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="only jobs whose names contain this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        inputs = place / "inputs"
        inputs.mkdir()
        trees = [tree_of(arguments.base, place / "base-tree"), tree_of(arguments.head, place / "head-tree")]
        chosen = [job for job in jobs(inputs) if arguments.only in job.name]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            base, head = (
                {job.name: result for job, result in zip(chosen, pool.map(run, chosen, repeat(tree), repeat(place)))}
                for tree in trees
            )
        if arguments.keep:
            Path(arguments.keep).write_text(json.dumps([base, head], indent=1))
        actual = list(differences(base, head))
        print("\n".join(actual[:400]))
        commands, files = sum(len(job.commands) for job in chosen), sum(len(side["files"]) for side in base.values())
        print(f"{len(actual)} differences in {commands} commands and {files} files")
    return 1 if actual else 0


if __name__ == "__main__":
    sys.exit(main())
