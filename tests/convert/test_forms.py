"""Every form of checkpoint to every other and back: the same values, and `--verify` finds any other."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.forms import FINISHED, FORMS, in_safetensors, to
from tests.running import Argument, done, fails, warns
from tests.sampling import some_of
from tests.small import SOURCE, TARGET, World, tensors
from tests.trees import flip, layout, read_checkpoint, read_tree, same_ranks, scalar, single, value, write_checkpoint

FULL = tensors()

LAST = {
    "checkpoint2": "latest_checkpointed_iteration.txt",
    "unified": "param_name_map.json",
    "huggingface": "model.safetensors.index.json",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The small checkpoint as a form, verified, made once for all tests."""
    world = World(tmp_path_factory.mktemp("made"), SOURCE, TARGET)
    world.save(FULL)

    @cache
    def make(form: str) -> Path:
        words: list[Argument] = ["--src-strategy", world.old, *in_safetensors(form), *to(form, world)]
        done("convert", world.src, world.root / form, *words, "--verify", "--checksum", "crc32")
        done("verify", world.root / form)
        return world.root / form

    return make


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMS, FORMS)))
def test_every_pair_of_forms_converts_and_verifies_and_damage_is_found(
    first: str, second: str, made: Callable[[str], Path], world: World
) -> None:
    one, two, ranks = made(first), world.root / "two", world.root / "ranks"
    source: list[Argument] = ["--src-strategy", world.new] if first == "ranks" else []
    done("convert", one, two, *source, *in_safetensors(second), *to(second, world), "--verify")
    back: list[Argument] = ["--src-strategy", world.new] if second == "ranks" else []
    done("convert", two, ranks, *back, "--dst-strategy", world.new, "--format", "ckpt")
    same_ranks(read_tree(ranks), world.expected(FULL))
    if second == "dcp":
        return
    path = next(path for path in sorted(two.rglob("*.safetensors")) if "w" in read_checkpoint(path))
    flip(path, "w")
    target: list[Argument] = ["--dst-strategy", world.new] if second in ("ranks", "checkpoint2") else []
    result = fails(4, "verify", two, "--src", one, *source, *target, "--json")
    (difference,) = result.json["differences"]
    assert (difference["kind"], difference["parameter"]) == ("content", "w")
    assert difference["ranks"] if second == "ranks" else difference["files"] == [str(path.relative_to(two))]


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("form", FORMS[1:])
def test_weights_of_one_element_come_back(form: str, ending: str, world: World) -> None:
    full = {
        "layer.weight": value("w", (4, 3)),
        "layer.bias": value("b", (1,)),
        "head.weight": value("h", (1, 1)),
        "gate.weight": scalar(2, "Float32"),
        "adam_m.layer.bias": value("m", (1,)),
        "scale": scalar(3, "Float32", shape=(1,)),
        "global_step": scalar(7, shape=(1,)),
    }
    write_checkpoint(world.src / "rank_0" / f"net-1_10.{ending}", full)
    words: list[Argument] = to(form, world)
    if "--dst-strategy" in words:
        words[words.index("--dst-strategy") + 1] = "none"
    done("convert", world.src, world.root / "one", "--src-strategy", "none", *words, "--verify")
    done("convert", world.root / "one", world.dst, "--dst-strategy", "none")
    same_ranks(read_tree(world.dst), {0: full})


@pytest.mark.parametrize("form", FORMS[1:])
def test_output_does_not_depend_on_jobs_shards_and_interruptions(form: str, world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["--src-strategy", world.old, *to(form, world)]
    if form in ("unified", "huggingface"):
        words += ["--max-shard-size", "300B"]
    one, two = world.root / "one", world.root / "two"
    done("convert", world.src, one, *words, "--jobs", 1)
    files = len(json.loads((one / "reshard-manifest.json").read_text())["files"])
    assert files > 1
    for number in reversed(range(files)):
        assert not list(two.rglob("*.json")) or all(".reshard" in str(path) for path in two.rglob("*.json"))
        assert not list(two.rglob("latest_*"))
        done("by-rank", number, world.src, two, *words, "--jobs", 4)
    for path in sorted(one.rglob("*")):
        if path.is_file() and ".reshard" not in path.parts:
            assert (two / path.relative_to(one)).read_bytes() == path.read_bytes(), path
    done("convert", world.src, two, *words)


def test_options_that_do_not_apply_to_a_form_are_wrong_usage(world: World) -> None:
    world.save(FULL)
    hf, new = world.root / "hf", world.root / "new"
    done("convert", world.src, hf, "--src-strategy", world.old, "--to", "huggingface")
    fails(2, "convert", hf, new, texts=["--dst-strategy", "checkpoint2, unified or huggingface"])
    fails(2, "convert", hf, new, "--src-strategy", world.old, "--dst-strategy", world.new, texts=["needs no strategy"])
    fails(2, "convert", hf, new, "--to", "unified", "--dst-strategy", world.new, texts=["leave out --dst-strategy"])
    fails(2, "convert", hf, new, "--to", "unified", "--format", "ckpt", texts=[".safetensors"])
    fails(2, "convert", hf, new, "--dst-strategy", "same", texts=["no strategy"])
    fails(2, "convert", hf, new, "--to", "unified", "--step", "3_10", texts=["no steps"])
    fails(2, "convert", hf, new, "--dst-strategy", world.new, "--max-shard-size", "5GB", texts=["--max-shard-size"])
    fails(2, "by-rank", 7, hf, new, "--to", "unified", texts=["out of range"])
    for form in ("huggingface", "unified", "dcp"):
        shards = ("--shards", 2) if form == "dcp" else ()
        fails(2, "convert", hf, new, "--to", form, *shards, "--prefix", "net_", texts=["--prefix", form, "--rename"])
    assert not new.exists()


@pytest.mark.parametrize("form", FINISHED)
def test_a_completed_directory_of_another_program_is_not_removed(form: str, world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["--src-strategy", world.old, *to(form, world), "--max-shard-size", "300B"]
    words = words[:-2] if form == "checkpoint2" else words
    world.dst.mkdir()
    (world.dst / LAST[form]).write_text("{}")
    fails(3, "convert", world.src, world.dst, *words, texts=[LAST[form]])
    assert (world.dst / LAST[form]).read_text() == "{}"
    done("convert", world.src, world.dst, *words, "--overwrite")
    assert (world.dst / LAST[form]).read_text() != "{}"


@pytest.mark.parametrize("form", FINISHED)
def test_targets_that_cannot_be_replaced_are_an_error_before_writing(form: str, world: World) -> None:
    world.save(FULL)
    (world.dst / LAST[form]).mkdir(parents=True)
    limit: list[Argument] = [] if form == "checkpoint2" else ["--max-shard-size", "300B"]
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, *to(form, world), *limit]
    fails(3, *words, "--overwrite", texts=[f"{world.dst / LAST[form]} is not a regular file"])
    assert not list(world.dst.rglob("*.safetensors"))


def test_a_single_file_that_replaces_several_has_no_index(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, "--to", "huggingface"]
    done(*words, "--max-shard-size", "300B")
    assert (world.dst / LAST["huggingface"]).is_file()
    done(*words, "--overwrite")
    assert {path.name for path in world.dst.glob("model*")} == {"model.safetensors"}


@pytest.mark.deep
@pytest.mark.parametrize(("first", "second"), some_of(itertools.permutations(FORMS, 2), 5))
def test_replacing_a_form_removes_all_its_files(first: str, second: str, world: World) -> None:
    world.save(FULL)
    source: list[Argument] = ["--src-strategy", world.old]
    sizes: list[Argument] = ["--max-shard-size", "300B"]
    for form in (first, second):
        limit = sizes if form in ("unified", "huggingface") else []
        done("convert", world.src, world.dst, *source, *to(form, world), *limit, "--overwrite")
    whole = world.root / "whole"
    limit = sizes if second in ("unified", "huggingface") else []
    done("convert", world.src, whole, *source, *to(second, world), *limit)
    names = [
        sorted(str(path.relative_to(root)) for path in root.rglob("*") if ".reshard" not in path.parts)
        for root in (world.dst, whole)
    ]
    assert names[0] == names[1]


@pytest.mark.deep
@pytest.mark.parametrize(("first", "second"), some_of(itertools.permutations(FORMS, 2), 5, 1))
def test_unrecorded_files_of_another_form_are_refused(first: str, second: str, world: World) -> None:
    world.save(FULL)
    done("convert", world.src, world.dst, "--src-strategy", world.old, *to(first, world))
    for path in world.dst.glob("*reshard*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {path: path.stat().st_mtime_ns for path in world.dst.rglob("*")}
    for overwrite in ([], ["--overwrite"]):
        words: list[Argument] = ["--src-strategy", world.old, *to(second, world), *overwrite]
        fails(3, "convert", world.src, world.dst, *words, texts=["choose another DST"])
    assert {path: path.stat().st_mtime_ns for path in world.dst.rglob("*")} == before


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_one_element_is_proven_in_every_form(form: str, tmp_path: Path) -> None:
    full = {"w": value("w", (8, 6)), "gate": value("gate", (1,)), "layers.0.scale": value("scale", ())}
    old = single({"w": layout([2], [0, -1]), "gate": layout([2], [-1]), "layers.0.scale": layout([2], [])})
    world = World(tmp_path, old, old)
    world.save(full)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, *to(form, world)]
    done(*words, *in_safetensors(form), "--verify")
    if form == "dcp":
        return
    (path,) = [path for path in world.dst.rglob("*.safetensors") if "gate" in read_checkpoint(path)][:1]
    content = read_checkpoint(path)
    changed = content["gate"].array + 1
    path.chmod(0o600)
    write_checkpoint(path, {**content, "gate": content["gate"]._replace(array=changed)})
    target: list[Argument] = ["--dst-strategy", world.new] if form in ("ranks", "checkpoint2") else []
    fails(4, "verify", world.dst, "--src", world.src, "--src-strategy", world.old, *target, texts=["must not be used"])


def test_values_alone_do_not_make_a_checkpoint2_directory(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["--src-strategy", world.old, *to("checkpoint2", world)]
    fails(3, "convert", world.src, world.dst, *words, "--include", "global_step", texts=["'global_step'", "--include"])
    assert not world.dst.exists()
    full = world.root / "full"
    done("convert", world.src, full, "--src-strategy", world.old, "--to", "huggingface", "--include", "global_step")
    fails(3, "convert", full, world.dst, *to("checkpoint2", world), texts=["'global_step'", "write another form"])


def test_a_weight_without_a_layout_is_reported(world: World) -> None:
    world.save(FULL, copied={"layers.0.gate": scalar(3, shape=(1,))})
    words: list[Argument] = ["--src-strategy", world.old, *to("checkpoint2", world)]
    assert "layers.0.gate" in done("convert", world.src, world.dst, *words).err


@pytest.mark.parametrize("form", ["ranks", *FINISHED])
def test_dtypes_that_mindspore_cannot_read_are_named(form: str, tmp_path: Path) -> None:
    full = {"w": value("w", (8, 6)), "q.weight": value("q", (8, 6), "F8_E4M3")}
    layouts = single({name: layout([2], [0, -1]) for name in full})
    world = World(tmp_path, layouts, layouts)
    write_checkpoint(tmp_path / "src" / "model.safetensors", full)
    result = done("convert", world.src, world.dst, *to(form, world))
    if form == "huggingface":
        assert "MindSpore" not in result.err
    else:
        warns(result, "load no .safetensors file that contains Float8E4M3FN", "'q.weight'")
    assert "MindSpore and" not in done("convert", world.src, tmp_path / "w", *to(form, world), "--include", "w").err


def test_a_negative_step_gives_no_iteration(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src.ckpt", {"w": value("w", (2, 2)), "global_step": scalar((1 << 32) - 1)})
    words: list[Argument] = ["--src-strategy", "none", "--to", "checkpoint2", "--dst-strategy", "none", "--verify"]
    warns(done("convert", source, tmp_path / "c2", *words), "global_step is -1")
    common = json.loads((tmp_path / "c2" / "iteration_00000000" / "common.json").read_text())
    assert common.get("global_step") is None
    done("convert", tmp_path / "c2", tmp_path / "back", "--to", "unified", "--verify")
