"""Files beside the weights of a Hugging Face directory: copied byte for byte, of any size, or refused at once."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.counting import reads_of_local_files
from tests.running import Argument, done, fails, warns
from tests.small import World, tensors

# More than any block, and no multiple of one.
LARGE = (16 << 20) + 7


@pytest.fixture
def model(world: World) -> Path:
    world.save(tensors())
    path = world.root / "model"
    done("convert", world.src, path, "--src-strategy", world.old, "--to", "huggingface")
    shutil.rmtree(path / ".reshard")
    (path / "config.json").write_text('{"model_type": "x"}')
    (path / "vocabulary.dat").write_bytes(os.urandom(1 << 20) * (LARGE >> 20) + b"the end")
    (path / "empty.txt").write_bytes(b"")
    return path


def words(world: World, model: Path, *more: Argument) -> list[Argument]:
    return ["convert", model, world.dst, "--to", "huggingface", *more]


def test_files_beside_weights_are_copied_and_compared_in_blocks(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reads_of_local_files(monkeypatch)
    done(*words(world, model, "--verify"))
    for name in ("config.json", "vocabulary.dat", "empty.txt"):
        assert (world.dst / name).read_bytes() == (model / name).read_bytes()
    assert max(reads) <= 4 << 20 and sum(reads) > LARGE
    # Somebody's own stays, and is compared in the same way.
    (world.dst / "reshard-manifest.json").unlink()
    done(*words(world, model))
    (world.dst / "vocabulary.dat").write_bytes(bytes(LARGE))
    (world.dst / "reshard-manifest.json").unlink()
    assert "existing file kept, although the source has another one" in done(*words(world, model)).err
    assert max(reads) <= 4 << 20


def test_a_complete_directory_with_another_configuration_gives_a_warning(world: World, model: Path) -> None:
    """Else a second run with the right --config would seem to have copied it."""
    done(*words(world, model))
    other = world.root / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "y"}')
    for _ in range(2):
        warns(done(*words(world, model, "--config", other)), "config.json", "--overwrite")
    assert (world.dst / "config.json").read_text() == '{"model_type": "x"}'
    done(*words(world, model, "--config", other, "--overwrite"))
    assert (world.dst / "config.json").read_text() == '{"model_type": "y"}'
    assert "existing file kept" not in done(*words(world, model, "--config", other)).err


def test_files_of_a_replaced_model_that_the_source_lacks_are_named(world: World, model: Path) -> None:
    done(*words(world, model))
    (model / "empty.txt").unlink()
    again = done(*words(world, model, "--overwrite"))
    warns(again, "files of the replaced model remain", "empty.txt")
    assert (world.dst / "empty.txt").exists()
    # The new manifest lists the files of this source.
    assert "replaced model" not in done(*words(world, model, "--overwrite")).err


def test_files_of_a_replaced_model_are_named_whatever_the_form(world: World, model: Path) -> None:
    done(*words(world, model))
    again = done(
        "convert", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new, "--overwrite"
    )
    warns(again, "files of the replaced model remain", "config.json", "empty.txt", "vocabulary.dat")
    assert (world.dst / "config.json").exists()


def test_an_unreadable_file_beside_weights_is_an_error_before_writing(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def forbidden(path: Any, *more: Any, **options: Any) -> int:
        if str(path) == str(model / "vocabulary.dat"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return plain(path, *more, **options)

    monkeypatch.setattr(os, "open", forbidden)
    fails(3, *words(world, model), texts=["vocabulary.dat", "may not be read"])
    assert not world.dst.exists()
