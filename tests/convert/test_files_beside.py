"""Files beside the weights of a Hugging Face directory: copied byte for byte, of any size, or refused at once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.counting import reads_of_local_files
from tests.running import Argument, done, fails, flat, warns
from tests.small import World, tensors
from tests.trees import value, write_checkpoint

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


def test_runs_with_another_configuration_or_tokenizer_are_another_conversion(world: World, model: Path) -> None:
    """Else the weights of all of them would lie beside the files of one."""
    done(*words(world, model))
    other = world.root / "other"
    write_files(other, "tokenizer.json")
    (other / "config.json").write_text('{"model_type": "y"}')
    fails(3, *words(world, model, "--config", other), texts=["another conversion", "--config (none there"])
    assert (world.dst / "config.json").read_text() == '{"model_type": "x"}'
    done(*words(world, model, "--config", other, "--overwrite"))
    assert (world.dst / "config.json").read_text() == '{"model_type": "y"}'
    fails(3, *words(world, model), texts=["another conversion", "--config"])
    assert "existing file kept" not in done(*words(world, model, "--config", other)).err
    (other / "tokenizer.json").write_text("another")
    fails(3, *words(world, model, "--config", other), texts=["another conversion", "config.json and the files beside"])


def test_shares_with_other_configurations_are_refused(world: World) -> None:
    world.save(tensors())
    write_files(world.root, "a/tokenizer.json", "b/tokenizer.json")
    for name in ("a", "b"):
        (world.root / name / "config.json").write_text("{}")
    to: list[Argument] = ["--src-strategy", world.old, "--max-shard-size", "1B"]
    done(*words(world, world.src, *to, "--config", world.root / "a", "--shard", "0/2"))
    b = words(world, world.src, *to, "--config", world.root / "b", "--shard", "1/2")
    fails(3, *b, texts=["another conversion", "--config"])
    fails(3, *words(world, world.src, *to, "--shard", "1/2"), texts=["another conversion", "--config"])
    done("resume", world.dst)
    assert done("status", world.dst, "--json").json["complete"] and (world.dst / "config.json").exists()


def test_files_of_a_replaced_model_that_the_source_lacks_are_named(world: World, model: Path) -> None:
    done(*words(world, model))
    (model / "empty.txt").unlink()
    again = done(*words(world, model, "--overwrite"))
    warns(again, "files of the replaced model remain", "empty.txt")
    assert (world.dst / "empty.txt").exists()
    # The new manifest lists the files of this source.
    assert "replaced model" not in done(*words(world, model, "--overwrite")).err


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


def write_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.mark.parametrize("given", [True, False])
def test_directories_that_modules_json_names_are_copied_whole(given: bool, world: World, model: Path) -> None:
    """The format of sentence-transformers, in the source or in the directory of --config."""
    named = ["1_Pooling/config.json", "2_Dense/model.safetensors", "3_Router/query/vocabulary.txt"]
    write_files(model, *named, "onnx/model.txt")
    modules = [{"path": name.split("/")[0]} for name in ("", *named)]
    (model / "modules.json").write_text(json.dumps(modules))
    source, options = model, list[Argument]()
    if given:
        source, options = world.root / "dcp", ["--config", model]
        done("convert", model, source, "--to", "dcp", "--shards", 2)
    command = words(world, source, *options, "--verify")
    done(*command)
    for name in named:
        assert (world.dst / name).read_text() == name
    assert not (world.dst / "onnx").exists()
    (world.dst / named[0]).unlink()
    assert named[0] in fails(4, "verify", world.dst).out
    done(*command)
    assert (world.dst / named[0]).read_text() == named[0]


@pytest.mark.parametrize("path", ["../beside", "1_Pooling/../../beside", "/etc"])
def test_modules_outside_of_their_directory_are_refused(path: str, world: World, model: Path) -> None:
    write_files(model.parent, "beside/config.json")
    (model / "modules.json").write_text(json.dumps([{"path": path}]))
    fails(3, *words(world, model), texts=["modules.json", path])
    assert not world.dst.exists()


def test_links_to_directories_of_modules_are_not_followed(world: World, model: Path) -> None:
    write_files(model.parent, "beside/config.json")
    write_files(model, "1_Pooling/config.json")
    for link in (model / "2_Dense", model / "1_Pooling" / "more"):
        link.symlink_to(model.parent / "beside")
    (model / "modules.json").write_text(json.dumps([{"path": "1_Pooling"}, {"path": "2_Dense"}]))
    done(*words(world, model))
    assert [path.name for path in (world.dst / "1_Pooling").iterdir()] == ["config.json"]
    assert not (world.dst / "2_Dense").exists()


def test_state_of_trainers_beside_weights_is_mentioned(world: World, model: Path) -> None:
    state = ["optimizer.bin", "optimizer.pt", "random_states_0.pkl", "rng_state_0.pth"]
    write_files(model, *state, "pytorch_model.bin")
    warns(done(*words(world, model)), f"optimizer and other state of the training is not read: {', '.join(state)}")


def trained(world: World, *names: str, **config: object) -> list[Argument]:
    """The conversion of a state of PyTorch to Hugging Face's form, with the configuration of a model."""
    write_checkpoint(world.root / "model.safetensors", {name: value(name, (4, 2)) for name in names})
    config_path = world.root / "config.json"
    config_path.write_text(json.dumps(config))
    done("convert", world.root / "model.safetensors", world.root / "dcp", "--to", "dcp", "--shards", 2)
    return words(world, world.root / "dcp", "--config", config_path)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("names", "config", "warned"),
    [
        (["tok_embeddings.weight", "layers.0.attention.wq.weight"], LLAMA, True),
        (["model.embed_tokens.weight", "layers.0.attention.wq.weight"], LLAMA, False),
        # A model without a head.
        (["layers.0.self_attn.q_proj.weight"], LLAMA, False),
        (["tok_embeddings.weight"], {"model_type": "no_family_with_a_table"}, False),
    ],
)
def test_names_that_the_family_of_the_configuration_lacks_give_a_warning(
    names: list[str], config: dict[str, object], warned: bool, world: World
) -> None:
    result = done(*trained(world, *names, **config))
    assert ("warning: names fit no weight of model_type llama" in result.err) == warned


@pytest.mark.parametrize(
    ("model_type", "note"),
    [
        ("qwen2_vl", "published by transformers"),
        ("exaone", "names stay"),
        ("some_model", "names stay"),
        ("llama", None),
    ],
)
def test_models_that_are_published_with_other_names_get_a_note(model_type: str, note: str | None, world: World) -> None:
    errors = flat(done(*trained(world, "model.language_model.norm.weight", model_type=model_type)).err)
    assert "names stay" not in errors if note is None else note in errors
    # A copy of what is published.
    copied = done("convert", world.dst, world.root / "copy", "--to", "huggingface").err
    assert "names stay" not in copied and "published" not in copied
