"""--dequantize: quantised weights are written as numbers in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as package
from reshard.quantised import decoding, values
from tests.asking import open_checkpoint
from tests.checkpoint_writing import Parts, write_safetensors
from tests.layouts import examples, strategies
from tests.quantised.models import E2M1, SCHEMES, Coded, coded, others, write_model
from tests.reference import slices
from tests.running import Argument, done, fails, reshard, warns
from tests.trees import (
    Value,
    arrays,
    layout,
    read_checkpoint,
    read_tree,
    safetensors_bytes,
    same_checkpoints,
    same_ranks,
    write_strategy,
)


def expected(quantised: list[Coded], dtype: str = "BFloat16") -> dict[str, Value]:
    """The dequantised values of a model; other tensors unchanged."""
    plain = {
        name: Value(preserved, np.frombuffer(content, f"u{len(content) // shape[0]}").reshape(shape))
        for name, (preserved, shape, content) in others().items()
    }
    return {**plain, **{each.name: each.as_type(dtype) for each in quantised}}


def test_a_cast_of_quantised_weights_suggests_dequantize(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "fp8 blocks")
    hint = "--dequantize BFloat16"
    fails(3, "convert", tmp_path / "src", tmp_path / "out", "--cast", "BFloat16", texts=["cannot be cast", hint])


@pytest.mark.deep
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["BFloat16", "Float16", "Float32"])
def test_a_directory_is_dequantised_to_the_given_dtype(tmp_path: Path, scheme: str, dtype: str) -> None:
    quantised = write_model(tmp_path / "src", scheme)

    done("convert", tmp_path / "src", tmp_path / "out", "--dequantize", dtype, "--verify")

    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected(quantised, dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("scheme", SCHEMES)
def test_little_memory_gives_the_same_elements(tmp_path: Path, scheme: str) -> None:
    quantised = write_model(tmp_path / "src", scheme)

    done("convert", tmp_path / "src", tmp_path / "out", "--dequantize", "BFloat16", "--max-memory", "16K")

    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected(quantised))


@pytest.mark.deep
@pytest.mark.parametrize("scheme", ["fp8 blocks", "int8 groups with zero points", "mxfp4"])
@pytest.mark.parametrize("form", ["dcp", "hf-sharded", "hyper-parallel"])
def test_the_state_of_a_trainer_is_dequantised_under_the_names_of_the_model(
    tmp_path: Path, scheme: str, form: str
) -> None:
    quantised = write_model(tmp_path / "src", scheme)
    to_form: list[Argument] = ["--to", form, "--shards", 2]
    dequantised: list[Argument] = ["--dequantize", "BFloat16", "--config", tmp_path / "src" / "config.json"]
    done("convert", tmp_path / "src", tmp_path / "codes", *to_form)

    done("convert", tmp_path / "codes", tmp_path / "out", "--to", "huggingface", *dequantised, "--verify")
    done("convert", tmp_path / "codes", tmp_path / "numbers", *to_form, *dequantised, "--verify")
    done("convert", tmp_path / "numbers", tmp_path / "back", "--to", "huggingface", "--verify")

    for result in ("out", "back"):
        (written,) = (tmp_path / result).glob("*.safetensors")
        same_checkpoints(read_checkpoint(written), expected(quantised))


@pytest.mark.deep
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype, cast", [("BFloat16", "Float32"), ("Float16", "BFloat16"), ("Float32", "Float16")])
def test_elements_are_rounded_once_to_the_type_of_a_cast(tmp_path: Path, scheme: str, dtype: str, cast: str) -> None:
    quantised = write_model(tmp_path / "src", scheme)
    chosen = quantised[0].name
    words = ["--dequantize", dtype, "--cast", f"{chosen}={cast}", "--verify"]

    done("convert", tmp_path / "src", tmp_path / "out", *words)

    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(
        read_checkpoint(written), {**expected(quantised, dtype), chosen: expected(quantised, cast)[chosen]}
    )


@pytest.mark.deep
@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@examples(30)
def test_every_rank_of_any_layout_gets_its_slices(scheme: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        tmp_path = Path(directory)
        whole = expected(write_model(tmp_path / "src", scheme, data.draw(st.booleans())))
        strategy = data.draw(strategies(whole))
        path = write_strategy(tmp_path / "strategy", strategy, {name: each.array.shape for name, each in whole.items()})
        memory = data.draw(st.sampled_from(["1MiB", "64MiB"]))

        done(
            "convert",
            tmp_path / "src",
            tmp_path / "out",
            "--dst-strategy",
            path,
            "--dequantize",
            "bf16",
            "--max-memory",
            memory,
        )

        parts = slices(strategy, arrays(whole))
        cut = {
            rank: {name: Value(whole[name].dtype, part) for name, part in tensors.items()}
            for rank, tensors in parts.items()
        }
        same_ranks(read_tree(tmp_path / "out"), cut)


def test_sliced_codes_and_scales_are_dequantised(tmp_path: Path) -> None:
    quantised = write_model(tmp_path / "src", "fp8 blocks")
    stored = {name: parts for each in quantised for name, parts in each.stored.items()}
    layouts = {
        name: layout([2], [-1 if parts[1][0] % 2 else 0, *[-1] * (len(parts[1]) - 1)])
        for name, parts in {**stored, **others()}.items()
    }
    path = write_strategy(tmp_path / "strategy", [{"devices": 2, "layouts": layouts}])
    ranks = tmp_path / "ranks"
    done("convert", tmp_path / "src", ranks, "--dst-strategy", path, "--format", "safetensors")

    done(
        "convert",
        ranks,
        tmp_path / "out",
        "--src-strategy",
        path,
        "--to",
        "huggingface",
        "--dequantize",
        "bf16",
        "--config",
        tmp_path / "src",
    )

    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected(quantised))


def test_blocks_in_ranks_are_dequantised(tmp_path: Path) -> None:
    (quantised,) = write_model(tmp_path / "src", "mxfp4")
    layouts = {
        name: layout([2], [0, *[-1] * (len(shape) - 1)])
        for name, (_, shape, _) in {**quantised.stored, **others()}.items()
    }
    path = write_strategy(tmp_path / "strategy", [{"devices": 2, "layouts": layouts}])
    ranks = tmp_path / "ranks"
    done("convert", tmp_path / "src", ranks, "--dst-strategy", path, "--format", "safetensors")
    command = ("convert", ranks, tmp_path / "out", "--src-strategy", path, "--to", "huggingface", "--verify")
    done(*command, "--dequantize", "bf16", "--config", tmp_path / "src")
    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected([quantised]))


def test_a_target_strategy_of_codes_is_refused(tmp_path: Path) -> None:
    """Dequantised tensors have other names than their codes in MXFP4: a strategy that lists codes would skip them."""
    codes = coded(("e.up", "e.up_blocks", "e.up_scales"), E2M1, (4, 64), (1, 32), "UInt8", (), "UInt8", (4, 2, 16))
    stored = {**codes.stored, **others()}
    write_safetensors(tmp_path / "src" / "model.safetensors", stored)
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "src" / "config.json").write_text(json.dumps(settings))
    layouts = {name: layout([2], [0, *[-1] * (len(shape) - 1)]) for name, (_, shape, _) in stored.items()}
    path = write_strategy(tmp_path / "strategy", [{"devices": 2, "layouts": layouts}])
    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--dequantize", "bf16"]
    fails(3, *words, "--dst-strategy", path, texts=["lists 'e.up_blocks'", "--dequantize names it 'e.up'"])

    done("convert", tmp_path / "src", tmp_path / "shards", "--dst-strategy", path, "--to", "hf-sharded")
    words[1:2] = [tmp_path / "shards", "--to", "hf-sharded"]
    fails(3, *words, "--dst-strategy", "same", texts=["no layouts for packed tensors: 'e.up'"])


@pytest.mark.parametrize("scheme", ["fp8 tensors", "fp8 channels"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("listing", [True, False])
def test_replicated_scales_must_agree_in_all_files(tmp_path: Path, scheme: str, alike: bool, listing: bool) -> None:
    """Each rank may have quantised its own slice."""
    quantised = write_model(tmp_path / "src", scheme)
    first = {name: parts for each in quantised for name, parts in each.stored.items()}
    codes = {each.name: first[each.name] for each in quantised}
    scales = {name: parts for name, parts in first.items() if name not in codes}
    for rank in range(2):
        half = {
            name: (dtype, [shape[0], shape[1] // 2], np.split(np.frombuffer(data, "u1").reshape(shape), 2, 1)[rank])
            for name, (dtype, shape, data) in codes.items()
        }
        other = {name: (dtype, shape, data[::-1]) for name, (dtype, shape, data) in scales.items()}
        contents = scales if alike or not rank else other
        cut = {name: (dtype, shape, part.tobytes()) for name, (dtype, shape, part) in half.items()}
        (tmp_path / f"ranks/rank_{rank}").mkdir(parents=True)
        write_safetensors(tmp_path / f"ranks/rank_{rank}/checkpoint_{rank}.safetensors", {**cut, **contents})
    layouts = {name: layout([2], [-1, 0]) for name in codes}
    if listing:
        layouts |= {name: layout([2], [-1] * len(shape)) for name, (_, shape, _) in scales.items()}
    path = write_strategy(tmp_path / "strategy", [{"devices": 2, "layouts": layouts}])
    command = ("convert", tmp_path / "ranks", tmp_path / "out", "--src-strategy", path, "--to", "huggingface")
    options = ("--dequantize", "bf16", "--config", tmp_path / "src")

    if not alike:
        texts = "differs between rank 0 and rank 1" if listing else "strategy does not list it"
        fails(3, *command, *options, texts=["_scale", "differs", "rank_0", "rank_1", texts])
        return
    done(*command, *options, "--verify")
    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), {each.name: each.as_type("BFloat16") for each in quantised})


def test_open_returns_dequantised_tensors(tmp_path: Path) -> None:
    quantised = write_model(tmp_path / "src", "fp8 blocks")

    with open_checkpoint(tmp_path / "src", dequantize="Float32") as checkpoint:
        assert set(checkpoint) == expected(quantised).keys()
        for each in quantised:
            np.testing.assert_array_equal(np.asarray(checkpoint[each.name]), each.values)
            np.testing.assert_array_equal(checkpoint[each.name][1:3, 2:5], each.values[1:3, 2:5])


@pytest.mark.parametrize(
    ("scale", "texts"), [(0.0, "is 0.0"), (float("nan"), "is nan"), (float("inf"), "is inf"), (-1.0, "is -1.0")]
)
def test_a_scale_that_is_not_positive_is_an_error(tmp_path: Path, scale: float, texts: str) -> None:
    write_model(tmp_path / "src", "fp8 blocks")
    path = tmp_path / "src" / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])["a.weight_scale_inv"]["data_offsets"]
    at = 8 + length + begin + 4 * 4
    data[at : at + 4] = np.float32(scale).tobytes()
    path.write_bytes(data)

    fails(
        3,
        "convert",
        tmp_path / "src",
        tmp_path / "out",
        "--to",
        "huggingface",
        "--dequantize",
        "bf16",
        texts=[f"{path}: the scale 'a.weight_scale_inv' at [1, 1]", texts, "'a.weight' cannot be dequantised"],
    )


@pytest.mark.parametrize("top", [False, True])
def test_the_configuration_of_the_language_model_of_a_multimodal_one_counts(tmp_path: Path, top: bool) -> None:
    quantised = write_model(tmp_path / "src", "fp8 blocks")
    place = tmp_path / "src" / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps({**(config if top else {}), "text_config": config, "vision_config": {"depth": 2}}))

    done("convert", tmp_path / "src", tmp_path / "out", "--dequantize", "Float16", "--verify")
    done("verify", tmp_path / "out", "--src", tmp_path / "src")

    (written,) = (tmp_path / "out").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected(quantised, "Float16"))
    rest = {"model_type": "tiny", "torch_dtype": "bfloat16"}
    parts = {"text_config": rest, "vision_config": {"depth": 2}}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**(rest if top else {}), **parts}


def test_zero_points_that_are_listed_must_be_there(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "int8 channels")
    place = tmp_path / "src" / "config.json"
    config = json.loads(place.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    place.write_text(json.dumps(config))

    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--dequantize", "bf16"]
    fails(3, *words, texts=["'a.weight'", "zero points"])
    assert not (tmp_path / "out").exists()


def test_a_missing_scale_is_an_error_that_names_the_file_of_its_weight(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "fp8 blocks")
    files = {path: read_checkpoint(path) for path in (tmp_path / "src").glob("*.safetensors")}
    (scales,) = (path for path, tensors in files.items() if "a.weight_scale_inv" in tensors)
    (codes,) = (path for path, tensors in files.items() if "a.weight" in tensors)
    without = {name: value for name, value in files[scales].items() if name != "a.weight_scale_inv"}
    scales.write_bytes(safetensors_bytes(without))
    index = tmp_path / "src" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["a.weight_scale_inv"]
    index.write_text(json.dumps(content))

    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface"]
    fails(
        3, *words, "--dequantize", "bf16", texts=[f"{codes}: 'a.weight' is Float8E4M3FN", "no tensor holds its scales"]
    )


@pytest.mark.parametrize("own", [False, True])
def test_a_configuration_of_codes_is_not_copied_beside_numbers(tmp_path: Path, own: bool) -> None:
    """That of the published model is passed for weights that were trained from it."""
    quantised = write_model(tmp_path / "src", "fp8 blocks")
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "dcp", "--shards", 2, "--dequantize", "BFloat16")
    for name in ("quant_model_description.json", "hf_quant_config.json"):
        (tmp_path / "src" / name).write_text("{}")
    words: list[Argument] = ["convert", tmp_path / "out", tmp_path / "back", "--to", "huggingface", "--verify"]
    config = tmp_path / "src" / ("" if own else "config.json")

    warns(done(*words, "--config", config), "quantization_config left out", "not quantised")

    (written,) = (tmp_path / "back").glob("*.safetensors")
    same_checkpoints(read_checkpoint(written), expected(quantised))
    rest = {"model_type": "tiny", "torch_dtype": "bfloat16"}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == rest
    assert not [*(tmp_path / "back").glob("*quant*")]

    wrong = (tmp_path / "src" / "config.json").read_bytes()
    (tmp_path / "back" / "config.json").write_bytes(wrong)
    done("convert", tmp_path / "back", tmp_path / "again", "--to", "huggingface")
    assert "differs" not in done("verify", tmp_path / "again", "--src", tmp_path / "back").err
    (tmp_path / "again" / "config.json").write_bytes(wrong)
    warns(done("verify", tmp_path / "again", "--src", tmp_path / "back"), "differs from the file", "config.json")


def test_a_description_of_codes_is_not_copied_beside_dequantised_weights(tmp_path: Path) -> None:
    codes = coded(("a.weight", "a.weight", "a.weight_scale", "a.weight_offset"), "Int8", (6, 8), (1, 8), offset="Int8")
    write_safetensors(tmp_path / "src" / "model.safetensors", codes.stored)
    (tmp_path / "src" / "config.json").write_text("{}")
    description = tmp_path / "src" / "quant_model_description.json"
    description.write_text(json.dumps(dict.fromkeys(codes.stored, "W8A8_DYNAMIC")))

    done("convert", tmp_path / "src", tmp_path / "out", "--dequantize", "BFloat16", "--verify")
    done("convert", tmp_path / "src", tmp_path / "codes", "--to", "huggingface", "--verify")

    assert not (tmp_path / "out" / description.name).exists()
    assert (tmp_path / "codes" / description.name).read_bytes() == description.read_bytes()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_that_pass_through_another_form_keep_their_configuration(tmp_path: Path, scheme: str) -> None:
    write_model(tmp_path / "src", scheme)
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "hf-sharded", "--shards", 2)
    back: list[Argument] = ["convert", tmp_path / "out", tmp_path / "back", "--to", "huggingface", "--verify"]
    done(*back, "--config", tmp_path / "src")
    assert (tmp_path / "back/config.json").read_bytes() == (tmp_path / "src/config.json").read_bytes()


def test_without_the_option_codes_and_scales_are_copied(tmp_path: Path) -> None:
    quantised = write_model(tmp_path / "src", "fp8 blocks")

    done("convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface")

    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())
    with package.open(tmp_path / "out") as copied:
        assert {name for each in quantised for name in each.stored} <= set(copied)


def test_a_source_without_quantised_tensors_gives_a_warning(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "fp8 blocks")
    done("convert", tmp_path / "src", tmp_path / "plain", "--to", "huggingface", "--dequantize", "bf16")

    warns(
        done("convert", tmp_path / "plain", tmp_path / "out", "--to", "huggingface", "--dequantize", "bf16"),
        "no tensor of the source is quantised",
    )


@pytest.mark.deep
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_reading_command_dequantises_alike(tmp_path: Path, scheme: str) -> None:
    quantised = write_model(tmp_path / "src", scheme)
    edits = ("--dequantize", "BFloat16")
    done("by-rank", "0", tmp_path / "src", tmp_path / "out", "--to", "huggingface", *edits)

    done("diff", tmp_path / "src", tmp_path / "out", *edits)
    warns(done("verify", tmp_path / "out", "--src", tmp_path / "src"), "no differences")
    prints = [
        done("fingerprint", tmp_path / path, "--json", *words).json["fingerprint"]
        for path, words in (("src", edits), ("out", ()))
    ]
    assert prints[0] == prints[1]
    rows = done("stats", tmp_path / "src", "--json", *edits).json["tensors"]
    assert {each.name for each in quantised} <= {row["name"] for row in rows}
    planned = done("plan", tmp_path / "src", tmp_path / "other", "--to", "huggingface", "--json", *edits).json
    sizes = {
        path: sum(file.stat().st_size for file in (tmp_path / path).glob("*.safetensors")) for path in ("src", "out")
    }
    assert planned["bytes_written"] == sizes["out"]
    assert 0 < planned["bytes_read"] < sizes["src"]
    assert sum(done("inspect", tmp_path / "src", "--json").json["quantised"].values()) == len(quantised)


values_of_codes = values.numbers_of
MISTAKES = {
    "fp8 blocks": ("FLOAT8", {"Float8E4M3FN": values.FLOAT8["Float8E4M3FN"]._replace(mask=0x87E00000)}),
    "mxfp4": ("numbers_of", lambda code: values_of_codes(code)[:, ::-1]),
    "packed int4 groups": ("numbers_of", lambda code: np.ascontiguousarray(values_of_codes(code)[:, ::-1])),
    "packed int8": ("numbers_of", lambda code: values_of_codes(code) + 1),
}


@pytest.mark.parametrize("scheme", MISTAKES)
def test_verify_finds_wrong_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    write_model(tmp_path / "src", scheme)
    monkeypatch.setattr(values, *MISTAKES[scheme])
    # Without the tables of other tests.
    monkeypatch.setattr(decoding, "tables_of_exponents", values.tables_of_exponents.__wrapped__)

    result = reshard(
        "convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface", "--dequantize", "bf16", "--verify"
    )

    assert result.status == 4
    warns(result, "must not be used")


def test_tables_of_names_pack_and_split_swapped_tensors(tmp_path: Path) -> None:
    """gpt-oss stores experts with their last two dimensions swapped."""
    (quantised,) = write_model(tmp_path / "src", "mxfp4")
    table = tmp_path / "table.toml"
    table.write_text(
        """
        title = "halves of experts, rows and columns"
        sides = ["a", "b"]

        [[rule]]
        from = "e.up"
        to = ["first", "second"]
        do = [{ split = 2, into = 2 }, { transpose = [1, 0, 2] }]

        [[rule]]
        from = "norm.weight"
        to = "norm"

        [[rule]]
        from = "router.bias"
        to = "bias"
        """
    )

    edits = ("--dequantize", "bf16", "--names", table, "--verify")
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface", *edits)

    written = {
        name: value
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, value in read_checkpoint(path).items()
    }
    whole = quantised.as_type("BFloat16").array
    for name, half in zip(("first", "second"), np.split(whole, 2, axis=2)):
        np.testing.assert_array_equal(written[name].array, half.transpose(1, 0, 2))


def test_codes_that_are_not_recognised_are_not_written_as_numbers(tmp_path: Path) -> None:
    quantised = write_model(tmp_path / "src", "int8 channels")
    fused: dict[str, Parts] = {
        "e.gate_up_proj": ("Int8", (2, 4, 8), bytes(64)),
        "e.gate_up_proj_scale": ("Float32", (2, 4, 1), bytes(32)),
    }
    stored = {name: parts for each in quantised for name, parts in each.stored.items()}
    done("convert", tmp_path / "src", tmp_path / "copy", "--to", "huggingface")
    write_safetensors(tmp_path / "copy" / "model.safetensors", {**stored, **fused})
    words: list[Argument] = ["convert", tmp_path / "copy", tmp_path / "out", "--dequantize", "BFloat16"]
    fails(3, *words, texts=["'e.gate_up_proj' beside 'e.gate_up_proj_scale'", "cannot dequantise this scheme"])
    assert not (tmp_path / "out").exists()
