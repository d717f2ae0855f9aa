"""Merged adapters equal NumPy: W + alpha / r * B A, rounded once, in any division of the work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from reshard import execute
from reshard.checkpoints import FileHandles
from reshard.execute import Progress
from reshard.forms.registry import form_named
from reshard.forms.request import Request
from reshard.lora import scale_of
from reshard.lora.adapter import LowRank, MatrixCache
from reshard.plan.planner import read_source
from reshard.strategies import Strategy
from reshard.text.messages import Report
from reshard.verification.end_to_end import MergedAdapter, Verified, verify_conversion
from reshard.verification.reading import Reading
from tests.asking import conversion_of
from tests.running import Argument, done, fails, warns
from tests.trees import Value, cut_ranks, layout, read_tree, single, write_strategy, write_tree

Array = npt.NDArray[Any]

SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (640, 1500),
    "model.layers.0.mlp.down_proj.weight": (96, 64),
    "model.norm.weight": (96,),
}
CHANGED = list(SHAPES)[:2]


def weights(dtype: str = "f4") -> dict[str, Array]:
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def matrices(rank: int = 8) -> dict[str, tuple[Array, Array]]:
    """Per weight A and B."""
    random = np.random.default_rng(2)
    return {
        name: (
            random.standard_normal((rank, SHAPES[name][1])).astype("f4"),
            random.standard_normal((SHAPES[name][0], rank)).astype("f4"),
        )
        for name in CHANGED
    }


def peft(place: Path, pairs: dict[str, tuple[Array, Array]], infix: str = "", **config: Any) -> Path:
    """An adapter as PEFT saves it."""
    place.mkdir()
    tensors = {}
    for name, (down, up) in pairs.items():
        stem = "base_model.model." + name[: -len(".weight")]
        tensors[f"{stem}.lora_A{infix}.weight"] = down
        tensors[f"{stem}.lora_B{infix}.weight"] = up
    save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
    (place / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, **config}))
    return place


def base(place: Path, full: dict[str, Array]) -> Path:
    place.mkdir()
    save_file(full, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text("{}")
    return place


def merged(full: dict[str, Array], pairs: dict[str, tuple[Array, Array]], scale: float) -> dict[str, Array]:
    """In Float64, not rounded."""
    return {
        name: array.astype("f8")
        + (scale * pairs[name][1].astype("f8") @ pairs[name][0].astype("f8") if name in pairs else 0)
        for name, array in full.items()
    }


def close(tensors: dict[str, Array], expected: dict[str, Array], epsilon: float = 2**-22) -> None:
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        # The product is a sum of eight, in Float32; terms are some units large.
        assert np.abs(tensors[name].astype("f8") - array).max() <= 64 * epsilon, name


@pytest.mark.parametrize("infix", ["", ".default"])
def test_the_product_is_added_and_all_other_tensors_are_copied(tmp_path: Path, infix: str) -> None:
    full, pairs = weights(), matrices()
    src = base(tmp_path / "base", full)
    done("merge-lora", src, peft(tmp_path / "adapter", pairs, infix), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    close(tensors, merged(full, pairs, 2.0))
    assert np.array_equal(tensors["model.norm.weight"], full["model.norm.weight"])
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("config", "alpha", "scale"),
    [
        ({"use_rslora": True}, None, 16 / 8**0.5),
        ({"alpha_pattern": {"q_proj": 4, "down_proj": 4}}, None, 0.5),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 4, r"mlp\.(up|down)_proj": 4}}, None, 0.5),
        ({"alpha_pattern": {"(?=q_proj)q_proj": 4, "(down|up)_proj": 4}}, None, 0.5),
        ({"alpha_pattern": {".*_proj": 4, "q_proj": 5}, "rank_pattern": {"q_proj": 8}, "r": 8}, 3, 0.5),
        ({}, 4, 0.5),
        ({"lora_alpha": 24}, None, 3.0),
    ],
)
def test_the_scale_follows_the_configuration(
    tmp_path: Path, config: dict[str, Any], alpha: float | None, scale: float
) -> None:
    full, pairs = weights(), matrices()
    words: list[Argument] = [] if alpha is None else ["--alpha", str(alpha)]
    adapter = peft(tmp_path / "adapter", pairs, **config)
    done("merge-lora", base(tmp_path / "base", full), adapter, tmp_path / "out", *words)
    close(load_file(tmp_path / "out" / "model.safetensors"), merged(full, pairs, scale))


def test_sixteen_bit_weights_are_rounded_once(tmp_path: Path) -> None:
    full, pairs = weights("f2"), matrices()
    done("merge-lora", base(tmp_path / "base", full), peft(tmp_path / "adapter", pairs), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, array in merged(full, pairs, 2.0).items():
        # Values on the edge between two may round to either side, by the last bits of the product.
        wrong = tensors[name] != array.astype("f2")
        assert tensors[name].dtype == np.float16 and wrong.mean() < 1e-3
        assert np.abs(tensors[name].astype("f8") - array).max() <= np.abs(array).max() * 2**-10


def test_a_weight_with_a_row_for_each_input_gets_the_product_transposed(tmp_path: Path) -> None:
    full, pairs = weights(), matrices()
    turned = {name: np.ascontiguousarray(array.T) for name, array in full.items()}
    adapter = peft(tmp_path / "adapter", pairs, fan_in_fan_out=True)
    done("merge-lora", base(tmp_path / "base", turned), adapter, tmp_path / "out", "--verify")
    close(
        load_file(tmp_path / "out" / "model.safetensors"),
        {name: array.T for name, array in merged(full, pairs, 2.0).items()},
    )


@pytest.mark.deep
@pytest.mark.parametrize("style", ["lora_a", "mindpet_delta_lora_a"])
def test_adapters_stored_among_the_weights_of_ranks_are_merged(tmp_path: Path, style: str) -> None:
    """As MindFormers saves them: cut, and the base itself is the adapter."""
    full, pairs = weights(), matrices()
    layouts = {name: layout([2, 2], [0, -1] if len(shape) == 2 else [-1]) for name, shape in SHAPES.items()}
    everything = dict(full)
    for name, (down, up) in pairs.items():
        stem = name[: -len(".weight")]
        everything[f"{stem}.{style}"], layouts[f"{stem}.{style}"] = down, layout([2, 2], [-1, -1])
        upper = style[:-1] + "b"
        everything[f"{stem}.{upper}"], layouts[f"{stem}.{upper}"] = up, layout([2, 2], [0, -1])
    values = {name: Value("Float32", array.view("<u4")) for name, array in everything.items()}
    strategy = single(layouts)
    write_tree(tmp_path / "src", cut_ranks(strategy, values), "rank_{rank}/net.ckpt")
    saved = write_strategy(tmp_path / "src.ckpt", strategy, {n: a.shape for n, a in everything.items()}, "merged")
    whole = tmp_path / "whole"
    words: list[Argument] = ["merge-lora", tmp_path / "src", tmp_path / "src"]
    ends: list[Argument] = ["--src-strategy", saved, "--adapter-strategy", saved, "--alpha", 16]
    done(*words, tmp_path / "out", *ends, "--verify")
    done(*words, whole, *ends, "--dst-strategy", "none", "--jobs", 1, "--max-memory", "64K", "--verify")
    done(*words, tmp_path / "two", *ends, "--to", "checkpoint2", "--verify")
    actual = {name: value.array.view("<f4") for name, value in read_tree(whole)[0].items()}
    close(actual, merged(full, pairs, 2.0))
    # Every element is the same in any layout and any blocks.
    whole_values = {name: Value("Float32", array.view("<u4")) for name, array in actual.items()}
    stages = single({name: layouts[name] for name in SHAPES})
    for rank, tensors in cut_ranks(stages, whole_values).items():
        mine = read_tree(tmp_path / "out")[rank]
        assert mine.keys() == tensors.keys() and all(mine[name].same(tensor) for name, tensor in tensors.items())


def test_the_same_command_resumes_and_another_adapter_is_refused(tmp_path: Path) -> None:
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices())
    words: list[Argument] = ["merge-lora", src, adapter, tmp_path / "out", "--max-shard-size", "1MB"]
    done(*words)
    done(*words)
    other = peft(tmp_path / "other", {name: (2 * a, b) for name, (a, b) in matrices().items()})
    fails(3, "merge-lora", src, other, tmp_path / "out", "--max-shard-size", "1MB")
    fails(2, *words[:4], "--max-shard-size", "1MB", "--alpha", "0")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model.safetensors"])
def test_an_adapter_is_never_overwritten(name: str, tmp_path: Path) -> None:
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices())
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    before = (adapter / name).read_bytes()
    words: list[Argument] = ["merge-lora", src, adapter, adapter, "--alpha", 16, "--overwrite"]
    fails(2, *words, texts=[f"source file {adapter / name} lies in DST {adapter}"])
    assert (adapter / name).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (lambda tensors: tensors.pop(min(tensors)), ["without the other matrix"]),
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": np.ones((4, 4), "f4")}), ["lm_head"]),
        (
            lambda tensors: tensors.update({"base_model.model.model.lora_magnitude_vector": np.ones((4,), "f4")}),
            ["DoRA"],
        ),
        (
            lambda tensors: tensors.update(
                {
                    "base_model.model.model.layers.9.x.lora_A.weight": np.ones((8, 4), "f4"),
                    "base_model.model.model.layers.9.x.lora_B.weight": np.ones((4, 8), "f4"),
                }
            ),
            ["model.layers.9.x.weight", "does not have"],
        ),
        (lambda tensors: tensors.update({max(tensors): np.ones((3, 8), "f4")}), ["shape"]),
        (lambda tensors: tensors.clear(), ["no matrices"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, change: Any, texts: list[str]) -> None:
    adapter = peft(tmp_path / "adapter", matrices())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors or {"global_step": np.ones((), "i4")}, adapter / "adapter_model.safetensors")
    fails(3, "merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out", texts=texts)
    assert not (tmp_path / "out").exists()


def test_changed_targets_of_a_merge_are_merged_again(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter", matrices())
    words: list[Argument] = ["merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out"]
    done(*words)
    (written,) = (tmp_path / "out").glob("*.safetensors")
    before = written.read_bytes()
    os.utime(written, ns=(1, 1))
    # verify --src has no adapter, and by-rank neither.
    told = done("status", tmp_path / "out").out
    assert f"reshard merge-lora BASE ADAPTER {tmp_path / 'out'} --overwrite" in told
    assert "verify" not in told and "by-rank" not in told
    assert "verify" not in fails(3, *words, texts=["modified after it was written", "--overwrite"]).err
    done(*words, "--overwrite")
    assert written.read_bytes() == before


def test_without_a_configuration_alpha_is_required(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter", matrices())
    fails(3, "merge-lora", base(tmp_path / "b", weights()), f"{adapter}s", tmp_path / "out", texts=["does not exist"])
    (adapter / "adapter_config.json").unlink()
    fails(3, "merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out", texts=["--alpha"])


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"lora_alpha": "much"},
        {"alpha_pattern": {"q_proj": None}},
        {"alpha_pattern": {"q(": 4}},
        {"alpha_pattern": {"q_pro": 4}},
        {"rank_pattern": {"q_proj": 4}},
        {"rank_pattern": {"^q_proj": 8}},
        {"r": 4},
        {"alora_invocation_tokens": [1, 2]},
        {"alora_invocation_tokens": []},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"init_lora_weights": "mica"},
        {"peft_type": "ADALORA"},
        {"something_new": {"that": "changes weights"}},
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    adapter = peft(tmp_path / "adapter", matrices(), **config)
    texts = ["adapter_config", *config, *(key for value in config.values() if isinstance(value, dict) for key in value)]
    fails(3, "merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out", texts=texts[:2])
    assert not (tmp_path / "out").exists()


def test_other_settings_of_peft_are_accepted(tmp_path: Path) -> None:
    """All members that PEFT 0.21 saves of a plain LoRA, but those of `peft`."""
    others: dict[str, Any] = dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
            *("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
            *("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision"),
            *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
        )
    )
    others.update(alpha_pattern={}, base_model_name_or_path="model", bias="none", ensure_weight_tying=False)
    others.update(fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, loftq_config={}, lora_bias=False)
    others.update(lora_dropout=0.1, megatron_core="megatron.core", peft_type="LORA", peft_version="0.21.2")
    others.update(qalora_group_size=16, rank_pattern={}, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    others.update(use_dora=False, use_qalora=False, use_rslora=False)
    adapter = peft(tmp_path / "adapter", matrices(), **others)
    assert "warning" not in done("merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out").err


@pytest.mark.parametrize("alpha", ["nan", "inf", "-inf", "1e308", "1e-300", "0", "-1"])
def test_an_alpha_without_finite_weights_is_wrong_usage(tmp_path: Path, alpha: str) -> None:
    adapter = peft(tmp_path / "adapter", matrices())
    words: list[Argument] = ["merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out"]
    fails(2, *words, "--alpha", alpha, texts=["--alpha", "number"])


def test_an_invalid_adapter_rank_is_refused_before_reading(tmp_path: Path) -> None:
    name, rank = "base_model.model.model.layers.0.self_attn.q_proj", 1 << 24
    shapes = {f"{name}.lora_A.weight": [rank, 1500], f"{name}.lora_B.weight": [640, rank]}
    header, end = {}, 0
    for tensor, shape in shapes.items():
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end := end + 4 * shape[0] * shape[1]]}
    text = json.dumps(header).encode()
    adapter = peft(tmp_path / "adapter", {}, r=rank)
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    fails(
        3, "merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out", texts=[f"rank {rank}", "4096"]
    )


def test_matrices_of_two_adapters_are_not_paired(tmp_path: Path) -> None:
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices(), ".one")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for old, new in (("lora_B.one", "lora_B.two"), ("q_proj.lora_A.one", "q_proj.lora_A.two")):
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, path)
        fails(3, "merge-lora", src, adapter, tmp_path / "out", texts=["matrices of 2 adapters"])


def test_an_adapter_of_bfloat16_is_merged(tmp_path: Path) -> None:
    full, pairs = weights(), matrices()
    short = {name: (a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)) for name, (a, b) in pairs.items()}
    adapter = peft(tmp_path / "adapter", short)
    done("merge-lora", base(tmp_path / "base", full), adapter, tmp_path / "out", "--verify")
    wide = {name: (a.astype("f4"), b.astype("f4")) for name, (a, b) in short.items()}
    close(load_file(tmp_path / "out" / "model.safetensors"), merged(full, wide, 2.0))


def test_an_adapter_modified_during_the_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, pairs = weights(), matrices()
    src, adapter = base(tmp_path / "base", full), peft(tmp_path / "adapter", pairs)
    other = peft(tmp_path / "other", {name: (2 * a, b) for name, (a, b) in pairs.items()})
    path = adapter / "adapter_model.safetensors"
    committed = Progress.committed

    def save_again(self: Progress, rank: int, size: int) -> None:
        committed(self, rank, size)
        with path.open("r+b") as file:
            file.write((other / "adapter_model.safetensors").read_bytes())

    # A file per weight: the adapter changes when the first has its name.
    words: list[Argument] = ["merge-lora", src, adapter, tmp_path / "out", "--max-shard-size", "1KB", "--jobs", 1]
    monkeypatch.setattr(Progress, "committed", save_again)
    fails(1, *words, texts=["adapter_model.safetensors", "changed"])
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert not (tmp_path / "out" / "reshard-manifest.json").exists()
    written = {name: array for part in (tmp_path / "out").glob("model-*") for name, array in load_file(part).items()}
    expected = merged(full, pairs, 2.0)
    close(written, {name: expected[name] for name in written})


def test_weights_beside_the_matrices_must_equal_the_bases(tmp_path: Path) -> None:
    full, pairs = weights(), matrices()
    src, adapter = base(tmp_path / "base", full), peft(tmp_path / "adapter", pairs)
    saved = tmp_path / "saved" / "net.safetensors"
    saved.parent.mkdir()
    beside = {f"{name[: -len('.weight')]}.lora_{side}": m for name, ab in pairs.items() for side, m in zip("ab", ab)}
    save_file({**beside, **full}, saved)
    done("merge-lora", src, saved, tmp_path / "out", "--alpha", 16)
    done("merge-lora", src, adapter, tmp_path / "other")
    both = [load_file(tmp_path / out / "model.safetensors") for out in ("out", "other")]
    assert all(np.array_equal(both[0][name], both[1][name]) for name in SHAPES)
    trained = {**full, "model.norm.weight": full["model.norm.weight"] + np.float32(1)}
    save_file({**beside, **trained}, saved)
    fails(3, "merge-lora", src, saved, tmp_path / "none", "--alpha", 16, texts=["model.norm.weight", "pass it as BASE"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("start", ["pissa_niter_4", "lora_ga"])
def test_an_adapter_that_modified_its_base_gives_a_warning(tmp_path: Path, start: str) -> None:
    adapter = peft(tmp_path / "adapter", matrices(), init_lora_weights=start)
    warns(done("merge-lora", base(tmp_path / "base", weights()), adapter, tmp_path / "out"), start, "the base")


def test_matrices_of_another_adapter_in_the_base_are_copied(tmp_path: Path) -> None:
    full, pairs = weights(), matrices()
    beside = {f"{name[: -len('.weight')]}.lora_{side}": m for name, ab in pairs.items() for side, m in zip("ab", ab)}
    src, adapter = base(tmp_path / "base", {**full, **beside}), peft(tmp_path / "adapter", pairs)
    fails(3, "merge-lora", src, adapter, tmp_path / "out", texts=["another adapter", "lora_a"])
    save_file({**beside, **full}, tmp_path / "saved.safetensors")
    done("merge-lora", src, tmp_path / "saved.safetensors", tmp_path / "out", "--alpha", 16)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == full.keys()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_each_tile_of_the_product_is_computed_once(rows: int) -> None:
    random = np.random.default_rng(3)
    up, down = random.standard_normal((200, 4)).astype("f4"), random.standard_normal((4, 2500)).astype("f4")
    read = []

    def matrices(rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Array, Array]:
        read.append(1)
        return up[slice(*rows)], down[:, slice(*columns)]

    actual = np.zeros((200, 2500), "<u4")
    weight = LowRank("w", (200, 2500), "Float32", matrices, 2.0, lambda *_: None, MatrixCache(1 << 20))
    for row in range(0, 200, rows):
        block = actual[row : row + rows]
        weight.add(((row, row + len(block)), (0, 2500)), block[..., None])
    assert np.allclose(actual.view("f4"), 2 * up @ down, rtol=1e-5, atol=1e-5)
    # Four bands of three tiles.
    assert len(read) == 12


def compared(src: Path, adapter: Path, out: Path, alpha: float = 16) -> list[tuple[str, str | None]]:
    """Kind and parameter of every difference from base plus adapter, by `verify_conversion`."""
    with FileHandles() as handles:
        ranks, huggingface, none = form_named("ranks"), form_named("huggingface"), Strategy.none()
        files = conversion_of(adapter / "adapter_model.safetensors", out)
        matrices = Request(files, ranks, none, ranks, none)
        request = Request(conversion_of(src, out), huggingface, none, huggingface, none)
        merged = MergedAdapter(matrices, scale_of(str(adapter), alpha, Report()))
        means = Reading(handles, Report(), 2, 1 << 20, execute.Progress(), crc=False)
        result = verify_conversion(Verified(request, {}, partial(read_source, means=means), adapter=merged), means)
    return [(difference.kind, difference.parameter) for difference in result]


def in_place(path: Path, name: str, index: tuple[int, ...], change: Callable[[Any], Any]) -> None:
    tensors = load_file(path)
    array = tensors[name].copy()
    array[index] = change(array[index])
    save_file({**tensors, name: array}, path, metadata={"format": "pt"})


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_merged_weights_are_verified(tmp_path: Path, dtype: str) -> None:
    src, adapter = base(tmp_path / "base", weights(dtype)), peft(tmp_path / "adapter", matrices())
    out = tmp_path / "out"
    words: list[Argument] = ["merge-lora", src, adapter, out, "--verify"]
    warns(done(*words), "verified: no differences")
    warns(done(*words), "nothing to write", "verified: no differences")
    assert compared(src, adapter, out) == []

    both = [("content", name) for name in sorted(CHANGED)]
    assert sorted(compared(src, adapter, out, 16.1)) == both
    other = peft(tmp_path / "other", matrices())
    stem = "base_model.model." + CHANGED[0][: -len(".weight")]
    in_place(other / "adapter_model.safetensors", f"{stem}.lora_B.weight", (600, 3), lambda one: one * 1.1)
    assert compared(src, other, out) == [("content", CHANGED[0])]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "index", "change"),
    [
        (CHANGED[0], (639, 1499), lambda one: one + abs(one) * 2**-9 + 2**-9),
        (CHANGED[0], (255, 1023), lambda one: np.nan),
        (CHANGED[1], (0, 0), lambda one: np.inf),
        (CHANGED[1], (95, 63), lambda one: -one - 1),
        ("model.norm.weight", (5,), lambda one: np.nextafter(one, one + one)),
    ],
)
def test_verify_finds_one_wrong_merged_element(
    tmp_path: Path, name: str, index: tuple[int, ...], change: Callable[[Any], Any]
) -> None:
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices())
    done("merge-lora", src, adapter, tmp_path / "out", "--verify")
    in_place(tmp_path / "out" / "model.safetensors", name, index, change)
    assert compared(src, adapter, tmp_path / "out") == [("content", name)]


def test_merged_infinity_and_nan_are_verified(tmp_path: Path) -> None:
    full, pairs = weights("f2"), matrices()
    full[CHANGED[0]][:4] = [[65504.0], [-65504.0], [np.inf], [np.nan]]
    pairs[CHANGED[0]][1][7] = 1e5
    src, adapter = base(tmp_path / "base", full), peft(tmp_path / "adapter", pairs)
    warns(done("merge-lora", src, adapter, tmp_path / "out", "--verify"), "became infinite", "no differences")
    merged = (tmp_path / "out" / "model.safetensors").read_bytes()
    for row, other in ((7, -np.inf), (7, 65504.0), (2, 1.0), (2, -np.inf), (3, 0.0), (20, np.nan), (20, np.inf)):
        in_place(tmp_path / "out" / "model.safetensors", CHANGED[0], (row, 7), lambda _: other)  # noqa: B023
        assert compared(src, adapter, tmp_path / "out") == [("content", CHANGED[0])], (row, other)
        (tmp_path / "out" / "model.safetensors").write_bytes(merged)


@pytest.mark.deep
@pytest.mark.parametrize("to", ["huggingface", "dcp", "hyper-parallel", "hf-sharded"])
@pytest.mark.parametrize("form", ["huggingface", "dcp", "hyper-parallel"])
def test_names_of_a_trainers_state_are_those_of_a_conversion(form: str, to: str, tmp_path: Path) -> None:
    """Base, adapter and result may have the prefix ``model.``."""
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices())
    done("merge-lora", src, adapter, tmp_path / "expected")
    cut: list[Argument] = [] if to == "huggingface" else ["--shards", 3]
    if form != "huggingface":
        done("convert", src, tmp_path / "state", "--to", form, "--shards", 2)
        words: list[Argument] = ["--src-strategy", "none", "--shards", 2]
        done("convert", adapter / "adapter_model.safetensors", tmp_path / "saved", "--to", form, *words)
        src, adapter = tmp_path / "state", tmp_path / "saved"
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    done("merge-lora", src, adapter, tmp_path / "out", "--to", to, *cut, "--verify")
    written = {tensor["name"] for tensor in done("inspect", tmp_path / "out", "--json").json["tensors"]}
    rooted = to in ("dcp", "hyper-parallel") or (to == "hf-sharded" and form != "huggingface")
    assert written == {"model." + name if rooted else name for name in SHAPES}
    # Nothing in sharded safetensors shows whether the model's own names begin with it.
    rename: list[Argument] = ["--rename", "model.*=*" if rooted else "*=*"] if to == "hf-sharded" else []
    done("convert", tmp_path / "out", tmp_path / "back", "--to", "huggingface", *rename)
    back, expected = (load_file(tmp_path / place / "model.safetensors") for place in ("back", "expected"))
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_fused_experts_are_converted_before(tmp_path: Path) -> None:
    """With their names in transformers 5, only that would load the merged model."""
    full = {**weights(), "model.layers.0.mlp.experts.down_proj": np.ones((2, 3, 4), "f4")}
    src, adapter = base(tmp_path / "base", full), peft(tmp_path / "adapter", matrices())
    done("convert", src, tmp_path / "state", "--to", "dcp", "--shards", 2)
    words: list[Argument] = ["merge-lora", tmp_path / "state", adapter, tmp_path / "out", "--to", "huggingface"]
    fails(2, *words, texts=["model.layers.0.mlp.experts.down_proj", "convert BASE"])


def test_weights_beside_the_matrices_are_compared_under_the_names_of_the_model(tmp_path: Path) -> None:
    full, pairs = weights(), matrices()
    src, adapter = base(tmp_path / "base", full), peft(tmp_path / "adapter", pairs)
    done("convert", src, tmp_path / "state", "--to", "dcp", "--shards", 2)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for change in (0, 1):
        extra = {"model.norm.weight": full["model.norm.weight"] + np.float32(change)}
        save_file({**tensors, **extra}, adapter / "adapter_model.safetensors")
        words: list[Argument] = ["merge-lora", tmp_path / "state", adapter, tmp_path / f"out{change}"]
        if change:
            fails(3, *words, texts=["differ from the base's", "model.norm.weight"])
        else:
            done(*words, "--verify")


def merge_of_modules(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], conv: tuple[str, ...], stated: bool
) -> tuple[list[Argument], dict[str, Array]]:
    """A merge of an adapter for weights of these shapes, and the result as PEFT merges it.

    Args:
        tmp_path: where files go.
        shapes: outputs and inputs of each module.
        conv: the modules whose weights have a row for each input.
        stated: fan_in_fan_out of the configuration.
    """
    random = np.random.default_rng(4)
    full, pairs, expected = {}, {}, {}
    for module, (rows, columns) in shapes.items():
        name = f"h.0.{module}.weight"
        weight = random.standard_normal((rows, columns)).astype("f4")
        pairs[name] = (
            random.standard_normal((8, columns)).astype("f4"),
            random.standard_normal((rows, 8)).astype("f4"),
        )
        result = merged({name: weight}, pairs, 2.0)[name]
        full[name], expected[name] = (
            np.ascontiguousarray(each.T if module in conv else each) for each in (weight, result)
        )
    adapter = peft(tmp_path / "adapter", pairs, fan_in_fan_out=stated)
    return ["merge-lora", base(tmp_path / "base", full), adapter, tmp_path / "out", "--verify"], expected


GPT2 = {"attn.c_attn": (36, 12), "attn.c_proj": (12, 12), "mlp.c_fc": (48, 12), "mlp.c_proj": (12, 48)}
LLAMA = {"q_proj": (12, 12), "k_proj": (6, 12), "up_proj": (48, 12)}
SQUARE = {"q_proj": (12, 12), "o_proj": (12, 12)}


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize(
    ("shapes", "conv"),
    [
        ({**GPT2, "head": (30, 12)}, tuple(GPT2)),
        # Qwen names its linear layers so.
        ({**GPT2, "mlp.w1": (48, 12)}, ()),
        ({**LLAMA, "mlp.c_fc": (48, 12)}, ("mlp.c_fc",)),
    ],
)
def test_shapes_and_names_show_which_weights_have_a_row_for_each_input(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], conv: tuple[str, ...], stated: bool
) -> None:
    words, expected = merge_of_modules(tmp_path, shapes, conv, stated)
    done(*words)
    close(load_file(tmp_path / "out" / "model.safetensors"), expected)


@pytest.mark.parametrize("stated", [False, True])
def test_square_weights_of_one_kind_follow_the_configuration(tmp_path: Path, stated: bool) -> None:
    words, expected = merge_of_modules(tmp_path, SQUARE, tuple(SQUARE) if stated else (), stated)
    done(*words)
    close(load_file(tmp_path / "out" / "model.safetensors"), expected)


@pytest.mark.parametrize(
    ("shapes", "stated"),
    [
        ({"q_proj": (12, 12), "attn.c_proj": (12, 12)}, False),
        ({"q_proj": (12, 12), "attn.c_proj": (12, 12)}, True),
        ({**LLAMA, "attn.c_proj": (12, 12)}, False),
        # The configuration contradicts the other modules.
        (LLAMA, True),
    ],
)
def test_a_square_weight_that_may_be_stored_both_ways_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], stated: bool
) -> None:
    words, _ = merge_of_modules(tmp_path, shapes, (), stated)
    fails(3, *words, texts=["is square", "proj'", "fan_in_fan_out"])
    assert not (tmp_path / "out").exists()


EMBEDDING = "model.embed_tokens.weight"


def embedding_saved(tmp_path: Path, **saved: Array) -> list[Argument]:
    """A merge where PEFT saved whole weights with the matrices, by the rest of their names."""
    tmp_path.mkdir(exist_ok=True)
    adapter = peft(tmp_path / "adapter", matrices())
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), **{f"base_model.model.{name}": array for name, array in saved.items()}}, path)
    full = {**weights(), EMBEDDING: np.arange(12, dtype="f4").reshape(4, 3)}
    return ["merge-lora", base(tmp_path / "base", full), adapter, tmp_path / "out", "--verify"]


def test_embeddings_that_peft_saved_unchanged_are_accepted(tmp_path: Path) -> None:
    table = np.arange(12, dtype="f4").reshape(4, 3)
    # The base ties the head to the embedding, and does not hold it.
    names = (EMBEDDING, "lm_head.weight")
    done(*embedding_saved(tmp_path / "a", **dict.fromkeys(names, table)))
    done(*embedding_saved(tmp_path / "b", **{"model.embed_tokens.base_layer.weight": table}))
    merged_weights = load_file(tmp_path / "a" / "out" / "model.safetensors")
    assert np.array_equal(merged_weights[EMBEDDING], table) and "lm_head.weight" not in merged_weights


@pytest.mark.parametrize(
    ("name", "rows", "text"), [(EMBEDDING, 4, "differ"), (EMBEDDING, 5, "differ"), ("lm_head.weight", 4, "lacks")]
)
def test_whole_weights_of_an_adapter_are_refused_with_their_reason(
    tmp_path: Path, name: str, rows: int, text: str
) -> None:
    words = embedding_saved(tmp_path, **{name: np.ones((rows, 3), "f4")})
    fails(3, *words, texts=[f"base_model.model.{name}", text])
    assert not (tmp_path / "out").exists()
