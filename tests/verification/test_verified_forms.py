"""`verify` and `convert --verify` of every form of checkpoint, and what they find."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

from reshard.plan import plan as plan_module
from tests.corpus import CORPUS2
from tests.corpus2 import needs_corpus2
from tests.forms import FINISHED, FORMS, in_safetensors, to
from tests.mistakes import off_by_one, swapped_rows
from tests.running import Argument, done, fails, warns
from tests.sampling import some_of
from tests.small import World, tensors
from tests.trees import layout, read_checkpoint, single, write_checkpoint, write_strategy

FULL = tensors()


def words(form: str, world: World) -> list[Argument]:
    """The strategies that comparing a form with the rank directories it was made of takes."""
    return ["--src-strategy", world.old, *laid_out(form, world)]


def laid_out(form: str, world: World) -> list[Argument]:
    """The strategy of a converted checkpoint, where it has one."""
    return ["--dst-strategy", world.new] if form in ("ranks", "checkpoint2") else []


def make(form: str, world: World, *options: Argument) -> Path:
    """The small checkpoint as a form."""
    world.save(FULL)
    made = world.root / form
    made_so: list[Argument] = ["--src-strategy", world.old, *in_safetensors(form), *to(form, world)]
    done("convert", world.src, made, *made_so, *options)
    return made


def differs(*arguments: Argument, says: Sequence[str]) -> None:
    """Run one command, which must find a difference that it describes with every text of `says`."""
    told = fails(4, *arguments).out
    for text in says:
        assert text in told, told


def weights(directory: Path) -> list[Path]:
    """Files of tensors."""
    return sorted(directory.rglob("*.safetensors"))


@pytest.mark.parametrize(("first", "second"), some_of(itertools.product(FORMS, FORMS), 3))
def test_every_pair_of_forms_verifies(first: str, second: str, world: World) -> None:
    one, two = make(first, world, "--verify", "--checksum", "crc32"), world.root / "two"
    source: list[Argument] = ["--src-strategy", world.new] if first == "ranks" else []
    options = [*source, *to(second, world), *in_safetensors(second)]
    done("convert", one, two, *options, "--verify")
    done("verify", two, "--src", one, *source, *laid_out(second, world))
    done("verify", one, "--src", world.src, *words(first, world))
    done("verify", one)
    fails(2, "verify", two, says=["checksums"])


# Files that the tests themselves can change.
@pytest.mark.parametrize(
    ("source", "form"), some_of(itertools.product(FORMS, [form for form in FORMS if form != "dcp"]), 5)
)
def test_a_changed_element_is_found_whatever_the_forms(source: str, form: str, world: World) -> None:
    made, out = make(source, world), world.root / "out"
    options: list[Argument] = ["--src-strategy", world.new] if source == "ranks" else []
    done("convert", made, out, *options, *to(form, world), *in_safetensors(form))
    (path, name) = next((path, name) for path in weights(out) for name in read_checkpoint(path) if name == "w")
    flip(path, "w")
    result = fails(4, "verify", out, "--src", made, *options, *laid_out(form, world), "--json")
    found = result.json["differences"]
    assert [(entry["kind"], entry["parameter"]) for entry in found] == [("content", name)]
    if form == "ranks":
        assert found[0]["ranks"] and not found[0]["files"]
    else:
        assert found[0]["files"] == [str(path.relative_to(out))]


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Write a file anew with other contents."""
    held = read_checkpoint(path)
    metadata = header(path).get("__metadata__")
    edit(held)
    write_checkpoint(path, held, metadata=metadata)


def flip(path: Path, name: str) -> None:
    """Change a bit of a tensor, and nothing else."""
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + header(path)[name]["data_offsets"][0] + 4] ^= 4
    path.write_bytes(content)


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return found


@pytest.mark.parametrize("form", FINISHED)
def test_missing_added_and_other_kinds_of_entries_are_found(form: str, world: World) -> None:
    made = make(form, world)
    whole = world.root / "whole"
    shutil.copytree(made, whole)
    path = next(path for path in weights(made) if "global_step" in read_checkpoint(path))

    def differing(edit: Callable[[dict[str, Any]], Any]) -> set[tuple[str, str]]:
        shutil.rmtree(made)
        shutil.copytree(whole, made)
        change(path, edit)
        found = fails(4, "verify", made, "--src", world.src, *words(form, world), "--json").json["differences"]
        return {(entry["kind"], entry["parameter"]) for entry in found}

    other = tensors("other")["v"]
    assert ("missing", "global_step") in differing(lambda held: held.pop("global_step"))
    assert ("extra", "more.x") in differing(lambda held: held.update({"more.x": other}))
    step = read_checkpoint(path)["global_step"]
    assert ("type", "global_step") in differing(lambda held: held.update(global_step=step._replace(dtype="UInt32")))
    assert ("shape", "global_step") in differing(
        lambda held: held.update(global_step=step._replace(array=step.array.reshape((1, 1))))
    )
    assert ("content", "global_step") in differing(
        lambda held: held.update(global_step=step._replace(array=step.array + 1))
    )


@pytest.mark.parametrize("form", FINISHED)
def test_finishing_files_that_contradict_the_directory_are_found(form: str, world: World) -> None:
    many: list[Argument] = [] if form == "checkpoint2" else ["--max-shard-size", "300"]
    made = make(form, world, "--checksum", "crc32", *many)
    done("verify", made)
    manifest = json.loads((made / "reshard-manifest.json").read_text())
    assert len(manifest["finishing"]) == (3 if form == "checkpoint2" else 1)
    whole = world.root / "whole"
    shutil.copytree(made, whole)
    for name in [*(entry["file"] for entry in manifest["finishing"]), weights(made)[0].relative_to(made)]:
        for edit in (b"", b" "):
            shutil.rmtree(made)
            shutil.copytree(whole, made)
            if edit:
                (made / name).write_bytes((made / name).read_bytes() + edit)
            else:
                (made / name).unlink()
            for options in ([], ["--src", world.src, *words(form, world)]):
                result = fails(4, "verify", made, *options, "--json")
                assert any(str(name) in entry["files"] for entry in result.json["differences"]), (name, options)
    shutil.rmtree(made)
    shutil.copytree(whole, made)
    shutil.copy(weights(made)[0], weights(made)[0].with_name("left-over.safetensors"))
    differs("verify", made, says=["left-over.safetensors", "not of this conversion"])


@pytest.mark.parametrize("form", FINISHED)
def test_finishing_files_are_compared_with_the_files_without_a_manifest(form: str, world: World) -> None:
    many: list[Argument] = [] if form == "checkpoint2" else ["--max-shard-size", "300"]
    made = make(form, world, *many)
    (made / "reshard-manifest.json").unlink()
    shutil.rmtree(made / ".reshard", ignore_errors=True)
    done("verify", made, "--src", world.src, *words(form, world))
    if form == "checkpoint2":
        (path,) = made.rglob("metadata.json")
        said = json.loads(path.read_text())
        del said["state_dict_metadata"]["v"]
        said["storage_data"] = {key: entry for key, entry in said["storage_data"].items() if not key.startswith("('v'")}
    else:
        path = made / {"unified": "param_name_map.json", "huggingface": "model.safetensors.index.json"}[form]
        said = json.loads(path.read_text())
        del said["weight_map"]["v"]
    path.write_text(json.dumps(said))
    differs("verify", made, "--src", world.src, *words(form, world), says=["'v'"])


def test_layouts_other_than_the_target_strategy_gives_are_found(world: World) -> None:
    made = make("checkpoint2", world)
    other = write_strategy(
        world.root / "strategies" / "other",
        single({"w": layout([2], [0, -1]), "v": layout([2], [-1]), "m.w": layout([2], [0, -1])}),
    )
    options: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", other]
    differs("verify", made, "--src", world.src, *options, says=["'w'", "[1, 2]", "[2, 1]"])


def test_parts_of_a_form_are_not_verified_alone(world: World) -> None:
    world.save(FULL)
    options: list[Argument] = ["--src-strategy", world.old, "--to", "unified"]
    for part in (["--ranks", "0"], ["--shard", "1/2"]):
        fails(2, "convert", world.src, world.dst, *options, *part, "--verify", says=["--verify", "verify DST --src"])
    done("convert", world.src, world.dst, *options)
    fails(2, "verify", world.dst, "--ranks", "0", "--src", world.src, "--src-strategy", world.old, says=["--ranks"])


def test_missing_files_beside_hugging_face_weights_are_found(world: World) -> None:
    source = make("huggingface", world)
    (source / "config.json").write_text("{}")
    done("convert", source, world.dst, "--to", "huggingface", "--verify")
    (world.dst / "config.json").write_text("{ }")
    result = done("verify", world.dst, "--src", source)
    warns(result, "config.json")
    (world.dst / "config.json").unlink()
    differs("verify", world.dst, "--src", source, says=["config.json", "missing"])


def test_a_checkpoint_has_one_fingerprint_in_all_forms(world: World) -> None:
    ranks = make("ranks", world)
    told = done("fingerprint", world.src, "--strategy", world.old).out
    assert done("fingerprint", ranks, "--strategy", world.new).out == told
    assert "global_step" in told and "m.w" in told
    for form in FORMS[1:]:
        made = make(form, world, *(["--max-shard-size", "300"] if form in ("unified", "huggingface") else []))
        assert done("fingerprint", made).out == told, form
        files = len(list(made.rglob("*.distcp"))) or len(weights(made))
        parts = []
        for number in range(files):
            parts.append(world.root / f"{form}{number}.json")
            parts[-1].write_text(done("fingerprint", made, "--ranks", number, "--json").out)
        assert files > 1
        merged = done("fingerprint", *[word for part in parts for word in ("--merge", part)])
        assert merged.out == told, form
        fails(2, "fingerprint", made, "--strategy", world.new, says=["needs no strategy"])
        fails(2, "fingerprint", made, "--ranks", files, says=[f"file {files}", "out of range"])
        for path in [path for path in weights(made) if "w" in read_checkpoint(path)][:1]:
            flip(path, "w")
            assert done("fingerprint", made).out != told


@needs_corpus2
def test_copies_in_files_of_checkpoint2_are_compared(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(CORPUS2 / "a01_dp2mp2" / "checkpoint", source)
    assert "copies do not differ" in done("verify", source, "--replicas").err
    fails(2, "verify", source, "--replicas", "--strategy", "none", says=["rank tree"])
    path = weights(source)[-1]
    path.chmod(0o644)
    name = next(name for name, value in read_checkpoint(path).items() if value.array.size > 4)
    flip(path, name)
    found = fails(4, "verify", source, "--replicas", "--json").json["differences"]
    assert [entry["parameter"] for entry in found] == [name]
    assert str(path.relative_to(source)) in found[0]["files"] and len(found[0]["files"]) == 2


@pytest.mark.parametrize(
    ("mistake", "source", "form"), some_of(itertools.product([off_by_one, swapped_rows], FORMS, FORMS), 3)
)
def test_slices_taken_from_the_wrong_place_are_found(
    source: str, form: str, mistake: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(source, world)
    monkeypatch.setattr(plan_module, "StoredSlice", mistake)
    options: list[Argument] = ["--src-strategy", world.new] if source == "ranks" else []
    fails(
        4,
        "convert",
        made,
        world.dst,
        *options,
        *to(form, world),
        *in_safetensors(form),
        "--verify",
        says=["differs from the source"],
    )
