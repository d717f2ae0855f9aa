"""`verify` and `convert --verify` of every form of checkpoint."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reshard.plan import plan as plan_module
from tests.corpus import CORPUS2
from tests.corpus2 import needs_corpus2
from tests.forms import FINISHED, FORMS, in_safetensors, to
from tests.mistakes import off_by_one, swapped_rows
from tests.running import Argument, done, fails, warns
from tests.sampling import some_of
from tests.small import PLAIN_TARGET, SOURCE, World, tensors
from tests.trees import flip, layout, read_checkpoint, safetensors_metadata, single, write_checkpoint, write_strategy

FULL = tensors()


def words(form: str, world: World) -> list[Argument]:
    """The strategy options for comparing a form with its source ranks."""
    return ["--src-strategy", world.old, *laid_out(form, world)]


def laid_out(form: str, world: World) -> list[Argument]:
    """The strategy of a converted checkpoint, where it has one."""
    return ["--dst-strategy", world.new] if form in ("ranks", "checkpoint2") else []


def make(form: str, world: World, *options: Argument) -> Path:
    """The small checkpoint as a form."""
    world.save(FULL)
    path = world.root / form
    made_so: list[Argument] = ["--src-strategy", world.old, *in_safetensors(form), *to(form, world)]
    done("convert", world.src, path, *made_so, *options)
    return path


def differs(*arguments: Argument, texts: Sequence[str]) -> None:
    """Run one command, which must find a difference that it describes with every text of `texts`."""
    output = fails(4, *arguments).out
    for text in texts:
        assert text in output, output


def weights(directory: Path) -> list[Path]:
    """Files of tensors."""
    return sorted(directory.rglob("*.safetensors"))


@pytest.mark.deep
@pytest.mark.parametrize("edits", [[], ["--cast", "BFloat16"], ["--rename", "*=*"]], ids=["plain", "cast", "renamed"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("unified", "huggingface")])
def test_verification_needs_of_the_source_what_the_target_holds(
    form: str, edits: list[Argument], tmp_path: Path
) -> None:
    """Optimizer shards of the source are lost, and the target's strategy lists none."""
    world = World(tmp_path, SOURCE, PLAIN_TARGET)
    world.save(FULL, ranks=[0, 1])
    source: list[Argument] = ["--src-strategy", world.old]
    made: list[Argument] = ["--to", form, "--dst-strategy", world.new, *in_safetensors(form), *edits]
    result = done("convert", world.src, world.dst, *source, *made, "--verify")
    warns(result, "the target strategy does not need the rest", "m.w")
    done("verify", world.dst, "--src", world.src, *words(form, world))
    if form != "dcp":
        (path, name) = next(
            (path, name) for path in weights(world.dst) for name in read_checkpoint(path) if name in ("w", "model.w")
        )
        flip(path, name)
        differs("verify", world.dst, "--src", world.src, *words(form, world), texts=[f"'{name}'"])


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Write a file anew with other contents."""
    contents = read_checkpoint(path)
    edit(contents)
    write_checkpoint(path, contents, metadata=safetensors_metadata(path))


@pytest.mark.parametrize("form", FINISHED)
def test_missing_added_and_other_kinds_of_entries_are_found(form: str, world: World) -> None:
    target = make(form, world)
    whole = world.root / "whole"
    shutil.copytree(target, whole)
    path = next(path for path in weights(target) if "global_step" in read_checkpoint(path))

    def differing(edit: Callable[[dict[str, Any]], Any]) -> set[tuple[str, str]]:
        shutil.rmtree(target)
        shutil.copytree(whole, target)
        change(path, edit)
        differences = fails(4, "verify", target, "--src", world.src, *words(form, world), "--json").json["differences"]
        return {(entry["kind"], entry["parameter"]) for entry in differences}

    other = tensors("other")["v"]
    assert ("missing", "global_step") in differing(lambda contents: contents.pop("global_step"))
    assert ("extra", "more.x") in differing(lambda contents: contents.update({"more.x": other}))
    step = read_checkpoint(path)["global_step"]
    assert ("type", "global_step") in differing(
        lambda contents: contents.update(global_step=step._replace(dtype="UInt32"))
    )
    assert ("shape", "global_step") in differing(
        lambda contents: contents.update(global_step=step._replace(array=step.array.reshape((1, 1))))
    )
    assert ("content", "global_step") in differing(
        lambda contents: contents.update(global_step=step._replace(array=step.array + 1))
    )


@pytest.mark.deep
@pytest.mark.parametrize("form", FINISHED)
def test_finishing_files_that_contradict_the_directory_are_found(form: str, world: World) -> None:
    many: list[Argument] = [] if form == "checkpoint2" else ["--max-shard-size", "300B"]
    target = make(form, world, "--checksum", "crc32", *many)
    done("verify", target)
    manifest = json.loads((target / "reshard-manifest.json").read_text())
    assert len(manifest["finishing"]) == (3 if form == "checkpoint2" else 1)
    whole = world.root / "whole"
    shutil.copytree(target, whole)
    for name in [*(entry["file"] for entry in manifest["finishing"]), weights(target)[0].relative_to(target)]:
        for edit in (b"", b" "):
            shutil.rmtree(target)
            shutil.copytree(whole, target)
            if edit:
                (target / name).write_bytes((target / name).read_bytes() + edit)
            else:
                (target / name).unlink()
            for options in ([], ["--src", world.src, *words(form, world)]):
                result = fails(4, "verify", target, *options, "--json")
                assert any(str(name) in entry["files"] for entry in result.json["differences"]), (name, options)
    shutil.rmtree(target)
    shutil.copytree(whole, target)
    shutil.copy(weights(target)[0], weights(target)[0].with_name("left-over.safetensors"))
    differs("verify", target, texts=["left-over.safetensors", "not of this conversion"])


@pytest.mark.parametrize("form", FINISHED)
def test_finishing_files_are_compared_with_the_files_without_a_manifest(form: str, world: World) -> None:
    many: list[Argument] = [] if form == "checkpoint2" else ["--max-shard-size", "300B"]
    target = make(form, world, *many)
    (target / "reshard-manifest.json").unlink()
    shutil.rmtree(target / ".reshard", ignore_errors=True)
    done("verify", target, "--src", world.src, *words(form, world))
    if form == "checkpoint2":
        (path,) = target.rglob("metadata.json")
        document = json.loads(path.read_text())
        del document["state_dict_metadata"]["v"]
        document["storage_data"] = {
            key: entry for key, entry in document["storage_data"].items() if not key.startswith("('v'")
        }
    else:
        path = target / {"unified": "param_name_map.json", "huggingface": "model.safetensors.index.json"}[form]
        document = json.loads(path.read_text())
        del document["weight_map"]["v"]
    path.write_text(json.dumps(document))
    differs("verify", target, "--src", world.src, *words(form, world), texts=["'v'"])


@pytest.mark.parametrize(
    ("form", "texts"),
    [("checkpoint2", ["'w'", "[1, 2]", "[2, 1]"]), ("dcp", ["'w'", "is not cut as by the target's strategy"])],
)
def test_layouts_other_than_the_target_strategy_gives_are_found(form: str, texts: list[str], world: World) -> None:
    target = make(form, world)
    other = write_strategy(
        world.root / "strategies" / "other",
        single({"w": layout([2], [0, -1]), "v": layout([2], [-1]), "m.w": layout([2], [0, -1])}),
    )
    options: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", other]
    differs("verify", target, "--src", world.src, *options, texts=texts)


def test_parts_of_a_form_are_not_verified_alone(world: World) -> None:
    world.save(FULL)
    options: list[Argument] = ["--src-strategy", world.old, "--to", "unified"]
    for part in (["--ranks", "0"], ["--shard", "1/2"]):
        fails(2, "convert", world.src, world.dst, *options, *part, "--verify", texts=["--verify", "verify DST --src"])
    done("convert", world.src, world.dst, *options)
    fails(2, "verify", world.dst, "--ranks", "0", "--src", world.src, "--src-strategy", world.old, texts=["--ranks"])


def test_missing_files_beside_hugging_face_weights_are_found(world: World) -> None:
    source = make("huggingface", world)
    (source / "config.json").write_text("{}")
    done("convert", source, world.dst, "--to", "huggingface", "--verify")
    (world.dst / "config.json").write_text("{ }")
    result = done("verify", world.dst, "--src", source)
    warns(result, "config.json")
    (world.dst / "config.json").unlink()
    differs("verify", world.dst, "--src", source, texts=["config.json", "missing"])


def test_a_checkpoint_has_one_fingerprint_in_all_forms(world: World) -> None:
    ranks = make("ranks", world)
    output = done("fingerprint", world.src, "--strategy", world.old).out
    assert done("fingerprint", ranks, "--strategy", world.new).out == output
    assert "global_step" in output and "m.w" in output
    for form in FORMS[1:]:
        target = make(form, world, *(["--max-shard-size", "300B"] if form in ("unified", "huggingface") else []))
        assert done("fingerprint", target).out == output, form
        fails(2, "fingerprint", target, "--strategy", world.new, texts=["needs no strategy"])
        for path in [path for path in weights(target) if "w" in read_checkpoint(path)][:1]:
            flip(path, "w")
            assert done("fingerprint", target).out != output


@needs_corpus2
def test_copies_in_files_of_checkpoint2_are_compared(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(CORPUS2 / "a01_dp2mp2" / "checkpoint", source)
    assert "copies do not differ" in done("verify", source, "--replicas").err
    fails(2, "verify", source, "--replicas", "--strategy", "x", texts=["needs no strategy"])
    path = weights(source)[-1]
    path.chmod(0o644)
    name = next(name for name, value in read_checkpoint(path).items() if value.array.size > 4)
    flip(path, name)
    differences = fails(4, "verify", source, "--replicas", "--json").json["differences"]
    assert [entry["parameter"] for entry in differences] == [name]
    assert str(path.relative_to(source)) in differences[0]["files"] and len(differences[0]["files"]) == 2


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mistake", "source", "form"), some_of(itertools.product([off_by_one, swapped_rows], FORMS, FORMS), 3)
)
def test_slices_taken_from_the_wrong_place_are_found(
    source: str, form: str, mistake: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(source, world)
    monkeypatch.setattr(plan_module, "StoredSlice", mistake)
    options: list[Argument] = ["--src-strategy", world.new] if source == "ranks" else []
    fails(
        4,
        "convert",
        target,
        world.dst,
        *options,
        *to(form, world),
        *in_safetensors(form),
        "--verify",
        texts=["differs from the source"],
    )
