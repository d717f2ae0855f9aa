"""AdamW of torch goes on from other trainers: each parameter has a step, and masters of the source are the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import reshard
from reshard.plan import editing, steps
from tests.corpus_mcore import mcore_case
from tests.forms.test_hf_sharded import Chunk, rows, write_shards
from tests.running import Argument, done, fails
from tests.running import reshard as run
from tests.trees import Value, layout, scalar, value, write_checkpoint, write_strategy

FAMILIES = {"td_dense_plain": "llama", "td_moe_fully": "qwen3_moe", "legacy_dense": "llama"}
TO: list[Argument] = ["--to", "dcp", "--shards", 2]
KEPT: list[Argument] = [*TO, "--names", "llama", "--optimizer", "keep", "--verify"]
STEP = "optimizer.state.w.step"


def held(place: Path) -> dict[str, npt.NDArray[np.generic]]:
    with reshard.open(place) as opened:
        return {name: np.asarray(opened[name]) for name in opened}


def trained(place: Path, **others: Value) -> Path:
    """A weight with moments and a master, as MindFormers saves them, and others."""
    tensors = {"w": value("w", (4, 2), "BFloat16"), "main_param.w": value("p", (4, 2))}
    tensors |= {"adam_m.w": value("m", (4, 2)), "adam_v.w": value("v", (4, 2)), **others}
    write_checkpoint(place / "model.safetensors", tensors, metadata={"format": "ms"})
    return place


def saved_by_torch(place: Path, numbers: Sequence[int]) -> Path:
    """Weights with moments and a step each, as a trainer of torch saves them."""
    tensors: dict[str, Value] = {}
    chunks = []
    for number, step in enumerate(numbers):
        name = f"layers.{number}.w"
        states = [f"optimizer.state.{name}.{each}" for each in ("exp_avg", "exp_avg_sq")]
        tensors |= {each: value(each, (4, 2)) for each in (f"model.{name}", *states)}
        chunks += [chunk for each in (f"model.{name}", *states) for chunk in rows(each, tensors[each], 2)]
        tensors[f"optimizer.state.{name}.step"] = Value("Float32", np.array(step, "<f4").view("<u4"))
        chunks.append(Chunk(f"optimizer.state.{name}.step", (), 1))
    return write_shards(place, tensors, chunks)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_parameter_has_the_step_of_megatrons_optimizer(name: str, tmp_path: Path) -> None:
    case, words = mcore_case(name), [*TO, "--names", FAMILIES[name], "--optimizer", "keep", "--verify"]
    done("convert", case.root, tmp_path / "out", *words)
    found = held(tmp_path / "out")
    moments = {each for each in found if each.endswith(".exp_avg")}
    of_steps = {each: found[each] for each in found if each.endswith(".step")}
    assert of_steps.keys() == {f"{each[: -len('exp_avg')]}step" for each in moments} != set()
    expected = np.float32(case.expected["optimizer"]["step"])
    assert {(each.dtype, each.shape, each.item()) for each in of_steps.values()} == {(expected.dtype, (), expected)}
    done("verify", tmp_path / "out", "--src", case.root)


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
@pytest.mark.parametrize("dtype", ["Int32", "Int64"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_step_of_mindformers_becomes_that_of_each_parameter(
    shape: tuple[int, ...], dtype: str, form: str, tmp_path: Path
) -> None:
    src = trained(tmp_path / "src", global_step=scalar(1000, dtype, shape))
    done("convert", src, tmp_path / "out", "--to", form, "--shards", 3, "--verify")
    found = held(tmp_path / "out")
    assert found[STEP].tobytes() == np.float32(1000).tobytes() and found[STEP].shape == ()
    assert found["global_step"].item() == 1000


def test_a_step_lies_where_the_strategy_has_the_moments(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", global_step=scalar(7), other=value("o", (4,)))
    cut, names = layout([2], [0, -1]), ("w", "adam_m.w", "adam_v.w")
    stages = [{"other": layout([2], [0])}, dict.fromkeys(names, cut)]
    path = write_strategy(tmp_path / "strategy", [{"devices": 2, "layouts": each} for each in stages])
    words: list[Argument] = ["--to", "dcp", "--dst-strategy", path, "--verify"]
    done("convert", src, tmp_path / "out", *words)
    assert held(tmp_path / "out")[STEP] == 7
    # A strategy lists no steps, and those of a trainer stay.
    done("convert", tmp_path / "out", tmp_path / "again", *words)
    assert held(tmp_path / "again")[STEP] == 7


def test_a_step_is_taken_from_metadata_of_the_training(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", global_step=scalar(7))
    done("convert", src, tmp_path / "between", "--to", "checkpoint2", "--dst-strategy", "none")
    words: list[Argument] = [*TO, "--exclude", "global_step", "--verify"]
    done("convert", tmp_path / "between", tmp_path / "out", *words)
    assert held(tmp_path / "out")[STEP] == 7


def test_moments_without_a_step_are_an_error(tmp_path: Path) -> None:
    words: list[Argument] = ["convert", trained(tmp_path / "src"), tmp_path / "out", *TO]
    fails(3, *words, texts=["global_step", "--exclude 'optimizer.*'"])
    assert not (tmp_path / "out").exists()
    done(*words, "--exclude", "optimizer.*", "--verify")
    assert held(tmp_path / "out").keys() == {"model.w"}


def test_steps_of_torch_stay_where_rules_change_names(tmp_path: Path) -> None:
    """Rules may join parameters, so all have to be at one step."""
    table = tmp_path / "table.toml"
    table.write_text('[[rule]]\nfrom = "layers.{i}.w"\nto = "blocks.{i}.w"\n')
    words: list[Argument] = [*TO, "--names", table, "--optimizer", "keep", "--verify"]
    done("convert", saved_by_torch(tmp_path / "same", [9, 9]), tmp_path / "out", *words)
    found = held(tmp_path / "out")
    assert {name: found[name].item() for name in found if name.endswith(".step")} == {
        f"optimizer.state.blocks.{number}.w.step": 9.0 for number in range(2)
    }
    fails(3, "convert", saved_by_torch(tmp_path / "other", [9, 8]), tmp_path / "no", *words, texts=["layers.1.w.step"])


@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
def test_masters_become_weights_that_are_cast_to_their_type(form: str, tmp_path: Path) -> None:
    words: list[Argument] = ["--to", form, "--shards", 2, *KEPT[4:]]
    source = mcore_case("td_dense_plain").root
    result = done("convert", source, tmp_path / "rounded", *words)
    assert "21 weights" in result.err and "--cast Float32" in result.err
    done("convert", source, tmp_path / "out", *words, "--cast", "Float32")
    rounded, found = held(tmp_path / "rounded"), held(tmp_path / "out")
    start, before, end = ("model.", "optimizer.state.", ".fp32_param") if form == "dcp" else ("", "main_param.", "")
    of_masters = {
        name[len(before) : len(name) - len(end)]: rounded.pop(name)
        for name in {*rounded}
        if name.startswith(before) and name.endswith(end)
    }
    assert len(of_masters) == 21 and found.keys() == rounded.keys()
    for name, master in of_masters.items():
        assert found[start + name].tobytes() == master.tobytes()
        assert found[start + name].tobytes() != rounded[start + name].astype("f4").tobytes()


def test_only_weights_that_are_cast_become_masters(tmp_path: Path) -> None:
    """Float32 weights among them, which another conversion may have made of rounded ones."""
    more = {name: value(name, (4, 2), "BFloat16" if name == "v" else "Float32") for name in ("v", "main_param.v")}
    more |= {name: value(name, (4, 2)) for name in ("u", "main_param.u")}
    src = trained(tmp_path / "src", global_step=scalar(7), **more)
    result = done("convert", src, tmp_path / "out", *TO, "--cast", "model.[uw]=Float32", "--verify")
    assert "2 weights in Float32" in result.err and "1 weight rounded" in result.err
    found = held(tmp_path / "out")
    assert found["model.w"].tobytes() == value("p", (4, 2)).array.tobytes()
    assert found["model.u"].tobytes() == more["main_param.u"].array.tobytes()
    assert found["model.v"].tobytes() == more["v"].array.tobytes()
    assert {name for name in found if name.endswith("fp32_param")} == {"optimizer.state.v.fp32_param"}


def test_a_wrong_step_and_a_rounded_weight_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, words = mcore_case("td_dense_plain").root, [*KEPT[:-1], "--cast", "Float32"]
    with monkeypatch.context() as patch:
        patch.setattr(steps, "step_of", lambda checkpoint, handles: 100)
        done("convert", source, tmp_path / "step", *words)
    with monkeypatch.context() as patch:
        patch.setattr(editing, "as_weights", lambda base, recipes, *others: recipes)
        done("convert", source, tmp_path / "rounded", *words)
    for place, name in (("step", "lm_head.weight.step"), ("rounded", "model.lm_head.weight")):
        verified = run("verify", tmp_path / place, "--src", source)
        assert verified.status == 4 and name in verified.out + verified.err
