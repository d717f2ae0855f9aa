"""Models of the built-in tables, from Hugging Face to ranks and back, against plain NumPy on whole arrays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.errors import NamesError, UsageError
from tests.asking import open_checkpoint
from tests.conftest import LONG
from tests.corpus import FIXTURES, ROOT
from tests.model_weights import MODELS, bfloat16, cut, mindformers, weights, write_huggingface
from tests.names.models import table_of
from tests.reference import Strategy
from tests.running import Argument, Result, done, fails, flat, warns
from tests.trees import (
    Value,
    cut_ranks,
    read_checkpoint,
    read_tree,
    read_weights,
    same_checkpoints,
    same_ranks,
    tree_bytes,
    write_checkpoint,
    write_strategy,
    write_tree,
)

FAMILIES = sorted(MODELS)
_ASKED = [
    ("llama", ()),
    ("qwen2", ()),
    ("qwen3", ()),
    ("qwen3", ("gate_up=halves", "qkv=contiguous")),
    ("qwen3_moe", ()),
    ("qwen3_moe", ("gate_up=halves", "qkv=contiguous")),
    ("deepseek_v3", ()),
    ("deepseek_v3", ("gate_up=halves",)),
]


class World:
    """A model as a Hugging Face directory, and its expected ranks: two replicas, tensors in 2, 2 stages."""

    def __init__(self, root: Path, family: str, options: Sequence[str] = ()) -> None:
        self.root = root
        self.config, _ = MODELS[family]
        self.names = table_of(family, options)
        self.weights = weights(family)
        self.hf = write_huggingface(root / "hf", self.weights, self.config)
        self.made = mindformers(family, self.weights, self.config, options)
        self.strategy = cut(self.made, self.config["num_hidden_layers"], data=2)
        self.d = write_strategy(root / "d", self.strategy, {name: each.array.shape for name, each in self.made.items()})
        self.convert: list[Argument] = [self.hf, root / "ranks", "--names", self.names, "--dst-strategy", self.d]

    def back(self, source: Path, *words: Argument) -> Path:
        """Convert to Hugging Face's names; the size of the config.json is that of the model, not of ranks."""
        self.result_of_way_back(source, *words)
        return source.with_name(source.name + "-back")

    def result_of_way_back(self, source: Path, *words: Argument) -> Result:
        """Likewise; returns the result of the last command."""
        target = source.with_name(source.name + "-back")
        return done("convert", source, target, "--to", "huggingface", "--names", self.names, "--config",
                    self.hf / "config.json", "--max-shard-size", "4KB", *words)  # fmt: skip


@pytest.mark.parametrize(("family", "options"), _ASKED)
def test_ranks_equal_numpys_slices_and_convert_back_to_the_model(
    tmp_path: Path, family: str, options: Sequence[str]
) -> None:
    world = World(tmp_path, family, options)

    done("convert", *world.convert)
    same_ranks(read_tree(tmp_path / "ranks"), cut_ranks(world.strategy, world.made))

    back = world.back(tmp_path / "ranks", "--src-strategy", world.d)
    same_checkpoints(read_weights(back), world.weights)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_unchanged_by_checkpoint2_and_unified_weights(tmp_path: Path, family: str) -> None:
    world = World(tmp_path, family)
    done("convert", world.hf, tmp_path / "two", "--to", "checkpoint2", *world.convert[2:])
    same_checkpoints(read_weights(world.back(tmp_path / "two")), world.weights)

    done("convert", world.hf, tmp_path / "unified", "--to", "unified", "--names", world.names)
    whole = {
        name: each for path in (tmp_path / "unified").glob("part*") for name, each in read_checkpoint(path).items()
    }
    same_checkpoints(whole, world.made)
    same_checkpoints(read_weights(world.back(tmp_path / "unified")), world.weights)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_casts_apply_in_both_directions(tmp_path: Path, family: str) -> None:
    """Ranks of Float32 whose norms stay as they are; and BFloat16 for inference from ranks of Float32."""
    world = World(tmp_path, family)
    done("convert", *world.convert, "--cast", "BFloat16", "--cast", "*norm*=Float32", "--verify")
    short = {name: world.made[name] if "norm" in name else each for name, each in bfloat16(world.made).items()}
    same_ranks(read_tree(tmp_path / "ranks"), cut_ranks(world.strategy, short))

    done("convert", world.hf, tmp_path / "long", *world.convert[2:])
    back = world.back(tmp_path / "long", "--src-strategy", world.d, "--cast", "BFloat16", "--verify")
    same_checkpoints(read_weights(back), bfloat16(world.weights))


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_output_does_not_depend_on_the_division_of_work(tmp_path: Path, family: str) -> None:
    world = World(tmp_path, family)
    done("convert", *world.convert)
    whole = tree_bytes(tmp_path / "ranks")
    words = world.convert[2:]
    for share in (2, 0, 1):
        done("convert", world.hf, tmp_path / "shared", *words, "--shard", f"{share}/3")
    for ranks in ("5,0", "1-4", "6-7"):
        done("convert", world.hf, tmp_path / "some", *words, "--ranks", ranks)
    done("convert", world.hf, tmp_path / "pages", *words, "--max-memory", "64K", "--jobs", 1, "--io", "mmap")
    for other in ("shared", "some", "pages"):
        assert tree_bytes(tmp_path / other) == whole
    for rank in (0, 3, 7):
        done("by-rank", rank, world.hf, tmp_path / "one", *words)
    assert tree_bytes(tmp_path / "one").items() <= whole.items()
    assert len(tree_bytes(tmp_path / "one")) == 3


@pytest.mark.deep
@pytest.mark.parametrize("way", ["to ranks", "to Hugging Face"])
def test_a_conversion_killed_at_any_moment_resumes_also_with_overwrite(tmp_path: Path, way: str) -> None:
    world = World(tmp_path, "qwen3_moe")
    done("convert", *world.convert)
    words: list[Argument] = world.convert[2:]
    source = world.hf
    if way == "to Hugging Face":
        source = tmp_path / "ranks"
        words = ["--src-strategy", world.d, "--names", world.names, "--config", world.hf / "config.json", "--to",
                 "huggingface", "--max-shard-size", "4KB"]  # fmt: skip
    done("convert", source, tmp_path / "before", *words, "--cast", "Float16")
    words += ["--cast", "BFloat16", "--overwrite"]
    done("convert", source, tmp_path / "after", *words)
    arguments = [
        sys.executable,
        "-m",
        "tests.stops",
        tmp_path,
        1,
        11 if LONG else 150,
        "convert",
        source,
        tmp_path / "dst",
        *words,
    ]
    process = subprocess.run(list(map(str, arguments)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 2


def test_only_configuration_values_in_use_belong_to_the_identity(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3")
    words = [*world.convert, "--config", world.hf / "config.json"]
    done("convert", *words, "--shard", "0/2")

    # The default is stated now, and a setting that no rule uses.
    edited = {**world.config, "use_cache": False, "torch_dtype": "float32", "head_dim": 3}
    (world.hf / "config.json").write_text(json.dumps(edited, indent=1))
    assert done("convert", *words, "--shard", "0/2", "--json").json["ranks"] == []
    done("resume", tmp_path / "ranks")
    same_ranks(read_tree(tmp_path / "ranks"), cut_ranks(world.strategy, world.made))
    (world.hf / "config.json").write_text(json.dumps({**edited, "use_cache": True}))
    done("verify", tmp_path / "ranks", "--src", world.hf, "--dst-strategy", world.d)

    (world.hf / "config.json").write_text(json.dumps({**edited, "tie_word_embeddings": True}))
    fails(3, "convert", *words, texts=["another conversion"])


def test_stating_a_default_size_is_the_same_conversion(tmp_path: Path) -> None:
    hf = FIXTURES / "models" / "qwen3"
    words: list[Argument] = ["convert", hf, tmp_path / "out", "--to", "unified"]
    stated = table_of("qwen3")
    done(*words, "--names", f"{stated},output=own")
    for same in (stated, f"{stated},vocab_multiple=1"):
        assert done(*words, "--names", same, "--json").json["ranks"] == []
    done("verify", tmp_path / "out", "--src", hf)
    fails(3, *words, "--names", table_of("qwen3", ["gate_up=halves"]), texts=["another conversion"])

    back: list[Argument] = ["convert", tmp_path / "out", tmp_path / "back", "--to", "huggingface", "--names", stated]
    back += ["--config", hf / "config.json"]
    done(*back)
    assert done(*back, "--reverse", "--json").json["ranks"] == []
    done("verify", tmp_path / "back", "--src", tmp_path / "out")


def test_values_are_copied_with_renamed_tensors(tmp_path: Path) -> None:
    hf, src = FIXTURES / "models" / "qwen3", tmp_path / "src"
    table: list[Argument] = ["--names", "qwen3,gate_up=halves,qkv=grouped"]
    done("convert", hf, src, "--to", "unified", "--cast", "Float32", *table)
    paths = {name: array for path in src.glob("*.safetensors") for name, array in load_file(path).items()}
    state = {f"adam_m.{name}": array for name, array in paths.items()}
    (tmp_path / "ck").mkdir()
    values = {"global_step": np.array([7], "i4"), "learning_rate": np.array(0.5, "f4")}
    save_file({**paths, **state, **values}, tmp_path / "ck" / "net.safetensors")
    out: list[Argument] = ["convert", tmp_path / "ck" / "net.safetensors", tmp_path / "out", "--src-strategy", "none"]
    out += ["--to", "huggingface", "--config", hf / "config.json", *table]
    warns(done(*out, "--verify"), f"{len(state)} left out", "--optimizer keep", "no differences")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["global_step"] == 7 and tensors["learning_rate"] == np.float32(0.5)
    assert not any(name.startswith("adam_m.") for name in tensors)


def test_the_given_configuration_is_copied_beside_the_weights(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3")
    config = world.hf / "config.json"
    done("convert", *world.convert)
    back = world.back(tmp_path / "ranks", "--src-strategy", world.d, "--verify")
    assert (back / "config.json").read_bytes() == config.read_bytes()

    # Somebody's own stays, as that of a Hugging Face source does.
    (back / "config.json").write_text("{}")
    (back / "model.safetensors.index.json").unlink()
    warns(world.result_of_way_back(tmp_path / "ranks", "--src-strategy", world.d), "config.json: existing file kept")
    assert (back / "config.json").read_text() == "{}"


@pytest.mark.deep
@pytest.mark.parametrize("form", ["huggingface", "hf-sharded"])
def test_the_tokenizer_comes_along_from_the_directory_of_the_configuration(tmp_path: Path, form: str) -> None:
    world = World(tmp_path, "llama")
    (world.hf / "generation_config.json").write_text('{"top_k": 3}')
    texts = {
        name: (world.hf / name).read_text() for name in ("config.json", "generation_config.json", "tokenizer.json")
    }
    done("convert", world.hf, tmp_path / "ranks", "--names", "llama", "--dst-strategy", "none")
    done("convert", world.hf, tmp_path / "same", "--dst-strategy", "none")
    words: list[Argument] = ["--to", form, "--verify"]
    words += ["--shards", 2] if form == "hf-sharded" else []
    for source, names in (("ranks", ["--names", "llama"]), ("same", [])):
        for place, copied in ((world.hf, {*texts}), (world.hf / "config.json", {"config.json"})):
            out = tmp_path / f"{source}-{len(copied)}"
            done("convert", tmp_path / source, out, "--src-strategy", "none", *words, *names, "--config", place)
            present = {path.name: path.read_text() for path in out.iterdir() if path.name in texts}
            assert present == {name: texts[name] for name in copied}
            done("resume", out)
    fails(3, "convert", tmp_path / "same", tmp_path / "none", "--src-strategy", "none", *words, "--config", tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_configuration_records_the_dtype_of_cast_weights(tmp_path: Path, key: str) -> None:
    world = World(tmp_path, "qwen3")
    output = {key: "float32", **world.config, "rope_scaling": {"dtype": "float32", "factor": 1e-6}}
    output["text_config"] = {key: "float32"}
    config = world.hf / "config.json"
    config.write_text(json.dumps(output))
    done("convert", *world.convert)
    words: list[Argument] = ["--src-strategy", world.d, "--cast", "BFloat16"]
    result = world.result_of_way_back(tmp_path / "ranks", *words, "--shard", "1/2")
    warns(result, f"config.json: {key} changed from 'float32' to bfloat16")
    back = world.back(tmp_path / "ranks", *words)
    written = (back / "config.json").read_bytes()
    inner = {"text_config": {key: "bfloat16"}}
    assert json.loads(written) == {**output, key: "bfloat16", **inner} and [*json.loads(written)] == [*output]
    result = world.result_of_way_back(tmp_path / "ranks", *words)
    assert "is kept" not in result.err and (back / "config.json").read_bytes() == written

    # From one Hugging Face directory to another, where files beside the weights are compared.
    verified: list[Argument] = ["--to", "huggingface", "--cast", "Float16"]
    done("convert", world.hf, tmp_path / "half", *verified, "--verify")
    half = {**output, key: "float16", "text_config": {key: "float16"}}
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == half
    verify: list[Argument] = ["verify", tmp_path / "half", "--src", world.hf]
    assert "config.json" not in done(*verify).err
    (tmp_path / "half" / "config.json").write_text(json.dumps(output))
    warns(done(*verify), "differs from the file beside the source's weights: config.json")


def test_the_configuration_of_weights_of_several_dtypes_is_unchanged(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3")
    for config in (json.dumps({**world.config, "dtype": "float32"}), json.dumps(world.config), "no configuration"):
        (world.hf / "config.json").write_text(config)
        out = tmp_path / str(len(config))
        result = done("convert", world.hf, out, "--to", "huggingface", "--cast", "BFloat16", "--cast", "*norm*=Float32")
        assert (out / "config.json").read_text() == config
        assert ("have several types (bfloat16, float32)" in flat(result.err)) == ("dtype" in config)
        assert ("is copied unchanged" in flat(result.err)) == (config == "no configuration")


def test_a_round_trip_has_the_fingerprint_of_the_original(tmp_path: Path) -> None:
    world = World(tmp_path, "llama")
    done("convert", *world.convert)
    back = world.back(tmp_path / "ranks", "--src-strategy", world.d)
    assert done("fingerprint", back).out == done("fingerprint", world.hf).out
    fails(2, "verify", back, "--src", world.hf, texts=["names are Hugging Face's already", "reshard fingerprint"])


def bits(tensor: Value) -> Value:
    """The same with the last bit of every element turned."""
    return Value(tensor.dtype, tensor.array ^ 1)


def test_moments_follow_their_weights_on_request(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3")
    tensors = {f"{kind}{name}": each for kind in ("", "adam_m.", "adam_v.") for name, each in world.made.items()}
    strategy = cut_with_state(world.strategy)
    shapes = {name: each.array.shape for name, each in tensors.items()}
    old = write_strategy(tmp_path / "old", strategy, shapes)
    write_tree(tmp_path / "training", cut_ranks(strategy, tensors))
    words: list[Argument] = ["--src-strategy", old, "--optimizer", "keep"]
    back = world.back(tmp_path / "training", *words)
    expected = {f"{kind}{name}": each for kind in ("", "adam_m.", "adam_v.") for name, each in world.weights.items()}
    same_checkpoints(read_weights(back), expected)

    left_out = world.back(tmp_path / "training", "--src-strategy", old, "--overwrite")
    same_checkpoints(read_weights(left_out), world.weights)


def cut_with_state(strategy: Strategy) -> Strategy:
    """The same with moments, which are cut as their weights."""
    kinds = ("", "adam_m.", "adam_v.")
    return [
        {**stage, "layouts": {kind + name: each for kind in kinds for name, each in stage["layouts"].items()}}
        for stage in strategy
    ]


def test_every_command_refuses_packing_that_nothing_determines(tmp_path: Path) -> None:
    hf, out = FIXTURES / "models" / "qwen3", tmp_path / "out"
    done("convert", hf, out, "--to", "unified", "--names", table_of("qwen3"))
    shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns(".reshard"))
    commands: list[list[Argument]] = [
        ["plan", hf, tmp_path / "new", "--to", "unified"],
        ["convert", hf, tmp_path / "new", "--to", "unified"],
        ["convert", tmp_path / "copy", tmp_path / "new", "--to", "huggingface", "--config", hf],
        ["verify", out, "--src", hf],
        ["fingerprint", hf],
        ["stats", hf],
        ["get", hf, "embedding.word_embeddings.weight"],
        ["diff", tmp_path / "copy", hf, "--config", hf],
    ]
    for words in commands:
        fails(2, *words, "--names", "qwen3,qkv=grouped", texts=["gate_up=interleaved or gate_up=halves"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="gate_up"), open_checkpoint(str(hf), names="qwen3,qkv=grouped") as opened:
        len(opened)
    done("verify", out, "--src", hf)


@pytest.mark.deep
@pytest.mark.parametrize("form", ["huggingface", "dcp", "hf-sharded"])
def test_names_of_hugging_face_are_not_changed_for_its_own_loaders(tmp_path: Path, form: str) -> None:
    hf = FIXTURES / "models" / "qwen3"
    words: list[Argument] = ["convert", hf, tmp_path / "out", "--to", form]
    words += [] if form == "huggingface" else ["--shards", 2]
    for names in ("qwen3", table_of("qwen3")):
        fails(2, *words, "--names", names, texts=["Hugging Face's already", "leave out --names"])
    assert not (tmp_path / "out").exists()
    done(*words, "--verify")
    done("convert", hf, tmp_path / "hyper", "--to", "hyper-parallel", "--shards", 2, "--names", table_of("qwen3"))


@pytest.mark.deep
@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
@pytest.mark.parametrize("moments", [False, True])
def test_names_change_in_one_pass_between_trainers_forms(tmp_path: Path, form: str, moments: bool) -> None:
    """Also in the states of trainers, which have a word before the model's names."""
    world = World(tmp_path, "qwen3", ["gate_up=halves", "vocab_multiple=16"])
    state = {f"{word}.{name}": bits(each) for name, each in world.weights.items() for word in ("adam_m", "adam_v")}
    state["global_step"] = Value("Int32", np.array([7], "<i4"))
    write_checkpoint(tmp_path / "one" / "model.safetensors", {**world.weights, **(state if moments else {})})
    keep: list[Argument] = ["--names", world.names, "--config", world.hf, "--optimizer", "keep", "--verify"]
    done("convert", tmp_path / "one", tmp_path / "hyper", "--to", "hyper-parallel", "--shards", 2, *keep)

    done("convert", tmp_path / "hyper", tmp_path / "out", "--to", form, "--shards", 3, *keep)

    done("convert", tmp_path / "one", tmp_path / "direct", "--to", form, "--shards", 3)
    done("diff", tmp_path / "out", tmp_path / "direct", "--exit-code")
    done("verify", tmp_path / "out", "--src", tmp_path / "hyper")


@pytest.mark.parametrize("mtp", ["shared", "dropped"])
def test_a_record_decides_which_copies_a_model_gets_back(tmp_path: Path, mtp: str) -> None:
    """MindFormers' names do not show it."""
    world = World(tmp_path, "deepseek_v3")
    twins = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    shared = {name: each for name, each in world.weights.items() if name not in twins}
    hf = write_huggingface(tmp_path / "shared", shared, world.config)
    names = f"{world.names},mtp=dropped" if mtp == "dropped" else world.names
    done("convert", hf, tmp_path / "ranks", "--names", names, "--dst-strategy", "none")

    done("convert", tmp_path / "ranks", tmp_path / "back", "--src-strategy", "none", "--to", "huggingface", "--names",
         world.names, "--config", hf, "--verify")  # fmt: skip

    kept = {name: each for name, each in shared.items() if mtp == "shared" or "layers.4." not in name}
    same_checkpoints(read_weights(tmp_path / "back"), kept)


def test_the_model_of_the_documentation_equals_its_scripts_output(tmp_path: Path) -> None:
    target = FIXTURES / "models"
    subprocess.run([sys.executable, target / "make.py", tmp_path / "made"], check=True)
    assert tree_bytes(tmp_path / "made") == tree_bytes(target / "qwen3")


@pytest.mark.deep
@pytest.mark.parametrize("between", [False, True])
def test_the_way_back_with_other_packing_is_refused(tmp_path: Path, between: bool) -> None:
    world = World(tmp_path, "qwen3", ["gate_up=halves", "qkv=contiguous"])
    done("convert", *world.convert)
    src: list[Argument] = [tmp_path / "ranks", "--src-strategy", world.d]
    if between:
        done("convert", *src, tmp_path / "other", "--dst-strategy", "none")
        src = [tmp_path / "other", "--src-strategy", "none"]
    recorded = ["--names", "qwen3,gate_up=halves,qkv=contiguous", "--config", str(world.hf / "config.json")]
    typed: list[Argument] = ["--names", "qwen3,gate_up=interleaved", "--config", world.hf]
    for command in (["convert", *src, tmp_path / "back", "--to", "huggingface"], ["stats", *src]):
        texts = ["was converted with gate_up=halves by the rules qwen3", "and gate_up=interleaved would"]
        fails(3, *command, *typed, texts=[*texts, " ".join(recorded)])
    assert not (tmp_path / "back").exists()

    suggested = done("suggest", *src, "--json").json["suggestions"]
    assert next(each["command"] for each in suggested if each["aim"] == "huggingface")[-4:] == recorded

    options: Any = {"src_strategy": src[2], "names": "qwen3,gate_up=interleaved", "config": world.hf}
    opened = open_checkpoint(str(src[0]), **options)
    with opened, pytest.raises(NamesError) as caught:
        len(opened)
    assert " ".join(recorded) in str(caught.value) and "Edits.names" in str(caught.value)

    done("convert", *src, tmp_path / "back", "--to", "huggingface", *recorded)
    same_checkpoints(read_weights(tmp_path / "back"), world.weights)
    # Weights with Hugging Face's names have no packing: other code may pack them in another way.
    done(
        "convert",
        tmp_path / "back",
        tmp_path / "anew",
        "--names",
        table_of("qwen3"),
        "--dst-strategy",
        world.d,
    )


def test_the_way_back_with_other_sizes_is_refused(tmp_path: Path) -> None:
    """No shape contradicts fewer groups of wider heads."""
    rng = np.random.default_rng(0)
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4)}
    (tmp_path / "hf").mkdir()
    save_file({name: rng.random(shape) for name, shape in shapes.items()}, tmp_path / "hf" / "model.safetensors")
    for name, heads, width in (("config", 4, 2), ("other", 2, 4)):
        sizes = {"heads": heads, "groups": heads // 2, "head_dim": width}
        (tmp_path / f"{name}.json").write_text(json.dumps(sizes))
    (tmp_path / "table.toml").write_text(
        'title = "t"\nsides = ["huggingface", "mine"]\n[sizes]\nheads = "heads"\ngroups = "groups"\n'
        'head_dim = "head_dim"\n[[rule]]\nfrom = ["q", "k", "v"]\nto = "qkv"\ndo = "group_qkv"\n'
    )
    table = ["--names", str(tmp_path / "table.toml"), "--config"]
    done("convert", tmp_path / "hf", tmp_path / "out", "--dst-strategy", "none", *table, tmp_path / "config.json")
    back: list[Argument] = ["convert", tmp_path / "out", tmp_path / "back", "--src-strategy", "none", "--to"]
    back += ["huggingface", *table]
    texts: list[Argument] = [
        "was converted with heads=4, groups=2, head_dim=2",
        "and heads=2, groups=1",
        tmp_path / "config.json",
    ]
    fails(3, *back, tmp_path / "other.json", texts=texts)
    done(*back, tmp_path / "config.json")
    same_checkpoints(read_weights(tmp_path / "back"), read_weights(tmp_path / "hf"))


def test_records_of_another_directory_are_not_the_packing_of_a_source(tmp_path: Path) -> None:
    """Below a conversion's directory, and not written by it."""
    world = World(tmp_path, "qwen3", ["gate_up=halves"])
    done("convert", *world.convert)
    other = World(tmp_path / "ranks" / "other", "qwen3", ["gate_up=interleaved"])
    done("convert", *other.convert[:1], other.root / "made", *other.convert[2:])
    (other.root / "made" / ".reshard").rename(tmp_path / "aside")
    words: list[Argument] = ["--src-strategy", other.d, "--names", other.names, "--config", other.hf]
    done("convert", other.root / "made", tmp_path / "back", "--to", "huggingface", *words)
    same_checkpoints(read_weights(tmp_path / "back"), other.weights)


def test_records_of_replaced_files_are_not_the_packing_of_a_source(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3", ["gate_up=halves"])
    unified = ["--to", "unified", "--names"]
    done("convert", world.hf, tmp_path / "one", *unified, world.names)
    done("convert", world.hf, tmp_path / "other", *unified, table_of("qwen3", ["gate_up=interleaved"]))
    shutil.copy(tmp_path / "other" / "part0.safetensors", tmp_path / "one")
    back: list[Argument] = ["--to", "huggingface", "--names", "qwen3,qkv=grouped", "--config", world.hf]
    # Other weights of the same names and shapes may be a copy.
    noted = flat(done("convert", tmp_path / "one", tmp_path / "back", *back).err)
    assert "the records decide the packing, gate_up=halves" in noted and "remove .reshard" in noted
    texts = ["was converted with gate_up=halves", "if the files were replaced since, remove .reshard"]
    back[3] = "qwen3,qkv=grouped,gate_up=interleaved"
    fails(3, "convert", tmp_path / "one", tmp_path / "stated", *back, texts=texts)
    back[3] = "qwen3,qkv=grouped"
    # Of the same size with another type of a weight, and of another size.
    path = tmp_path / "one" / "part0.safetensors"
    done("convert", world.hf, tmp_path / "cast", *unified, world.names, "--cast", "fp16")
    content, cast = path.read_bytes(), (tmp_path / "cast" / path.name).read_bytes()
    assert len(cast) < len(content) and b'"F32"' in content
    for other in (content.replace(b'"F32"', b'"I32"', 1), cast):
        path.write_bytes(other)
        fails(2, "convert", tmp_path / "one", tmp_path / "not", *back, texts=["gate_up must be stated"])


def test_another_table_with_other_packing_is_a_warning(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3", ["gate_up=halves"])
    done("convert", *world.convert)
    table = tmp_path / "own.toml"
    table.write_text((ROOT / "reshard" / "names" / "builtin" / "qwen3.toml").read_text())
    words: list[Argument] = ["stats", tmp_path / "ranks", "--src-strategy", world.d, "--config", world.hf]
    warns(
        done(*words, "--names", f"{table},gate_up=interleaved,qkv=grouped"),
        "was converted with gate_up=halves by the rules qwen3",
    )
    assert "was converted" not in done(*words, "--names", f"{table},gate_up=halves,qkv=grouped").err


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_mindformers_in_a_hugging_face_directory_give_a_warning(family: str, tmp_path: Path) -> None:
    world, note = World(tmp_path, family), "warning: names and packing stay those of Megatron or MindFormers"
    ranks: list[Argument] = ["--src-strategy", world.d]
    done("convert", *world.convert)
    words: list[Argument] = ["convert", tmp_path / "ranks", tmp_path / "same", "--to", "huggingface", *ranks]
    warns(done(*words), note, "--names TABLE")
    words[2] = tmp_path / "model"
    assert note not in done(*words, "--names", world.names, "--config", world.hf / "config.json").err
    assert note not in done("convert", world.hf, tmp_path / "hf-again", "--to", "huggingface").err
