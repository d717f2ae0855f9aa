"""Names of trainers' states: wrappers around a model's names are removed and restored."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints.formats.pickles import pickled, read_pickle
from reshard.names import naming_of, plain_names, possible_plain_names, trainer_keys
from tests.forms.test_hf_sharded import CHUNKS, FULL, Chunk, converted, rows, write_shards
from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.trees import (
    Value,
    layout,
    read_checkpoint,
    same_checkpoints,
    scalar,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
)

MODEL = ["model.embed.weight", "model.layers.0.up.weight"]
TORCH, MEGATRON = naming_of("huggingface"), naming_of("megatron")
STATE = "optimizer.state.layers.0.up.weight.exp_avg"


def plain(names: list[str], objects: tuple[str, ...] = (), keys: Any = None, optimizer: bool = True) -> dict[str, Any]:
    return plain_names(names, objects, keys or {}, optimizer).names


def test_megatrons_masters_are_those_beside_a_moment() -> None:
    weight, state = "decoder.layers.mlp.linear_fc1.weight", "optimizer.state"
    masters = {"param": "main_param", "fp32_param": "main_param"}
    for master in masters:
        names = [weight, *(f"{state}.{each}.{weight}" for each in ("exp_avg", "exp_avg_sq", master))]
        expected = [weight, *(f"{each}.{weight}" for each in ("adam_m", "adam_v", "main_param"))]
        assert plain(names) == dict(zip(names, expected))
        back = dict(zip(expected, [*names[:3], f"{state}.param.{weight}"]))
        assert MEGATRON.add(expected) == back
        assert {MEGATRON.remove(new): old for old, new in back.items() if new} == {name: name for name in expected}
        for old, new in plain(names).items():
            assert new in possible_plain_names(old, True)
    # Without a moment beside it, a module of the model has this name.
    names = ["param.0", f"{state}.param.0.exp_avg", f"{state}.param.0.step"]
    assert plain(names) == dict(zip(names, ["param.0", "adam_m.param.0", None]))
    assert "adam_m.param.0" in possible_plain_names(names[1], True)


def test_a_trainers_prefix_is_removed_only_on_evidence() -> None:
    unchanged, bare = dict(zip(MODEL, MODEL)), dict(zip(MODEL, ["embed.weight", "layers.0.up.weight"]))
    # A model of Hugging Face with tied embeddings contains these names itself.
    for objects in ((), ("optimizer.param_groups.0.lr",)):
        undecided = plain_names(MODEL, objects, {}, True)
        assert (undecided.names, undecided.undecided) == (unchanged, ["model."])
    in_model = "optimizer.state.model.layers.0.up.weight.exp_avg"
    assert plain([*MODEL, in_model]) == {**unchanged, in_model: "adam_m.model.layers.0.up.weight"}
    # An optimizer of other parameters shows nothing.
    other = plain_names([*MODEL, "optimizer.state.up.weight.exp_avg"], (), {}, True)
    assert {name: other.names[name] for name in MODEL} == unchanged and other.undecided == ["model."]
    assert plain([*MODEL, STATE]) == {**bare, STATE: "adam_m.layers.0.up.weight"}
    assert plain(MODEL, keys={name: ("model", name[6:]) for name in MODEL}) == bare
    assert plain(MODEL, keys={name: (name,) for name in MODEL}) == unchanged
    flat = [*MODEL, STATE, "optimizer.state.layers.0.up.weight.step"]
    assert plain(flat, keys={name: (name,) for name in flat})[MODEL[1]] == bare[MODEL[1]]
    assert plain([*MODEL, "head.weight"], objects=("optimizer.x",)) == {**unchanged, "head.weight": "head.weight"}
    # State that MindSpore's optimizers have shows the names in the model; a second model does not.
    for state in ("exp_avg.embed.weight", "moments.layers.0.up.weight"):
        assert plain([*MODEL, state]) == {**bare, state: state}
    for name in ("exp_avg.model.embed.weight", "ema.embed.weight"):
        actual = plain_names([*MODEL, name], (), {}, True)
        assert (actual.names, actual.undecided) == ({**unchanged, name: name}, [])
    causal = ["model.model.embed.weight", "model.lm_head.weight"]
    assert plain_names(causal, (), {}, True).undecided == ["model."]
    state = "optimizer.state.model.embed.weight.exp_avg"
    names = ["model.embed.weight", "lm_head.weight", "adam_m.model.embed.weight"]
    assert plain([*causal, state]) == dict(zip([*causal, state], names))


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("optimizer.state.a.weight.exp_avg", "adam_m.a.weight"),
        ("optimizer.state.a.weight.exp_avg_sq", "adam_v.a.weight"),
        ("optimizer.state.exp_avg_sq.a.weight", "adam_v.a.weight"),
        ("optimizer.state.fp32_param.a.weight", "main_param.a.weight"),
        ("optimizer.optim.state.a.weight.exp_avg", "adam_m.a.weight"),
        ("chained_1.optimizer.state.exp_avg.a.weight", "adam_m.a.weight"),
        ("optim.state.a._orig_mod.weight.exp_avg", "adam_m.a.weight"),
        ("optimizer.state.a.weight.step", None),
        ("optimizer.state.0.exp_avg", None),
        ("optimizer.state.a.weight.momentum_buffer", None),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "a.weight"),
        ("_orig_mod.a.weight", "a.weight"),
        ("my_orig_mod.a.weight", "my_orig_mod.a.weight"),
    ],
)
def test_wrappers_of_frameworks_are_removed_from_names(name: str, new: Any) -> None:
    actual = plain([name])
    assert actual == {name: new}
    assert new is None or new in possible_plain_names(name, True)
    assert plain([name], optimizer=False) == {name: None if name.startswith(("opti", "chained_")) else new}


def test_modules_around_megatrons_fsdp_are_removed_from_names() -> None:
    """Only where optimizer state shows them: a model may have a module of that name."""
    weight, moment = "model.module.a.weight", "optimizer.state.module.module.module.a.weight.exp_avg"
    inner = "module.module.module.a.weight"
    keys = {weight: ("model", "module.a.weight"), moment: ("optimizer", "state", inner, "exp_avg")}
    for optimizer in (True, False):
        found = plain_names([weight, moment], (), keys, optimizer).names
        assert found == {weight: "a.weight", moment: "adam_m.a.weight" if optimizer else None}
    for name, new in ((weight, "a.weight"), (moment, "adam_m.a.weight")):
        assert new in possible_plain_names(name, True)
    assert plain([weight], keys={weight: keys[weight]}) == {weight: "module.a.weight"}


def test_names_of_a_trainer_are_restored() -> None:
    names = ["a.weight", "adam_m.a.weight", "adam_v.a.weight", "adam_m.other", "global_step", "model.b.weight"]
    actual = TORCH.add(names)
    assert actual["a.weight"] == "model.a.weight" and actual["model.b.weight"] == "model.model.b.weight"
    assert actual["adam_m.a.weight"] == "optimizer.state.a.weight.exp_avg"
    assert actual["adam_v.a.weight"] == "optimizer.state.a.weight.exp_avg_sq"
    assert (actual["adam_m.other"], actual["global_step"]) == ("adam_m.other", "global_step")
    assert trainer_keys("model.a.weight") == ("model", "a.weight")
    assert trainer_keys("optimizer.state.a.weight.exp_avg") == ("optimizer", "state", "a.weight", "exp_avg")
    assert trainer_keys("global_step") == ("global_step",)
    assert {TORCH.remove(new) for new in actual.values() if new} == set(names)
    created = [new or "" for new in actual.values()]
    again = plain_names(created, (), {name: trainer_keys(name) for name in created}, True).names
    assert (again["adam_m.other"], again["model.model.b.weight"]) == ("adam_m.other", "model.b.weight")
    assert again["model.a.weight"] == "a.weight"
    assert again["optimizer.state.a.weight.exp_avg_sq"] == "adam_v.a.weight"


def test_moments_of_a_trainer_reach_mindspore_and_no_model(tmp_path: Path) -> None:
    moments = {"exp_avg": value("m", (7, 6)), "exp_avg_sq": value("v", (7, 6))}
    state = {f"optimizer.state.a.weight.{name}": tensor for name, tensor in moments.items()}
    step = {"optimizer.state.a.weight.step": Value("Float32", np.array(3, "<u4"))}
    tensors = {**{f"model.{name}": tensor for name, tensor in FULL.items()}, **state, **step}
    chunks = [chunk._replace(name=f"model.{chunk.name}") for chunk in CHUNKS]
    chunks += [chunk for name, tensor in state.items() for chunk in rows(name, tensor, 4)]
    src = write_shards(tmp_path / "src", tensors, [*chunks, Chunk(next(iter(step)), (), 1)])
    output = done("convert", src, tmp_path / "hf", "--to", "huggingface", "--verify").err
    assert "3 tensors of the optimizer left out" in output and "the trainer's prefix 'model.' is removed" in output
    assert read_checkpoint(tmp_path / "hf" / "model.safetensors").keys() == FULL.keys()
    output = done("convert", src, tmp_path / "ms", "--to", "unified", "--verify").err
    assert "1 tensor of the optimizer left out: 'optimizer.state.a.weight.step'" in output
    assert "there is no global_step" in output
    contents = read_checkpoint(tmp_path / "ms" / "part0.safetensors")
    assert contents["adam_m.a.weight"].same(moments["exp_avg"]) and contents["adam_v.a.weight"].same(
        moments["exp_avg_sq"]
    )
    resumed = {**contents, "global_step": scalar(3)}
    write_checkpoint(tmp_path / "ms" / "part0.safetensors", resumed, metadata={"format": "ms"})
    done("convert", tmp_path / "ms", tmp_path / "back", "--to", "dcp", "--shards", 2, "--verify")
    done("convert", tmp_path / "back", tmp_path / "again", "--to", "unified", "--verify")
    again = read_checkpoint(tmp_path / "again" / "part0.safetensors")
    assert again.keys() == contents.keys() and all(again[name].same(each) for name, each in contents.items())
    unchanged = done("convert", src, tmp_path / "kept", "--to", "huggingface", "--rename", "*=*", "--verify").err
    assert "left out" not in unchanged
    assert read_checkpoint(tmp_path / "kept" / "model.safetensors").keys() == tensors.keys()


def test_a_prefix_that_may_be_the_models_own_is_refused_where_names_of_a_model_are_needed(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in FULL.items()}
    src = write_shards(tmp_path / "src", tensors, [chunk._replace(name=f"model.{chunk.name}") for chunk in CHUNKS])
    done("convert", src, tmp_path / "dcp", "--to", "dcp", "--shards", 2, "--verify")
    for place in (src, tmp_path / "dcp"):
        for to in ("huggingface", "unified"):
            words: list[Argument] = ["convert", place, tmp_path / "out", "--to", to]
            fails(3, *words, texts=["'model.'", "--rename 'model.*=*'", "--rename '*=*'"])
            assert not (tmp_path / "out").exists()
        for number, (rename, names) in enumerate({"model.*=*": FULL.keys(), "*=*": tensors.keys()}.items()):
            out = tmp_path / f"{place.name}-{number}"
            done("convert", place, out, "--to", "huggingface", "--rename", rename, "--verify")
            assert read_checkpoint(out / "model.safetensors").keys() == names


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel", "hf-sharded"])
def test_the_optimizer_shows_that_names_of_a_model_begin_with_model(form: str, tmp_path: Path) -> None:
    """A tied model of Hugging Face, whose optimizer's state was flattened."""
    full = {"model.embed.weight": value("e", (6, 4)), "model.norm.weight": value("n", (4,))}
    moments = {f"optimizer.state.{name}.exp_avg": value(name, tensor.array.shape) for name, tensor in full.items()}
    tensors = {**full, **moments}
    chunks = [Chunk(name, tuple((0, size) for size in tensor.array.shape), 1) for name, tensor in tensors.items()]
    src = write_shards(tmp_path / "src", tensors, chunks)
    if form != "hf-sharded":
        done("convert", src, tmp_path / "state", "--to", form, "--shards", 2, "--verify")
        src = tmp_path / "state"
    done("convert", src, tmp_path / "out", "--to", "unified", "--verify")
    written = read_checkpoint(tmp_path / "out" / "part0.safetensors")
    assert written.keys() == {*full, *(f"adam_m.{name}" for name in full)}


@pytest.mark.parametrize("between", ["none", "unified"])
def test_a_weight_of_one_element_with_moments_comes_back_to_a_trainer(between: str, tmp_path: Path) -> None:
    weights = {**FULL, "scale": value("s", (1,))}
    full = {**weights, **{f"adam_m.{name}": value(f"m{name}", tensor.array.shape) for name, tensor in weights.items()}}
    source = write_checkpoint(tmp_path / "full.safetensors", {**full, "loss_scale": value("l", (1,))})
    none: list[Argument] = ["--src-strategy", "none"]
    done("convert", source, tmp_path / "state", *none, "--to", "dcp", "--shards", 2, "--verify")
    words: list[Argument] = ["--to", "unified"] if between == "unified" else ["--dst-strategy", "none"]
    done("convert", tmp_path / "state", tmp_path / "ms", *words, "--verify")
    back: list[Argument] = [] if between == "unified" else none
    result = done("convert", tmp_path / "ms", tmp_path / "back", *back, "--to", "dcp", "--shards", 2, "--verify")
    names = [
        {each["name"] for each in done("inspect", tmp_path / place, "--json").json["tensors"]}
        for place in ("state", "back")
    ]
    assert names[0] == names[1] and {"model.scale", "optimizer.state.scale.exp_avg"} <= names[0]
    assert "single values keep" not in result.err


def test_two_tensors_with_one_target_name_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": value("a", (4,)), "_orig_mod.a.weight": value("b", (4,))}
    chunks = [Chunk(name, ((0, 4),), 1) for name in tensors]
    src = write_shards(tmp_path / "src", tensors, chunks)
    fails(3, "convert", src, tmp_path / "out", "--to", "huggingface", texts=["'a.weight'", "its own name"])


def test_names_are_unchanged_between_forms_of_torch(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    done("convert", src, tmp_path / "dcp", "--to", "dcp", "--shards", 2, "--verify")
    done("convert", tmp_path / "dcp", tmp_path / "shards", "--to", "hf-sharded", "--shards", 3, "--verify")
    assert converted(tmp_path / "shards", tmp_path / "out").keys() == FULL.keys()


@pytest.mark.deep
@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
@pytest.mark.parametrize("between", [[], ["dcp"], ["hyper-parallel"], ["hyper-parallel", "dcp"]], ids="-".join)
def test_weights_alone_lose_the_prefix_on_the_way_back(form: str, between: list[str], tmp_path: Path) -> None:
    """No optimizer state or second ``model.`` shows that it is a trainer's: the keys of the state are recorded."""
    write_checkpoint(tmp_path / "src" / "model.safetensors", FULL)
    path = tmp_path / "src"
    for target in (form, *between):
        done("convert", path, path.with_name(f"{path.name}-{target}"), "--to", target, "--shards", 2, "--verify")
        path = path.with_name(f"{path.name}-{target}")
    done("convert", path, tmp_path / "back", "--to", "huggingface", "--verify")
    held = read_checkpoint(tmp_path / "back" / "model.safetensors")
    assert held.keys() == FULL.keys() and all(held[name].same(each) for name, each in FULL.items())


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_renamed_tensors_of_a_state_remain_in_it(form: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src" / "model.safetensors", FULL)
    cut: list[Argument] = ["--to", form, "--shards", 2, "--verify"]
    name = next(iter(FULL))
    done("convert", tmp_path / "src", tmp_path / "state", *cut)
    done("convert", tmp_path / "state", tmp_path / "renamed", *cut, "--rename", f"model.{name}=model.new.weight")
    result = done("convert", tmp_path / "renamed", tmp_path / "back", "--to", "huggingface", "--verify")
    held = read_checkpoint(tmp_path / "back" / "model.safetensors")
    assert held.keys() == {"new.weight", *FULL} - {name}
    assert held["new.weight"].same(FULL[name]) and "left out" not in result.err


def test_weights_beside_the_model_are_left_out_with_a_warning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src" / "model.safetensors", FULL)
    cut: list[Argument] = ["--to", "dcp", "--shards", 2]
    name = next(iter(FULL))
    done("convert", tmp_path / "src", tmp_path / "state", *cut)
    done("convert", tmp_path / "state", tmp_path / "renamed", *cut, "--rename", f"model.{name}=other.weight")
    result = done("convert", tmp_path / "renamed", tmp_path / "back", "--to", "huggingface", "--quiet")
    assert "warning: 1 tensor beside the model left out" in result.err


def test_tensors_beside_the_model_of_a_nested_state_are_skipped() -> None:
    keys = {"model.a": ("model", "a"), "rng": ("rng",)}

    actual = plain_names(keys, (), keys, True)

    assert (actual.names, actual.outside) == ({"model.a": "a", "rng": None}, ["rng"])
    assert plain_names(["a", "rng"], (), {"a": ("a",), "rng": ("rng",)}, True).names == {"a": "a", "rng": "rng"}


def test_keys_around_the_model_are_removed_with_it() -> None:
    """As in torch's tutorial, whose state is that of one object with a model and an optimizer."""
    keys = {
        "app.model.a.weight": ("app", "model", "a.weight"),
        "app.optim.state.a.weight.exp_avg": ("app", "optim", "state", "a.weight", "exp_avg"),
        "app.optim.state.a.weight.step": ("app", "optim", "state", "a.weight", "step"),
        "app.rng": ("app", "rng"),
        "loader.rng": ("loader", "rng"),
    }

    actual = plain_names(keys, (), keys, True)

    assert [*actual.names.values()] == ["a.weight", "adam_m.a.weight", None, None, None]
    assert (actual.prefix, actual.left_out) == ("app.model.", ["app.optim.state.a.weight.step"])
    assert actual.outside == ["app.rng", "loader.rng"]
    assert "a.weight" in possible_plain_names("app.model.a.weight", False)
    assert possible_plain_names("app.optim.state.a.weight.exp_avg", True) == ["adam_m.a.weight"]


def test_keys_of_several_models_stay() -> None:
    for word in ("", ".model"):
        keys = {f"{name}{word}.a.weight": (*f"{name}{word}".split("."), "a.weight") for name in ("actor", "critic")}
        actual = plain_names(keys, (), keys, True)
        assert actual.names == dict(zip(keys, keys))
        assert (actual.prefix, actual.outside, actual.undecided) == ("", [], [f"actor{word}.", f"critic{word}."])


def test_a_key_of_another_name_is_undecided() -> None:
    keys = {"net.a.weight": ("net", "a.weight"), "step": ("step",)}
    actual = plain_names(keys, (), keys, True)
    assert (actual.undecided, actual.names) == (["net."], dict(zip(keys, keys)))


def test_several_models_are_refused_with_the_options_for_one(tmp_path: Path) -> None:
    """The names are those of a state with the keys ``actor`` and ``critic``, each of which has a model."""
    write_checkpoint(tmp_path / "src" / "model.safetensors", FULL)
    models = {f"{key}.model.{name}": (key, "model", name) for key in ("actor", "critic") for name in FULL}
    renames: list[Argument] = ["--rename", "*=actor.model.*"]
    done("convert", tmp_path / "src", tmp_path / "state", "--to", "dcp", "--shards", 2, *renames)
    place = tmp_path / "state" / ".metadata"
    metadata = read_pickle(place.read_bytes(), lambda name: True)
    keys = metadata.fields["planner_data"]
    keys.update((name, models[name]) for name in keys)
    place.write_bytes(pickled(metadata))
    alone = done("convert", tmp_path / "state", tmp_path / "alone", "--to", "huggingface", "--verify").err
    assert "the trainer's prefix 'actor.model.' is removed" in alone
    first = next(iter(keys))
    keys[first] = ("critic", *keys[first][1:])
    place.write_bytes(pickled(metadata))
    words: list[Argument] = ["convert", tmp_path / "state", tmp_path / "out", "--to", "huggingface", "--verify"]
    options = ["--rename", "actor.model.*=*", "--exclude", "critic.model.*"]
    fails(3, *words, texts=[shlex.join(options)])
    done(*words, *options)
    assert read_checkpoint(tmp_path / "out" / "model.safetensors").keys() == FULL.keys()


def test_a_model_at_the_root_of_a_state_is_separated_from_nested_tensors() -> None:
    """torchtitan puts the names of the model beside the keys of other objects."""
    keys = {
        "model.a.weight": ("model.a.weight",),
        "scale": ("scale",),
        "train_state.step": ("train_state", "step"),
        "optimizer.state.model.a.weight.exp_avg": ("optimizer", "state.model.a.weight.exp_avg"),
    }

    actual = plain_names(keys, (), keys, True)

    assert [*actual.names.values()] == ["model.a.weight", "scale", None, "adam_m.model.a.weight"]
    assert (actual.prefix, actual.outside, actual.undecided) == ("", ["train_state.step"], [])


def test_flattened_optimizer_state_at_the_root_is_recognised_by_its_groups() -> None:
    names = ["a.weight", "state.a.weight.exp_avg", "state.a.weight.step"]
    groups = ("param_groups.a.weight.lr",)
    assert [*plain(names, groups).values()] == ["a.weight", "adam_m.a.weight", None]
    assert [*plain(names, groups, optimizer=False).values()] == ["a.weight", None, None]
    assert "adam_m.a.weight" in possible_plain_names("state.a.weight.exp_avg", True)
    # A module may be called state.
    assert [*plain(names).values()] == names


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_strategy_lists_the_names_of_the_model(form: str, plain: World, tmp_path: Path) -> None:
    plain.save(tensors(names=["w", "v"]))
    strategies: list[Argument] = ["--src-strategy", plain.old, "--dst-strategy", plain.new]
    done("convert", plain.src, plain.dst, "--to", form, *strategies, "--verify")
    slices = {each["name"]: each["cuts"] for each in done("inspect", plain.dst, "--json").json["tensors"]}
    assert slices == {"model.w": [1, 2], "model.v": [1]}
    assert "wrote" not in done("resume", plain.dst).err
    done("verify", plain.dst, "--src", plain.src, *strategies)
    done("by-rank", 1, plain.src, tmp_path / "one", "--to", form, *strategies)
    done("resume", tmp_path / "one")
    # A strategy may list the names of the target as well.
    done("convert", plain.dst, tmp_path / "same", "--to", form, "--dst-strategy", "same", "--verify")


def test_optimizer_state_of_a_trainer_is_not_a_weight(tmp_path: Path) -> None:
    state = {STATE: value("m", (4, 2)), "model.layers.0.up.weight": value("w", (4, 2))}
    src = write_shards(tmp_path / "src", state, [Chunk(name, ((0, 4), (0, 2)), 1) for name in state])
    assert "weights 1 (32 B), optimizer state 1 (32 B)" in done("inspect", src).out
    done("convert", src, tmp_path / "out", "--to", "dcp", "--dst-strategy", "same", "--cast", "bf16", "--verify")
    types = {each["name"]: each["dtype"] for each in done("inspect", tmp_path / "out", "--json").json["tensors"]}
    assert types == {STATE: "Float32", "model.layers.0.up.weight": "BFloat16"}


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_strategy_of_the_model_cuts_a_state_with_momentum(form: str, tmp_path: Path) -> None:
    full = {"w": value("w", (8, 6)), "moments.w": value("m", (8, 6))}
    layouts = {name: layout([2], [-1, 0]) for name in full}
    strategy = write_strategy(tmp_path / "strategy", single(layouts))
    src = write_checkpoint(tmp_path / "full.safetensors", full)
    done("convert", src, tmp_path / "state", "--src-strategy", "none", "--to", form, "--shards", 2)
    words = ("--to", "hyper-parallel", "--dst-strategy", strategy)
    done("convert", tmp_path / "state", tmp_path / "again", *words, "--verify")
    slices = {each["name"]: each["cuts"] for each in done("inspect", tmp_path / "again", "--json").json["tensors"]}
    assert slices == {"model.w": [1, 2], "moments.w": [1, 2]}
    done("verify", tmp_path / "again", "--src", tmp_path / "state")
    done("convert", tmp_path / "again", tmp_path / "back", "--dst-strategy", "none", "--verify")
    same_checkpoints(read_checkpoint(tmp_path / "back" / "rank_0" / "checkpoint_0.safetensors"), full)


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_state_keeps_the_key_of_the_model_through_shards_that_record_none(form: str, tmp_path: Path) -> None:
    full = {"w": value("w", (4, 2)), "adam_m.w": value("m", (4, 2))}
    strategy = write_strategy(tmp_path / "strategy", single({name: layout([2], [0, -1]) for name in full}))
    source = write_checkpoint(tmp_path / "full.safetensors", full)
    done("convert", source, tmp_path / "0", "--src-strategy", "none", "--to", "dcp", "--shards", 2)
    done("convert", tmp_path / "0", tmp_path / "1", "--to", "hf-sharded", "--shards", 2)
    done("convert", tmp_path / "1", tmp_path / "2", "--to", form, "--shards", 2, "--verify")
    done("convert", tmp_path / "2", tmp_path / "ranks", "--dst-strategy", strategy, "--verify")
    assert read_checkpoint(tmp_path / "ranks" / "rank_1" / "checkpoint_1.safetensors").keys() == full.keys()


def test_text_is_no_buffer_of_a_model(tmp_path: Path) -> None:
    full = {"w": value("w", (4, 2)), "scale": value("s", (1,)), "note": text("a note")}
    source = write_checkpoint(tmp_path / "full.ckpt", full)
    result = done("convert", source, tmp_path / "out", "--src-strategy", "none", "--to", "dcp", "--shards", 2)
    assert "and so on: 'scale'\n" in result.err and "cannot hold text; left out: 'note'" in result.err
