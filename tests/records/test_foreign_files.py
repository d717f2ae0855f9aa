"""Foreign checkpoints beside a complete conversion are listed by status."""

from __future__ import annotations

from tests.running import Argument, done, fails
from tests.small import World, tensors

FULL = tensors()


def test_a_rank_over_the_target_device_count_is_named(world: World) -> None:
    world.save(FULL)
    world.convert()
    assert done("status", world.dst, "--json").json["beside"] == []
    stray = world.dst / "rank_7" / "checkpoint_7.ckpt"
    stray.parent.mkdir()
    stray.write_bytes(b"of another job")
    assert done("status", world.dst, "--json").json["beside"] == ["rank_7/checkpoint_7.ckpt"]
    output = done("status", world.dst).out
    assert "complete" in output and "files of other origin: rank_7/checkpoint_7.ckpt; remove it" in " ".join(
        output.split()
    )
    # A conversion would refuse it.
    fails(3, *world.words(), texts=["rank_7/checkpoint_7.ckpt"])


def test_foreign_weights_in_a_form_are_named(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, "--to", "unified"]
    done(*words)
    (world.dst / "part7.safetensors").write_bytes(b"of another conversion")
    assert done("status", world.dst, "--json").json["beside"] == ["part7.safetensors"]
    fails(3, *words, texts=["part7.safetensors"])


def test_a_directory_without_its_finishing_files_is_not_complete(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, "--to", "unified"]
    done(*words)
    (world.dst / "param_name_map.json").unlink()
    report = done("status", world.dst, "--json").json
    assert not report["complete"] and not report["missing"] and report["manifest"] is None
    assert "missing; run: reshard resume" in done("status", world.dst).out
    done(*words)
    assert done("status", world.dst, "--json").json["complete"]
    assert (world.dst / "param_name_map.json").exists()


def test_a_source_in_the_place_of_the_target_is_named_and_not_to_be_removed(world: World) -> None:
    world.save(FULL)
    world.convert()
    swapped: list[Argument] = ["convert", world.dst, world.src, "--src-strategy", world.new]
    for form in (["--dst-strategy", world.old], ["--to", "huggingface"]):
        fails(3, *swapped, *form, texts=[world.src, "SRC and DST swapped"])
    error = fails(3, *swapped, "--dst-strategy", world.old, texts=["may be the source"]).err
    assert error.index("may be the source") < error.index("remove")
