"""strategy make for published models at the sizes of MindFormers' published configurations, from headers alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.names import models
from tests.names.models import Config, deepseek, dense, mixture
from tests.names.naive import Shapes
from tests.running import Argument, done, fails

LLAMA_8B: Config = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Fewer experts than published, whose names differ in their number only.
QWEN3_235B: Config = {**models.QWEN3_235B, "num_experts": 8}
DEEPSEEK_V3: Config = {**models.DEEPSEEK_V3, "n_routed_experts": 8}
# Of pretrain_deepseek3_671b.yaml; the layers are in two rounds of the stages.
SIZES = "dp=4,mp=8,pp=8,ep=32"
_PARALLEL: tuple[Argument, ...] = ("--sizes", SIZES, "--layers-per-stage", ",".join(["4"] * 15 + ["1"]))
DEEPSEEK_RUN: tuple[Argument, ...] = (*_PARALLEL, "--optimizer-shards", "256", "--weights-only")
SHARED = "decoder.layers.60.mlp.shared_experts"


def write_headers(directory: Path, shapes: Shapes, config: Config, quantised: bool = False) -> Path:
    """A directory with headers alone, whose elements take no place; in FP8 with scales, or in BFloat16."""
    directory.mkdir()
    entries = list(_entries(shapes, quantised))
    header, end = {}, 0
    for name, dtype, shape, size in entries:
        start, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    fp8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps({**config, **(fp8 if quantised else {})}))
    return directory


def _entries(shapes: Shapes, quantised: bool) -> Iterable[tuple[str, str, tuple[int, ...], int]]:
    for name, shape in shapes.items():
        coded = quantised and ("_proj" in name and "eh_proj" not in name) and len(shape) == 2
        yield name, "F8_E4M3" if coded else "BF16", shape, 1 if coded else 2
        if coded:
            blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
            yield f"{name}_scale_inv", "F32", blocks, 4


def maps(path: Path) -> dict[str, list[int]]:
    """The tensor map of every parameter, whatever its stage."""
    layouts = json.loads(path.read_text())["parallel_layout_item"]
    return {re.sub("^[0-9]+-", "", name): layout["tensor_map"] for name, layout in layouts.items()}


PUBLISHED: dict[str, tuple[str, str, Config, Shapes, tuple[Argument, ...]]] = {
    # finetune_llama3_1_8b.yaml, and its predict.
    "llama 3.1 8B": ("llama", "llama", LLAMA_8B, dense(LLAMA_8B), ("--sizes", "dp=8", "--set", "vocab_emb_dp=true")),
    "llama 3.1 8B, two cards": (
        *("llama", "llama", LLAMA_8B, dense(LLAMA_8B)),
        ("--sizes", "mp=2", "--set", "vocab_emb_dp=false"),
    ),
    # The sizes of pretrain_qwen3_30b_a3b_4k.yaml; 94 layers do not divide by 4.
    "qwen3 235B": (
        *("mcore", "qwen3_moe", QWEN3_235B, mixture(QWEN3_235B)),
        ("--sizes", "mp=4,pp=4,ep=4", "--layers-per-stage", "24,24,23,23", "--set", "vocab_emb_dp=true"),
    ),
    "deepseek v3": (
        *("mcore", "deepseek_v3,mla=separate", DEEPSEEK_V3, deepseek(DEEPSEEK_V3)),
        (*_PARALLEL, "--set", "vocab_emb_dp=false", "--set", "sequence_parallel=true"),
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_parameter_of_a_published_model_is_open(model: str, tmp_path: Path) -> None:
    rules, names, config, shapes, words = PUBLISHED[model]
    hf = write_headers(tmp_path / "hf", shapes, config)
    shards: list[Argument] = ["--optimizer-shards", "-1", "--weights-only"]
    done("strategy", "make", rules, tmp_path / "made.json", "--shapes", hf, "--names", names, *words, *shards)
    layouts = maps(tmp_path / "made.json")
    experts = {name for name in shapes if ".experts." in name}
    # Experts of a layer are two parameters, and q, k and v and gate and up are one in newer models.
    assert len(layouts) >= (len(shapes) - len(experts)) * 2 // 3


def test_rules_that_fit_are_named_where_others_do_not(tmp_path: Path) -> None:
    hf = write_headers(tmp_path / "hf", dense(LLAMA_8B), LLAMA_8B)
    words: list[Argument] = ["strategy", "make", "mcore", tmp_path / "made.ckpt", "--shapes", hf, "--sizes", "mp=2"]
    words.append("--weights-only")
    named = "these built-in rules have a rule for every parameter: llama"
    fails(3, *words, "--names", "llama", texts=["does not settle", named])
    fails(3, *words, texts=["does not settle", "--names TABLE"])


DEEPSEEK_WORDS: tuple[Argument, ...] = (*DEEPSEEK_RUN, "--set", "vocab_emb_dp=false")


def deepseek_words(hf: Path, out: Path, *more: Argument, names: str = "deepseek_v3,mla=separate") -> list[Argument]:
    return ["strategy", "make", "mcore", out, "--shapes", hf, "--names", names, *DEEPSEEK_WORDS, *more]


def settings(**switches: object) -> list[Argument]:
    return [word for name, value in switches.items() for word in ("--set", f"{name}={str(value).lower()}")]


@pytest.fixture(scope="module")
def deepseek_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_headers(tmp_path_factory.mktemp("deepseek") / "hf", deepseek(DEEPSEEK_V3), DEEPSEEK_V3)


def test_shared_experts_are_open_without_their_switches(deepseek_hf: Path, tmp_path: Path) -> None:
    """Releases of MindFormers and its use_seq_parallel cut them, or not: the obvious cut would be a guess."""
    texts = ["does not settle 119 parameters", "--set sequence_parallel=true or --set sequence_parallel=false"]
    fails(3, *deepseek_words(deepseek_hf, tmp_path / "made/"), texts=texts)
    words = settings(sequence_parallel=False)
    fails(
        3,
        *deepseek_words(deepseek_hf, tmp_path / "made/", *words),
        texts=["does not settle 119 parameters", "--set mindformers=1.6 or --set mindformers=later"],
    )
    texts = ["does not settle 243 parameters", "--set mla_qkv_concat=true"]
    words = deepseek_words(deepseek_hf, tmp_path / "made/", names="deepseek_v3,mla=joined")
    fails(3, *words, texts=texts)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("switches", "cut"),
    [
        ({"sequence_parallel": True}, False),
        ({"mindformers": "later"}, False),
        ({"sequence_parallel": False, "mindformers": "later"}, False),
        ({"sequence_parallel": True, "mindformers": "1.6"}, False),
        ({"sequence_parallel": False, "mindformers": "1.6"}, True),
    ],
)
def test_a_switch_settles_shared_experts(
    deepseek_hf: Path, switches: dict[str, object], cut: bool, tmp_path: Path
) -> None:
    out = tmp_path / "made.json"
    done(*deepseek_words(deepseek_hf, out, *settings(**switches)))
    made = maps(out)
    for name, dimension in ((f"{SHARED}.linear_fc1", 0), (f"{SHARED}.linear_fc2", 1), ("mtp.layers.0.eh_proj", 0)):
        tensor_map = made[f"{name}.weight"]
        assert [each == -1 for each in tensor_map] == [not (cut and each == dimension) for each in range(2)]


def test_the_projection_of_the_next_token_is_never_whole_by_guess(deepseek_hf: Path, tmp_path: Path) -> None:
    """With context parallelism, 1.6 cuts it also where it is sequence parallel."""
    words: list[Argument] = ["strategy", "make", "mcore", tmp_path / "made.json", "--shapes", deepseek_hf]
    words += ["--names", "deepseek_v3,mla=separate", "--sizes", "dp=2,cp=2,mp=4", "--weights-only"]
    words += settings(vocab_emb_dp=True, sequence_parallel=True)
    texts = ["does not settle 1 parameter:", "eh_proj", "--set mindformers=1.6 or --set mindformers=later"]
    fails(3, *words, texts=texts)
    for release, expected in (("1.6", [0, -1]), ("later", [-1, -1])):
        done(*words, "--overwrite", *settings(mindformers=release))
        assert maps(tmp_path / "made.json")["mtp.layers.0.eh_proj.weight"] == expected


def test_joined_projections_of_latent_attention_are_whole(deepseek_hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    words = settings(mindformers="later", mla_qkv_concat=True)
    done(*deepseek_words(deepseek_hf, out, *words, names="deepseek_v3,mla=joined"))
    made = maps(out)
    for name, whole in (("linear_qkv", True), ("linear_qb", False), ("linear_kvb", False)):
        tensor_map = made[f"decoder.layers.0.self_attention.{name}.weight"]
        assert tensor_map == [-1, -1] if whole else tensor_map[0] != -1


def test_a_quantised_model_has_the_strategy_of_the_model_in_bfloat16(deepseek_hf: Path, tmp_path: Path) -> None:
    quantised = write_headers(tmp_path / "fp8", deepseek(DEEPSEEK_V3), DEEPSEEK_V3, quantised=True)
    words = settings(sequence_parallel=True)
    done(*deepseek_words(deepseek_hf, tmp_path / "bf16.json", *words))
    fails(3, *deepseek_words(quantised, tmp_path / "fp8.json", *words), texts=["--dequantize BFloat16"])
    done(*deepseek_words(quantised, tmp_path / "fp8.json", *words, "--dequantize", "BFloat16"))
    assert (tmp_path / "fp8.json").read_text() == (tmp_path / "bf16.json").read_text()
    made = json.loads((tmp_path / "fp8.json.made").read_text())
    assert (made["names"], made["dequantize"]) == ("deepseek_v3,mla=separate", "BFloat16")

    (tmp_path / "rules.toml").write_text('[pipeline]\nlast = "mtp.*"\nlayers = "decoder.layers.{layer}.*"\n')
    derive: list[Argument] = ["strategy", "derive", tmp_path / "fp8.json", "--rules", tmp_path / "rules.toml"]
    derive += ["--src-sizes", SIZES, "--dst-sizes", SIZES, "--names", "deepseek_v3,mla=separate", *DEEPSEEK_RUN[2:]]
    done(*derive, tmp_path / "one.json", "--shapes", deepseek_hf)
    done(*derive, tmp_path / "two.json", "--shapes", quantised, "--dequantize", "BFloat16")
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
