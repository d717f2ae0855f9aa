"""MindSpore's functions for unified weights, under their own names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import ReshardError, UsageError
from tests.running import done
from tests.small import COPIED, World, tensors
from tests.trees import (
    Checkpoint,
    layout,
    read_checkpoint,
    read_weights,
    same_checkpoints,
    same_ranks,
    single,
    value,
    write_strategy,
)

FULL = tensors()


def unify(world: World, **options: Any) -> Path:
    world.save(FULL)
    reshard.unified_safetensors(str(world.src), str(world.old), str(world.dst), **options)
    return world.dst


def test_a_rank_tree_becomes_unified_weights(world: World) -> None:
    same_checkpoints(read_weights(unify(world)), {**FULL, **COPIED})
    document = json.loads((world.dst / "param_name_map.json").read_text())
    assert document["weight_map"] == dict.fromkeys(FULL, "part0.safetensors")
    assert sorted(path.name for path in world.dst.glob("*.safetensors")) == [
        "hyper_param.safetensors",
        "part0.safetensors",
    ]


def test_parameters_excluded_by_the_callback_are_left_out(world: World) -> None:
    requests: list[str] = []

    def choose(name: str) -> bool:
        requests.append(name)
        return not name.startswith("m.")

    same_checkpoints(read_weights(unify(world, choice_func=choose)), {"w": FULL["w"], "v": FULL["v"], **COPIED})
    assert sorted(requests) == sorted(FULL)
    # A name that is also a pattern means itself.
    assert "m.w" not in json.loads((world.dst / "param_name_map.json").read_text())["weight_map"]


def test_parameters_renamed_by_the_callback_are_renamed_in_files_and_map(world: World) -> None:
    """Every name separately; excluded names stay excluded, even if another tensor gets such a name."""
    names: dict[str, Any] = {"w": "net.w", "v": False, "m.w": "v"}
    expected = {"net.w": FULL["w"], "v": FULL["m.w"], **COPIED}
    same_checkpoints(read_weights(unify(world, choice_func=names.__getitem__)), expected)
    weight_map = json.loads((world.dst / "param_name_map.json").read_text())["weight_map"]
    assert sorted(weight_map) == ["net.w", "v"]
    # Another choice is another conversion.
    with pytest.raises(ReshardError, match="another conversion"):
        unify(world)
    unify(world, choice_func=names.__getitem__)


def test_optimizer_state_keeps_its_name_unless_it_is_given_another(tmp_path: Path) -> None:
    layouts = {name: layout([2, 2], [0, -1]) for name in ("w.weight", "adam_m.w.weight")}
    world = World(tmp_path, single(layouts), single(layouts))
    full = {name: value(name, (8, 6)) for name in layouts}
    world.save(full)
    reshard.unified_safetensors(
        str(world.src), str(world.old), str(world.dst), choice_func=lambda name: name == "adam_m.w.weight" or "new"
    )
    expected = {"new": full["w.weight"], "adam_m.w.weight": full["adam_m.w.weight"]}
    same_checkpoints(read_weights(world.dst), {**expected, **COPIED})


@pytest.mark.parametrize("name", ["v", "global_step"])
def test_a_rename_to_an_existing_name_is_refused(name: str, world: World) -> None:
    with pytest.raises(ReshardError, match="would also get the name"):
        unify(world, choice_func=lambda requests: name if requests == "w" else True)
    assert not list(world.dst.glob("*.safetensors"))


def test_an_empty_name_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="empty name for 'w'"):
        unify(world, choice_func=lambda name: "" if name == "w" else True)


def test_accumulated_gradients_are_left_out_as_mindspore_does(tmp_path: Path) -> None:
    gradients = {name: layout([2, 2], [0, -1]) for name in ("w", "accu_grads.w")}
    world = World(tmp_path, single(gradients), single(gradients))
    full = {"w": value("w", (8, 6)), "accu_grads.w": value("g", (8, 6))}
    world.save(full)
    reshard.unified_safetensors(str(world.src), str(world.old), str(world.dst))
    same_checkpoints(read_weights(world.dst), {"w": full["w"], **COPIED})


def test_several_runs_fill_one_directory(world: World) -> None:
    """The files are those of one run, and the last to end completes them."""
    world.save(FULL)
    runs = 2
    for number in (2, 1):
        assert not (world.dst / "param_name_map.json").exists()
        reshard.unified_safetensors(str(world.src), str(world.old), str(world.dst), split_dst_file=(number, runs))
    same_checkpoints(read_weights(world.dst), {**FULL, **COPIED})
    assert (world.dst / "param_name_map.json").exists()


@pytest.mark.parametrize("split", [(0, 2), (3, 2), (1,), (1, 2, 3)])
def test_a_number_over_the_shard_count_is_refused(split: tuple[int, ...], world: World) -> None:
    with pytest.raises(UsageError, match="is not a pair"):
        unify(world, split_dst_file=split)


def test_a_callback_result_of_another_type_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="choice_func returns None for 'w'"):
        unify(world, choice_func=lambda name: None if name == "w" else True)


def test_a_choice_function_without_a_strategy_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="src_strategy_file"):
        reshard.unified_safetensors(str(world.src), None, str(world.dst), choice_func=lambda name: True)


def load(world: World, unified: Path, **options: Any) -> Path:
    out = world.root / "loaded"
    loaded = reshard.load_distributed_checkpoint(
        None,
        predict_strategy=str(world.new),
        format="safetensors",
        unified_safetensors_dir=str(unified),
        dst_safetensors_dir=str(out),
        **options,
    )
    assert loaded is True
    return out


def ranks_in(directory: Path, ending: str = "safetensors") -> dict[int, Checkpoint]:
    return {
        int(path.parent.name.split("_")[1]): read_checkpoint(path)
        for path in sorted(directory.glob(f"rank_*/net.{ending}"))
    }


def test_load_distributed_checkpoint_writes_every_ranks_slices(world: World) -> None:
    out = load(world, unify(world))
    same_ranks(ranks_in(out), world.expected(FULL))
    assert sorted(path.name for path in out.rglob("*")) == ["net.safetensors"] * 2 + ["rank_0", "rank_1"]


def test_load_distributed_checkpoint_writes_one_rank_in_the_given_format(world: World) -> None:
    out = load(world, unify(world), rank_id=1, output_format="ckpt")
    same_ranks(ranks_in(out, "ckpt"), {1: world.expected(FULL)[1]})


def test_name_map_maps_network_names_to_file_names(world: World) -> None:
    unified = unify(world, choice_func=lambda name: f"model.{name}")
    names = {"w": "model.w", "v": "model.v", "m.w": "model.m.w", "other": "model.other"}
    same_ranks(ranks_in(load(world, unified, name_map=names)), world.expected(FULL))
    with pytest.raises(UsageError, match="'w' and 'w2' are both"):
        load(world, unified, name_map={**names, "w2": "model.w"})


def test_hugging_face_files_are_accepted(world: World) -> None:
    world.save(FULL)
    done("convert", world.src, world.dst, "--src-strategy", world.old, "--to", "huggingface")
    same_ranks(ranks_in(load(world, world.dst)), world.expected(FULL))


def test_without_a_strategy_each_rank_gets_all_parameters(world: World) -> None:
    unified = unify(world)
    out = world.root / "loaded"
    for rank in (None, 5):
        reshard.load_distributed_checkpoint(
            None,
            format="safetensors",
            unified_safetensors_dir=str(unified),
            dst_safetensors_dir=str(out),
            rank_id=rank,
        )
    same_ranks(ranks_in(out), {rank: {**FULL, **COPIED} for rank in (0, 5)})


def test_listed_weights_missing_in_the_files_are_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    unified = unify(world)
    more = write_strategy(world.root / "more", single({"w": layout([2], [0, -1]), "gone.weight": layout([2], [0, -1])}))
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.load_distributed_checkpoint(
            None,
            predict_strategy=str(more),
            format="safetensors",
            unified_safetensors_dir=str(unified),
            dst_safetensors_dir=str(world.root / "loaded"),
            rank_id=0,
        )
    assert any("'gone.weight'" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"format": "ckpt"}, "needs MindSpore"),
        ({"network": object()}, "needs MindSpore"),
        ({"return_param_dict": True}, "needs MindSpore"),
        ({"checkpoint_filenames": ["a"]}, "checkpoint_filenames"),
        ({"train_strategy_filename": "a"}, "train_strategy_filename"),
        ({"strict_load": True}, "strict_load"),
        ({"dec_key": b"0" * 16}, "dec_key"),
        ({"dec_mode": "AES-CBC"}, "dec_mode"),
        ({"unified_safetensors_dir": None}, "unified_safetensors_dir"),
        ({"dst_safetensors_dir": None}, "dst_safetensors_dir"),
        ({"predict_strategy": {"w": []}}, "not a path"),
        ({"rank_id": 7}, "out of range"),
        ({"output_format": "npz"}, "npz"),
    ],
)
def test_arguments_that_require_mindspore_are_refused(options: dict[str, Any], texts: str, world: World) -> None:
    unified = unify(world)
    arguments: dict[str, Any] = {
        "network": None,
        "predict_strategy": str(world.new),
        "format": "safetensors",
        "unified_safetensors_dir": str(unified),
        "dst_safetensors_dir": str(world.root / "loaded"),
        **options,
    }
    with pytest.raises(UsageError) as caught:
        reshard.load_distributed_checkpoint(**arguments)
    assert texts in str(caught.value)
    assert not (world.root / "loaded").exists()


def test_a_rank_tree_is_refused_as_unified_weights(world: World) -> None:
    world.save(FULL)
    with pytest.raises(ReshardError, match="not unified weights"):
        load(world, world.src)
