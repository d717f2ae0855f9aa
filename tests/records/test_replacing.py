"""--overwrite replaces another conversion: its recorded, unchanged files are removed, all others stay."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.corpus import FIXTURES, ROOT
from tests.faults import CALLS, ERRORS, failing
from tests.running import Argument, done, fails, reshard
from tests.sampling import some_of
from tests.small import COPIED, World, tensors
from tests.trees import cut_ranks, same_ranks, tree_bytes, version

FULL = tensors()
# The first conversion, and the one that replaces it; only the files of the second remain.
REPLACED = {
    "another format": ((), ("--format", "safetensors")),
    "another prefix": (("--prefix", "net-"), ()),
    "fewer ranks": ((), ("--dst-strategy", "none")),
    "the same names": (("--exclude", "m.*"), ()),
}
# Other forms are killed, too; what they replace is what they are of other files.
KILLED = {
    **REPLACED,
    **{
        form: (("--to", form, *preserved, "--exclude", "m.*"), ("--to", form, *preserved))
        for form, preserved in (
            ("dcp", ("--rename", "*=*")),
            ("hyper-parallel", ("--rename", "*=*")),
            ("hf-sharded", ()),
        )
    },
}


def words(world: World, options: tuple[Argument, ...], dst: Argument) -> list[Argument]:
    typed = world.words(*options)
    typed[2] = dst
    return typed


@pytest.mark.parametrize("kind", REPLACED)
def test_overwrite_replaces_all_of_another_conversion(kind: str, world: World) -> None:
    first, second = REPLACED[kind]
    world.save(FULL)
    done(*words(world, second, world.root / "expected"))
    done(*words(world, first, world.dst))
    (world.dst / "rank_1" / "notes.txt").write_text("mine")
    fails(3, *words(world, second, world.dst), texts=["--overwrite"])
    done(*words(world, (*second, "--overwrite"), world.dst))
    notes = {"rank_1/notes.txt": b"mine"}
    assert tree_bytes(world.dst) == {**tree_bytes(world.root / "expected"), **notes}
    assert done("status", world.dst, "--json").json["complete"]
    done(*words(world, second, world.dst))


def test_overwrite_replaces_targets_given_by_relative_paths(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    monkeypatch.chdir(world.root)
    done(*words(world, (), "dst"))
    done(*words(world, ("--format", "safetensors", "--overwrite"), "dst"))
    assert {path.suffix for path in world.dst.glob("rank_*/*")} == {".safetensors"}


def test_overwrite_removes_empty_directories(world: World) -> None:
    world.save(FULL)
    world.convert()
    done(*world.words("--dst-strategy", "none", "--overwrite"))
    assert sorted(path.name for path in world.dst.glob("r*")) == ["rank_0", "reshard-manifest.json"]


@pytest.mark.parametrize("change", ["trained on", "replaced", "touched"])
def test_overwrite_never_removes_a_modified_file(change: str, world: World) -> None:
    world.save(FULL)
    world.convert()
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    data = path.read_bytes()
    if change == "touched":
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    else:
        path.write_bytes(data + b"more" if change == "trained on" else data[::-1])
    before = tree_bytes(world.dst)
    fails(3, *world.words("--format", "safetensors"), texts=["--overwrite"])
    fails(3, *world.words("--format", "safetensors", "--overwrite"), texts=["rank_1/checkpoint_1.ckpt", "remove"])
    assert tree_bytes(world.dst) == before
    path.unlink()
    world.convert("--format", "safetensors", "--overwrite")
    assert list(tree_bytes(world.dst)) == [f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in (0, 1)]


def test_overwrite_never_removes_an_unrecorded_file(world: World) -> None:
    world.save(FULL)
    world.convert()
    other = world.dst / "rank_1" / "net-1_10.ckpt"
    other.write_bytes(b"mine")
    fails(3, *world.words("--format", "safetensors", "--overwrite"), texts=["rank_1/net-1_10.ckpt"])
    assert other.read_bytes() == b"mine" and len(tree_bytes(world.dst)) == 3


@pytest.mark.parametrize(
    "typed",
    [
        ("by-rank", "--overwrite"),
        ("transform-dir", "--overwrite", "--ranks", "0"),
        ("transform-dir", "--overwrite", "--shard", "0/2"),
        ("transform-dir",),
    ],
)
def test_only_a_run_for_all_ranks_removes_files(typed: tuple[str, ...], world: World) -> None:
    world.save(FULL)
    world.convert()
    before = tree_bytes(world.dst)
    command, *options = typed
    rank: tuple[Argument, ...] = (0,) if command == "by-rank" else ()
    result = fails(3, *world.words(*rank, "--format", "safetensors", *options, command=command))
    assert "--overwrite" in result.err
    assert tree_bytes(world.dst) == before


def test_overwrite_replaces_a_recovery_of_another_step(plain: World) -> None:
    full = {name: FULL[name] for name in ("w", "v")}
    plain.save(full, "rank_{rank}/net-1_10.ckpt")
    plain.save(full, "rank_{rank}/net-1_20.ckpt", ranks=[0, 1, 2])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    done(*recover, "--step", "1_10")
    fails(3, *recover, texts=["--step=1_10", "--overwrite"])
    done(*recover, "--overwrite")
    assert list(tree_bytes(plain.dst)) == [f"rank_{rank}/net-1_20.ckpt" for rank in range(4)]


def tree(root: Path) -> dict[str, bytes]:
    """All files but the records."""
    paths = (path for path in root.rglob("*") if path.is_file() and ".reshard" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("to", [["--format", "torch"], ["--dst-strategy", "same"]])
@pytest.mark.parametrize("records", [True, False])
def test_foreign_files_of_megatrons_legacy_trees_are_refused(records: bool, to: list[str], tmp_path: Path) -> None:
    """Megatron's loader takes them for ranks of the new checkpoint, and one of rank 0 before it."""
    source, dst = FIXTURES / "megatron" / "td_dense_plain" / "checkpoint", tmp_path / "dst"
    first, second, other = (dst / "iter_0000100" / f"mp_rank_{number:02}" for number in range(3))
    legacy = ["--to", "megatron", "--format", "torch", "--sizes", "tp=2"]
    done("convert", source, dst, *legacy)
    if not records:
        shutil.rmtree(dst / ".reshard")
        shutil.rmtree(first)
        (dst / "latest_checkpointed_iteration.txt").unlink()
    convert: list[Argument] = ["convert", source, dst, "--to", "megatron", *to, "--overwrite"]
    changed = second / "model_optim_rng.pt"
    changed.write_bytes(changed.read_bytes() + b"more")
    for path in (other / "model_optim_rng.pt", second / "distrib_optim.pt"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"other")
    # Of the conversion itself, or beside it.
    (dst / "rng_state.pt").write_bytes(b"mine")
    before = tree(dst)
    names = [str(path.relative_to(dst)) for path in (changed, second / "distrib_optim.pt", other / changed.name)]
    fails(3, *convert, texts=["no record of reshard matches", *names])
    assert tree(dst) == before
    for directory in (second, other):
        shutil.rmtree(directory)
    done(*convert)
    done(*convert)
    assert (dst / "rng_state.pt").exists() and not done("status", dst, "--json").json["beside"]


@pytest.mark.parametrize("command", ["convert", "recover"])
def test_a_recovery_of_lost_ranks_removes_no_conversion_to_all_ranks(command: str, plain: World) -> None:
    full = {name: FULL[name] for name in ("w", "v")}
    plain.save(full, "rank_{rank}/net-1_10.ckpt")
    plain.save(full, "rank_{rank}/net-1_20.ckpt", ranks=[0, 1, 2])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    if command == "convert":
        plain.convert("--step", "1_10")
    else:
        done(*recover, "--step", "1_10")
    before = tree_bytes(plain.dst)
    hint = "recover --overwrite, for all ranks"
    fails(3, *recover, "--overwrite", "--lost-only", texts=["another conversion", hint])
    assert tree_bytes(plain.dst) == before


@pytest.mark.deep
@pytest.mark.parametrize("kind", some_of(KILLED, 3))
def test_a_killed_run_with_overwrite_resumes(kind: str, world: World) -> None:
    """At every call that changes something on disk, and twice in a row."""
    first, second = KILLED[kind]
    world.save(FULL)
    done(*words(world, first, world.root / "before"))
    done(*words(world, second, world.root / "after"))
    command = words(world, (*second, "--overwrite", "--jobs", "1"), world.dst)
    # Other calls of each kind, unless it is all of them.
    stops = (0, 1) if LONG else (7 * (list(KILLED).index(kind) % 4), 42)
    arguments = [sys.executable, "-m", "tests.stops", world.root, *stops, *command]
    result = subprocess.run(list(map(str, arguments)), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > (5 if LONG else 2)


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "number"), some_of([(kind, number) for kind in CALLS for number in ERRORS[kind]], 2))
def test_a_failing_system_call_during_overwrite_is_recoverable(kind: str, number: int, world: World) -> None:
    world.save(FULL)
    expected = cut_ranks(world.target, FULL, COPIED)
    world.convert("--prefix", "old")
    before = world.root / "before"
    shutil.copytree(world.dst, before)
    options = ("--overwrite", "--jobs", "1", "--io", "pread")
    with failing(kind, world.root, None, number) as faults:
        world.convert(*options)
    for at in range(1, faults.calls + 1, 1 if LONG else max(1, faults.calls // 3)):
        shutil.rmtree(world.dst)
        shutil.copytree(before, world.dst)
        with failing(kind, world.root, at, number):
            result = reshard(*world.words(*options))
        where = f"{kind} {at} of {faults.calls}: {errno.errorcode[number]}: {result.status}: {result.err}"
        assert result.status in (0, 1, 3) and "internal error" not in result.err, where
        world.convert(*options)
        same_ranks(world.found(), expected)
        assert not list(world.dst.rglob(".reshard-tmp-*")), where


def kill_at_first_target(world: World, *options: Argument, command: str = "convert") -> None:
    """Replace all targets, until the first new file has its name."""
    code = (
        "import os\n"
        "def rename(old, new, **places):\n"
        "    plain(old, new, **places)\n"
        "    if 'checkpoint_' in new:\n"
        "        os._exit(9)\n"
        "plain, os.rename = os.rename, rename\n"
        "from reshard.cli.main import main\n"
        "main()\n"
    )
    typed = [str(word) for word in world.words(*options, "--overwrite", "--jobs", "1", command=command)]
    killed = subprocess.run([sys.executable, "-c", code, *typed], capture_output=True, text=True, cwd=ROOT)
    assert killed.returncode == 9, killed.stderr


def killed_while_replacing(world: World) -> None:
    """Begin to replace all in another format, until the first new file exists."""
    kill_at_first_target(world, "--format", "safetensors")
    assert len(list(world.dst.glob("rank_*/checkpoint_*"))) == 1
    assert len(done("status", world.dst, "--json").json["done"]) == 1


def test_resume_continues_overwrite(world: World) -> None:
    world.save(FULL)
    world.convert()
    killed_while_replacing(world)
    assert len(done("resume", world.dst, "--json").json["ranks"]) == 1
    assert [path.name for path in sorted(world.dst.glob("rank_*/*"))] == [f"checkpoint_{r}.safetensors" for r in (0, 1)]
    assert done("status", world.dst, "--json").json["complete"]


def test_a_stopped_replacement_is_replaced_by_the_first_conversion(world: World) -> None:
    world.save(FULL)
    world.convert()
    killed_while_replacing(world)
    fails(3, *world.words(), texts=["--overwrite"])
    world.convert("--overwrite")
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize("options", [("--ranks", "0"), ("--shard", "0/2")])
def test_a_run_for_some_ranks_replaces_its_own_files(options: tuple[str, ...], world: World) -> None:
    world.save(FULL)
    world.convert()
    before = {path.name: version(path) for path in world.dst.glob("rank_*/*")}
    replaced = done(*world.words("--overwrite", *options, "--json")).json["ranks"]
    after = {path.name: version(path) for path in world.dst.glob("rank_*/*")}
    assert [
        rank for rank in (0, 1) if before[f"checkpoint_{rank}.ckpt"] != after[f"checkpoint_{rank}.ckpt"]
    ] == replaced
    assert done("status", world.dst, "--json").json["complete"]


def test_a_run_for_some_ranks_replaces_nothing_made_from_another_source(world: World) -> None:
    world.save(FULL)
    world.convert()
    before = tree_bytes(world.dst)
    world.save(tensors("other "))
    fails(3, *world.words(0, "--overwrite", command="by-rank"), texts=["--overwrite, for all ranks"])
    assert tree_bytes(world.dst) == before
    world.convert("--overwrite")
    same_ranks(world.found(), world.expected(tensors("other ")))
