"""verify and --verify: correct conversions verify, and mistakes of a conversion are found."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints import FileHandles, read_index
from reshard.execute import filling, parts, reader
from reshard.forms.target import Cut
from reshard.layout import boxes_of_range
from reshard.plan import plan
from reshard.plan.pieces import TargetTensor
from tests.mistakes import another_rank, off_by_one
from tests.reference import Strategy
from tests.running import Argument, done, fails, reshard, warns
from tests.small import COPIED, SOURCE, TARGET, World, tensors, without
from tests.trees import (
    cut_ranks,
    layout,
    read_checkpoint,
    scalar,
    single,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

FULL = tensors()


def flip(path: Path, name: str, at: int = 5) -> None:
    """Change one bit of a tensor's content."""
    with FileHandles() as handles:
        (offset, _), *_ = read_index(handles, str(path)).tensors[name].extents
    data = bytearray(path.read_bytes())
    data[offset + at] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_correct_conversion_verifies(world: World) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32", "--verify")
    done("verify", world.dst)
    assert world.verify().status == 0


def test_verify_of_another_checkpoint_names_the_commands_that_check_it(world: World) -> None:
    world.save(FULL)
    for place in (world.src, world.src / "rank_0" / "net-1_10.ckpt"):
        texts = [f"{place}: is no directory that reshard wrote", f"reshard inspect {place}", "--src SRC"]
        fails(3, "verify", place, texts=texts)


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("name", ["w", "v", "m.w", "global_step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_is_found_and_named_with_its_rank(world: World, rank: int, name: str, ending: str) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32", "--format", ending)
    flip(world.dst / f"rank_{rank}" / f"checkpoint_{rank}.{ending}", name, 1)
    alone = fails(4, "verify", world.dst)
    assert f"rank {rank}" in alone.out + alone.err
    result = world.verify("--json")
    assert result.status == 4
    differences = json.loads(result.out)["differences"]
    assert [rank] in [difference["ranks"] for difference in differences if difference["parameter"] == name]


def test_without_checksums_comparing_headers_alone_requires_an_option(world: World) -> None:
    world.save(FULL)
    world.convert()
    flip(world.dst / "rank_1" / "checkpoint_1.ckpt", "w")
    world.src = world.src.rename(world.root / "moved")
    unchecked = {"differences": [], "unchecked_ranks": [0, 1]}
    texts = ["contents of ranks 0-1 were not compared", "no checksums", "--src", "--headers-only"]
    assert "verified" not in fails(2, "verify", world.dst, texts=texts).err
    assert fails(2, "verify", world.dst, "--json", texts=texts).json == unchecked
    fails(2, "verify", world.dst, "--quiet", texts=texts)
    output = done("verify", world.dst, "--headers-only").err
    assert "contents of ranks 0-1 were not compared" in output and "verified" not in output
    assert done("verify", world.dst, "--headers-only", "--json").json == unchecked
    assert world.verify().status == 4


@pytest.mark.parametrize("ending", ["", "/rank_{rank}/*_10.ckpt"])
def test_contents_without_checksums_are_compared_with_the_recorded_source(world: World, ending: str) -> None:
    world.save(FULL)
    world.save({**FULL, "w": value("other", (8, 6))}, "rank_{rank}/net-1_10_other.ckpt")
    src = f"{world.src}{ending}"
    options: list[Argument] = [] if ending else ["--file-suffix", "_10"]
    done("convert", src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new, *options)
    result = done("verify", world.dst, "--json")
    assert result.json == {"differences": [], "unchecked_ranks": []} and f"no differences from {src}" in result.err
    flip(world.dst / "rank_1" / "checkpoint_1.ckpt", "w")
    (difference,) = fails(4, "verify", world.dst, "--json").json["differences"]
    assert (difference["parameter"], difference["ranks"]) == ("w", [1])
    shutil.rmtree(world.src / "rank_0")
    shutil.rmtree(world.src / "rank_2")
    fails(3, "verify", world.dst, texts=["w", "--headers-only"])


def test_absent_copies_are_not_reported_as_verified(tmp_path: Path) -> None:
    rows, whole = layout([4], [0, -1]), layout([4], [-1, -1])
    for names in ("w", "wv"):
        strategy = single({name: rows if name == "w" else whole for name in names})
        old = write_strategy(tmp_path / f"old-{names}", strategy)
        write_tree(tmp_path / names, cut_ranks(strategy, {name: value(name, (8, 6)) for name in names}, COPIED))
        words: list[Argument] = ["verify", tmp_path / names, "--replicas", "--strategy", old]
        if names == "w":
            fails(2, *words, texts=["nothing was compared", "--src SRC"])
        else:
            assert "verified: copies do not differ; 1 parameter without copies" in done(*words).err
        fails(3, *words, "--include", "other.*", texts=["nothing to compare"])


def test_ranks_outside_the_manifest_are_wrong_usage(world: World) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32")
    fails(2, "verify", world.dst, "--ranks", "1-3", texts=["ranks 2-3 (--ranks) are out of range", "ranks 0-1"])


def test_a_modified_file_gives_a_warning_where_contents_are_not_compared(world: World) -> None:
    world.save(FULL)
    world.convert()
    world.src = world.src.rename(world.root / "moved")
    assert "changed" not in fails(2, "verify", world.dst).err
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fails(2, "verify", world.dst, texts=["rank 1: modified after they were written"])
    assert world.verify().status == 4


@pytest.mark.parametrize("damage", ["truncate", "remove", "grow", "header"])
def test_files_that_contradict_the_manifest_are_found(world: World, damage: str) -> None:
    world.save(FULL)
    world.convert()
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        change: dict[str, Callable[[], bytes]] = {
            "truncate": lambda: data[:-3],
            "grow": lambda: data + b"\0",
            "header": lambda: data.replace(b"m.w", b"m.x"),
        }
        path.write_bytes(change[damage]())
    result = fails(4, "verify", world.dst)
    assert "rank 1" in result.out + result.err


def test_a_directory_without_a_manifest_cannot_be_verified_alone(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    fails(3, "verify", world.dst, texts=["reshard-manifest.json"])
    assert world.verify("--ranks", "0").status == 0
    assert world.verify().status == 4


def test_a_foreign_file_beside_the_targets_is_found(world: World) -> None:
    world.save(FULL)
    world.convert()
    other = world.dst / "rank_0" / "other-1_1.ckpt"
    other.write_bytes((world.dst / "rank_0" / "checkpoint_0.ckpt").read_bytes())
    assert fails(4, "verify", world.dst).out.count("other-1_1") == 1


def test_ranks_outside_the_target_are_differences_unless_ranks_are_selected(world: World) -> None:
    world.save(FULL)
    world.convert()
    (world.dst / "reshard-manifest.json").unlink()
    extra = world.dst / "rank_7" / "checkpoint_7.ckpt"
    extra.parent.mkdir()
    extra.write_bytes((world.dst / "rank_1" / "checkpoint_1.ckpt").read_bytes())
    result = world.verify()
    assert result.status == 4 and "rank 7" in result.out
    assert world.verify("--ranks", "0-1").status == 0


@pytest.mark.parametrize("manifest", [True, False])
def test_only_selected_ranks_are_compared(world: World, manifest: bool) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32")
    flip(world.dst / "rank_1" / "checkpoint_1.ckpt", "w")
    if not manifest:
        (world.dst / "reshard-manifest.json").unlink()
    else:
        assert done("verify", world.dst, "--ranks", "0").status == 0
        fails(4, "verify", world.dst, "--ranks", "1")
    assert world.verify("--ranks", "0").status == 0
    assert world.verify("--ranks", "1").status == 4


def test_an_older_step_beside_the_newest_is_a_difference(world: World) -> None:
    world.save(FULL)
    world.convert()
    (world.dst / "reshard-manifest.json").unlink()
    for rank in (0, 1):
        path = world.dst / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        path.rename(path.with_name("net-1_10.ckpt"))
    assert world.verify().status == 0
    old = world.dst / "rank_1" / "net-1_9.ckpt"
    old.write_bytes((world.dst / "rank_1" / "net-1_10.ckpt").read_bytes())
    flip(old, "w")
    result = world.verify("--json")
    assert result.status == 4
    (differences,) = json.loads(result.out)["differences"]
    assert (differences["kind"], differences["ranks"]) == ("file", [1]) and "net-1_9.ckpt" in differences["detail"]
    assert world.verify("--ranks", "0").status == 0
    (world.dst / "rank_1" / "net-1_10.ckpt").unlink()
    result = world.verify()
    assert result.status == 4 and "rank 1: is missing" in result.out


def test_missing_parameters_are_noted_when_replicas_are_compared(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["verify", world.src, "--replicas", "--strategy", world.old]
    assert "missing in some files" not in done(*words).err
    ranks = cut_ranks(SOURCE, FULL, COPIED)
    del ranks[2]["v"], ranks[3]["v"], ranks[1]["w"]
    write_tree(world.src, ranks)
    (line,) = [line for line in done(*words).err.splitlines() if "missing in some files" in line]
    assert "'w' not on rank 1" in line and "'v' not on ranks 2-3" in line


@pytest.mark.parametrize("without", [[0], [0, 1]])
def test_contents_without_a_checksum_are_listed_with_their_ranks(world: World, without: list[int]) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32")
    assert "contents" not in done("verify", world.dst).err
    path = world.dst / "reshard-manifest.json"
    manifest = json.loads(path.read_text())
    for rank in without:
        manifest["files"][rank]["crc32"] = None
    path.write_text(json.dumps(manifest))
    done("verify", world.dst)
    world.src.rename(world.root / "moved")
    where = "contents of rank 0 were" if without == [0] else "contents of ranks 0-1 were"
    fails(2, "verify", world.dst, texts=[where])
    assert reshard("verify", world.dst, "--ranks", "1").status == (2 if 1 in without else 0)


@pytest.mark.parametrize(
    "words",
    [
        ("--headers-only", "--src", "SRC"),
        ("--headers-only", "--replicas"),
        ("--replicas", "--ranks", "0"),
        ("--strategy", "x"),
        ("--src-strategy", "x"),
    ],
)
def test_contradictory_options_of_verify_are_wrong_usage(world: World, words: Sequence[str]) -> None:
    world.save(FULL)
    world.convert()
    fails(2, "verify", world.dst, *(world.src if word == "SRC" else word for word in words))


def test_replicas_of_a_target_are_compared_by_its_recorded_strategy(world: World) -> None:
    world.save(FULL)
    fails(2, "verify", world.src, "--replicas", texts=["do not record how they are cut", "--strategy FILE"])
    world.convert()
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    assert "recorded strategy" in done("verify", world.dst, "--replicas").err
    written = path.stat()
    flip(path, "v")
    fails(2, "verify", world.dst, "--replicas", texts=["do not record how they are cut"])
    # A damaged disk changes no times.
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    texts = fails(4, "verify", world.dst, "--replicas").out
    assert "'v'" in texts


def test_copies_and_the_source_are_compared_in_one_run(world: World) -> None:
    world.save(FULL)
    done("convert", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.old, "--cast", "fp16")
    source: list[Argument] = ["--src", world.src, "--src-strategy", world.old, "--dst-strategy", world.old]
    result = done("verify", world.dst, "--replicas", "--strategy", world.old, *source, "--cast", "fp16")
    assert "no CRC is recorded" not in result.err


def slice_moved_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "StoredSlice", off_by_one)


def axes_swapped(patch: pytest.MonkeyPatch) -> None:
    """A planner that counts ranks from the wrong end."""
    plain = Cut.slice_of
    patch.setattr(Cut, "slice_of", lambda self, local: plain(self, self.target.device_count - 1 - local))


def wrong_replica(patch: pytest.MonkeyPatch) -> None:
    """Cells taken from a rank that holds another slice."""
    patch.setattr(plan, "StoredSlice", another_rank)


def piece_skipped(patch: pytest.MonkeyPatch) -> None:
    """A piece of a block that is never filled."""
    plain = filling.BlockFiller.fill

    def fill(self: Any, tensor: TargetTensor, block: Any, out: memoryview) -> None:
        out[:] = bytes(len(out))
        plain(self, tensor._replace(pieces=tensor.pieces[1:]) if tensor.name == "w" else tensor, block, out)

    patch.setattr(filling.BlockFiller, "fill", fill)
    patch.setattr(filling.BlockFiller, "most_shared_rows", lambda self, shared: 0)


def transposed(patch: pytest.MonkeyPatch) -> None:
    """Elements gathered in the other order."""
    plain = filling.BlockFiller.fill

    def fill(self: Any, tensor: TargetTensor, block: Any, out: memoryview) -> None:
        plain(self, tensor, block, out)
        shape = [high - low for low, high in block]
        if tensor.name == "w" and len(shape) == 2:
            array = np.frombuffer(out, dtype=f"V{tensor.item_size}").reshape(shape).copy()
            out[:] = array.T.tobytes()

    patch.setattr(filling.BlockFiller, "fill", fill)
    patch.setattr(filling.BlockFiller, "most_shared_rows", lambda self, shared: 0)


def rows_swapped(patch: pytest.MonkeyPatch) -> None:
    """Two parts of a target written in each other's place."""
    plain = boxes_of_range

    def boxes(shape: Any, start: int, stop: int, most: int) -> Any:
        actual = list(plain(shape, start, stop, min(most, 6)))
        if len(actual) > 1 and len({math.prod(high - low for low, high in box) for box in actual[:2]}) == 1:
            actual[0], actual[1] = actual[1], actual[0]
        return iter(actual)

    patch.setattr(parts, "boxes_of_range", boxes)
    patch.setattr(filling.BlockFiller, "most_shared_rows", lambda self, shared: 0)


def copied_from_zeros(patch: pytest.MonkeyPatch) -> None:
    """A scalar that is lost on its slice_set."""
    plain = reader.FileReader.fill

    def fill(self: Any, tensor: TargetTensor, block: Any, out: memoryview) -> None:
        plain(self, tensor, block, out)
        if tensor.name == "global_step":
            out[:] = bytes(len(out))

    patch.setattr(reader.FileReader, "fill", fill)


MUTANTS = [
    slice_moved_by_one, axes_swapped, wrong_replica, piece_skipped, transposed, rows_swapped, copied_from_zeros,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_verify_finds_a_mistake_of_the_conversion(
    mutant: Callable[[pytest.MonkeyPatch], None], ending: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    options = ["--format", ending, "--max-memory", "1B"]
    with monkeypatch.context() as patch:
        mutant(patch)
        result = reshard(*world.words(*options, "--verify"))
    assert result.status == 4, f"not found: {result.err}"
    assert "must not be used" in result.err
    world.convert(*options, "--overwrite", "--verify")


def recovery(tmp_path: Path) -> tuple[list[Argument], Path]:
    """Recovered ranks of two stages, the second with an unlisted tied table; returns the options of verify."""
    cut, table = layout([2], [0, -1]), layout([2], [-1, 0])
    strategy: Strategy = [
        {"devices": 2, "layouts": {"emb": cut, "a": cut}},
        {"devices": 4, "layouts": {"b": layout([4], [-1, -1])}},
    ]
    full = {name: value(name, (4, 6)) for name in ("emb", "a", "b")}
    saved = cut_ranks(strategy, full, COPIED)
    for rank, part in cut_ranks(single({"emb": table}), {"emb": full["emb"]}).items():
        for target in (2 + rank, 4 + rank):
            saved[target].update(part)
    for rank in saved:
        saved[rank]["cur_rank"] = scalar(rank)
    # A value that only some ranks have, and a rank that nothing is left of.
    saved[5]["loss_scale"] = scalar(1024, "Float32")
    write_tree(tmp_path / "src", {rank: contents for rank, contents in saved.items() if rank != 4})
    old = write_strategy(tmp_path / "old", strategy)
    done("recover", tmp_path / "src", tmp_path / "dst", "--strategy", old)
    words: list[Argument] = ["--src", tmp_path / "src", "--src-strategy", old, "--dst-strategy", old]
    return ["verify", tmp_path / "dst", *words], tmp_path / "dst"


def test_a_recovery_is_verified_with_values_of_ranks(tmp_path: Path) -> None:
    words, dst = recovery(tmp_path)
    done(*words)
    # The same tree is no conversion: that would copy values from the lowest rank to all.
    for records in (dst / ".reshard", dst / "reshard-manifest.json"):
        shutil.rmtree(records) if records.is_dir() else records.unlink()
    assert {difference["parameter"] for difference in fails(4, *words, "--json").json["differences"]} == {
        "emb",
        "loss_scale",
    }


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("name", ["emb", "b", "global_step", "cur_rank"])
def test_a_wrong_bit_in_a_recovery_is_found(name: str, rank: int, tmp_path: Path) -> None:
    words, dst = recovery(tmp_path)
    flip(dst / f"rank_{rank}" / "net-1_10.ckpt", name, 1)
    result = fails(4, *words, "--json")
    assert [rank] in [
        difference["ranks"] for difference in result.json["differences"] if difference["parameter"] == name
    ]


@pytest.mark.parametrize(("rank", "name"), [(2, "emb"), (4, "emb"), (4, "loss_scale"), (5, "loss_scale"), (4, "b")])
def test_parameters_missing_in_a_recovery_are_found(name: str, rank: int, tmp_path: Path) -> None:
    words, dst = recovery(tmp_path)
    path = dst / f"rank_{rank}" / "net-1_10.ckpt"
    path.chmod(0o644)
    write_checkpoint(path, {n: tensor for n, tensor in read_checkpoint(path).items() if n != name})
    result = fails(4, *words, "--json")
    assert ("missing", name, [rank]) in [
        (difference["kind"], difference["parameter"], difference["ranks"]) for difference in result.json["differences"]
    ]


def test_recovered_lost_ranks_are_verified_alone(tmp_path: Path) -> None:
    words, _ = recovery(tmp_path)
    lost = tmp_path / "lost"
    done("recover", tmp_path / "src", lost, "--strategy", tmp_path / "old.ckpt", "--lost-only")
    done("verify", lost, *words[2:])
    flip(lost / "rank_4" / "net-1_10.ckpt", "emb", 1)
    fails(4, "verify", lost, *words[2:])


@pytest.mark.deep
def test_requested_ranks_of_a_recovery_are_verified_alone(tmp_path: Path) -> None:
    words, _ = recovery(tmp_path)
    some = tmp_path / "some"
    recover: list[Argument] = ["recover", tmp_path / "src", some, "--strategy", tmp_path / "old.ckpt", "--ranks"]
    done(*recover, "4")
    done(*recover, "1")
    warns(done("verify", some, *words[2:]), "compared: ranks 1,4; not requested: ranks 0,2-3,5", "no differences")
    flip(some / "rank_4" / "net-1_10.ckpt", "emb", 1)
    fails(4, "verify", some, *words[2:])
    (some / "rank_4" / "net-1_10.ckpt").unlink()
    assert "rank 4: is missing" in fails(4, "verify", some, *words[2:]).out


def test_missing_ranks_of_a_conversion_are_differences(world: World) -> None:
    """Other machines may write them; the ranks that exist can be verified alone."""
    world.save(FULL)
    world.convert("--ranks", "1")
    result = world.verify()
    assert result.status == 4 and "rank 0: is missing" in result.out
    warns(result, "not written yet: rank 0; to compare only rank 1, add --ranks 1")
    assert world.verify("--ranks", "1").status == 0


def test_slices_without_rows_may_be_absent_from_ckpt_files(tmp_path: Path) -> None:
    strategy = single({"table": layout([2], [0, -1], uneven=[0, 8])})
    saved = cut_ranks(strategy, {"table": value("table", (8, 3))}, COPIED)
    world = World(tmp_path, strategy, strategy)
    for ending in ("ckpt", "safetensors"):
        world.src, world.dst = tmp_path / f"src-{ending}", tmp_path / f"dst-{ending}"
        write_tree(world.src, saved, f"rank_{{rank}}/net-1_10.{ending}")
        write_tree(world.dst, {0: COPIED, 1: saved[1]}, f"rank_{{rank}}/net-1_10.{ending}")
        assert world.verify().status == (0 if ending == "ckpt" else 4)
        write_tree(world.dst, {1: COPIED}, f"rank_{{rank}}/net-1_10.{ending}")
        assert world.verify().status == 4


@pytest.mark.parametrize("form", ["ranks", "huggingface"])
def test_tensors_that_only_the_source_holds_are_named(form: str, world: World) -> None:
    """Users may delete the source after a verification without differences."""
    world.save(FULL)
    typed = {"ranks": ("--dst-strategy", write_strategy(world.root / "part", without(TARGET, "m.w")))}
    into = typed.get(form, ("--to", form, "--exclude", "m.*"))
    done("convert", world.src, world.dst, "--src-strategy", world.old, *into)
    result = done("verify", world.dst, "--src", world.src)
    warns(result, f"{world.dst} lacks 1 tensor of {world.src}", "left out: 'm.w'", "verified: no differences")
    # Without a reason to leave it out, a missing tensor is a difference.
    flip(min(world.dst.rglob("*.ckpt" if form == "ranks" else "*.safetensors")), "w")
    assert "lacks 1 tensor" not in fails(4, "verify", world.dst, "--src", world.src).err
    done("convert", world.src, world.root / "whole", "--src-strategy", world.old, "--dst-strategy", world.new)
    assert "lacks" not in done("verify", world.root / "whole", "--src", world.src).err
