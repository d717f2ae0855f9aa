"""status: finished, modified and missing targets, from the records alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from reshard.execute import Progress
from tests.running import Argument, Result, done, fails, reshard
from tests.small import World, tensors
from tests.trees import value, write_checkpoint

FULL = tensors()


def status(world: World) -> dict[str, Any]:
    document = json.loads(done("status", world.dst, "--json").out)
    assert isinstance(document, dict)
    return document


def test_status_counts_ranks_until_completion(world: World) -> None:
    world.save(FULL)
    world.by_rank(1)
    report = status(world)
    assert (report["done"], report["missing"], report["complete"], report["manifest"]) == ([1], [0], False, None)
    assert report["bytes_done"] == (world.dst / "rank_1" / "checkpoint_1.ckpt").stat().st_size
    assert "1 rank missing: 0" in done("status", world.dst).out
    incomplete = reshard("status", world.dst, "--exit-code", "--json")
    assert incomplete.status == 1 and json.loads(incomplete.out) == report
    world.by_rank(0)
    done("status", world.dst, "--exit-code")
    report = status(world)
    assert (report["done"], report["missing"], report["complete"]) == ([0, 1], [], True)
    assert report["step"] == "1_10"
    assert "complete" in done("status", world.dst).out


def test_status_distinguishes_missing_and_modified_files(world: World) -> None:
    world.save(FULL)
    world.convert()
    (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()
    with open(world.dst / "rank_1" / "checkpoint_1.ckpt", "ab") as file:
        file.write(b"more")
    report = status(world)
    assert (report["done"], report["changed"], report["missing"]) == ([], [1], [0])
    assert not report["complete"]
    output = done("status", world.dst).out
    assert "1 rank changed since it was written" in output and "reshard by-rank 1 " in output
    fails(3, *world.words(), texts=["modified after"])
    world.by_rank(1, "--overwrite")
    world.convert()
    assert status(world)["complete"]


def test_status_of_a_copy_reads_its_manifest(world: World) -> None:
    world.save(FULL)
    world.convert()
    shutil.rmtree(world.dst / ".reshard")
    assert status(world)["complete"]
    (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()
    assert status(world)["missing"] == [0]


def test_status_ignores_a_damaged_manifest(world: World) -> None:
    world.save(FULL)
    world.convert()
    path = world.dst / "reshard-manifest.json"
    path.write_text("{")
    assert status(world)["complete"]
    fails(3, "verify", world.dst, texts=["is damaged: it is not valid JSON"])
    path.unlink()
    os.mkfifo(path)
    fails(3, "verify", world.dst, texts=[path])


def test_status_of_another_directory_is_an_error(tmp_path: Path) -> None:
    fails(3, "status", tmp_path, texts=[str(tmp_path)])
    fails(3, "status", tmp_path / "nowhere", texts=["nowhere"])


def test_a_recovery_of_lost_ranks_is_complete_without_the_others(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, ranks=[0, 1])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    done(*recover, "--lost-only", "--ranks", "2")
    report = status(plain)
    assert (report["wanted"], report["done"], report["missing"], report["complete"]) == ([2, 3], [2], [3], False)
    assert "not complete: rank 3 not requested yet" in done("status", plain.dst).out
    done(*recover, "--lost-only")
    report = status(plain)
    assert (report["wanted"], report["done"], report["complete"], report["manifest"]) == ([2, 3], [2, 3], True, None)
    output = done("status", plain.dst).out
    assert "4 ranks, only the lost 2 ranks (2-3)" in output and "missing" not in output
    assert "all lost ranks are written" in output
    lost = plain.dst / "rank_3" / "net-1_10.ckpt"
    data = lost.read_bytes()
    lost.unlink()
    report = status(plain)
    assert (report["done"], report["missing"], report["complete"]) == ([2], [3], False)
    lost.write_bytes(data + b"more")
    assert (status(plain)["changed"], status(plain)["complete"]) == ([3], False)
    lost.unlink()
    done("resume", plain.dst)
    assert status(plain)["complete"]
    fails(3, *recover, "--ranks", "0", texts=["another conversion", "the lost ranks of --lost-only (2 3 there"])
    done(*recover, "--overwrite")
    report = status(plain)
    assert report["wanted"] == [0, 1, 2, 3] and report["complete"] and report["manifest"]


def test_a_stopped_recovery_whose_ranks_were_copied_back_is_not_sent_to_the_same_command(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, ranks=[0, 1])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old, "--lost-only"]
    done(*recover)
    shutil.rmtree(plain.dst / "rank_3")
    shutil.copytree(plain.dst / "rank_2", plain.src / "rank_2")
    result = fails(3, *recover, texts=["another conversion", "--lost-only (2 3 there, 3 here)", "--overwrite"])
    assert "the earlier command" not in result.err
    assert "rank 2 is not lost" in done(*recover, "--ranks", "2").err
    done(*recover, "--overwrite")
    assert [(plain.dst / f"rank_{rank}").exists() for rank in (2, 3)] == [False, True]


def test_a_recovery_stays_complete_after_its_ranks_are_copied_back(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, ranks=[0, 1, 2])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old, "--lost-only"]
    assert f"file names are those of {plain.src}" in " ".join(done(*recover).err.split())
    shutil.copytree(plain.dst / "rank_3", plain.src / "rank_3")
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in plain.dst.rglob("*"))
    assert "nothing to write: no rank is lost" in done(*recover).err
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in plain.dst.rglob("*")) == before
    assert status(plain)["complete"]
    shutil.rmtree(plain.dst)
    assert "nothing to write: no rank is lost" in done(*recover).err
    assert not plain.dst.exists()
    (plain.src / "rank_3" / "net-1_10.ckpt").unlink()
    done(*recover)
    (plain.src / "rank_2" / "net-1_10.ckpt").unlink()
    (plain.src / "rank_3" / "net-1_10.ckpt").write_bytes((plain.dst / "rank_3" / "net-1_10.ckpt").read_bytes())
    fails(3, *recover, texts=["another conversion", "(3 there, 2 here)"])
    done(*recover, "--overwrite")
    assert (status(plain)["done"], status(plain)["complete"]) == ([2], True)


def test_a_model_without_its_configuration_is_not_complete(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    config, (old, new) = (
        {"model_type": "toy", "hidden_size": 4},
        (tmp_path / "src" / "config.json", out / "config.json"),
    )
    write_checkpoint(src / "model.safetensors", {"w.weight": value("w", (4, 4))}, metadata={"format": "pt"})
    old.write_text(json.dumps(config))
    done("convert", src, out, "--to", "huggingface")
    assert done("status", out, "--json").json["complete"]
    new.write_text(json.dumps({**config, "hidden_size": 8}))
    assert done("status", out, "--json").json["complete"], "users may edit it"
    new.unlink()
    assert not done("status", out, "--json").json["complete"]
    assert "not complete: config.json missing; run: reshard resume" in done("status", out).out
    assert [one["files"] for one in fails(4, "verify", out, "--headers-only", "--json").json["differences"]] == [
        ["config.json"]
    ]
    done("convert", src, out, "--to", "huggingface")
    assert json.loads(new.read_text()) == config
    assert done("status", out, "--json").json["complete"]


def test_status_lists_missing_files_and_the_command_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    full = {f"w{number}": value(f"w{number}", (8, 16)) for number in range(3)}
    write_checkpoint(src / "model.safetensors", full, metadata={"format": "pt"})
    convert = ("convert", src, out, "--to", "unified", "--max-shard-size", "600B", "--jobs", 1)

    def interrupt_after(files: int) -> Result:
        committed = Progress.committed

        def interrupted(*arguments: Any, **_: Any) -> None:
            if files:
                committed(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            name = "Progress.committed" if files else "write_files"
            patch.setattr(f"reshard.convert.conversion.{name}", interrupted)
            return fails(130, *convert)

    result = interrupt_after(0)
    assert result.err.strip().endswith(shlex.join(["reshard", *map(str, convert)]))
    fails(3, "status", out, texts=["a run that wrote no file leaves no DST: run its command again"])
    result = interrupt_after(1)
    assert result.err.strip().splitlines()[-1].strip() == f"to continue: reshard resume {out}"
    lines = done("status", out).out
    assert "2 files missing: 1-2 (part1.safetensors, part2.safetensors)" in lines
    assert f"run: reshard resume {out}" in lines
    done("resume", out)
    (out / "reshard-manifest.json").unlink()
    assert "not complete: reshard-manifest.json missing; run: reshard resume" in done("status", out).out
