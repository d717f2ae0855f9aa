"""Megatron-Core of four versions saves and loads tiny models on gloo; Hugging Face's library computes the same logits.

Every layout trains the same model (see workers/megatron.py), so a converted checkpoint is right if what its ranks hold
after loading equals what they hold after training there. `make conformance-megatron` runs these tests alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conformance import oracles
from tests.conformance.workers.megatron_model import LATENT, MODEL
from tests.conftest import LONG
from tests.corpus_mcore import McoreCase, mcore_cases
from tests.running import Argument, done
from tests.trees import read_checkpoint, same_checkpoints

pytestmark = pytest.mark.filterwarnings("default")

Layout = Mapping[str, Any]
#: Megatron of today; the newer one needs Python 3.12.
OLDER, NEWER = "0.16.1", "0.19.2"

LLAMA = {"family": "llama"}
QWEN2 = {"family": "qwen2", "groups": 2, "vocab": 42, "seed": 2}
QWEN3 = {"family": "qwen3", "groups": 2, "head_dim": 8, "seed": 3}
TIED = {"family": "qwen3", "tied": True, "hidden": 32, "ffn": 64, "seed": 4}
MOE = {"family": "qwen3_moe", "layers": 2, "experts": 4, "seed": 5}
MIXED = {**MOE, "frequency": [0, 1], "norms_in_linears": True, "seed": 6}
GROUPED = {**MOE, "grouped": True, "moe_ffn": 12, "seed": 7}
MLA = {"family": "deepseek_v3", "layers": 2, "experts": 4, "shared_ffn": 8, "frequency": [0, 1], "mtp": 1, "seed": 8}

#: What MindFormers packs as its users choose, by family.
PACKING = {
    "llama": "",
    "qwen2": "",
    "qwen3": ",gate_up=interleaved,qkv=contiguous",
    "qwen3_moe": ",gate_up=interleaved,qkv=contiguous",
    "deepseek_v3": ",gate_up=interleaved,mla=joined",
}

#: Where norms are without Transformer Engine, which MindFormers' names do not show.
LOCAL = {"experts": ",experts_norm=inside", "mla": ",attention_norm=beside,dense_norm=beside,mla_norms=beside"}
#: Strategies of MindFormers' layers, by family; the others go through whole tensors.
RULES = {"llama": "llama", "qwen2": "llama", "qwen3": "mcore", "qwen3_moe": "mcore"}


class Case(NamedTuple):
    """What one version of Megatron saves: a model on a layout, a format, and a kind of optimizer's state.

    `others` are layouts that Megatron of today loads it on.
    """

    name: str
    model: dict[str, Any]
    layout: Layout
    others: Sequence[Layout]
    optimizer: str | None = "fully_reshardable"
    version: str = OLDER
    format: str = "torch_dist"

    @property
    def family(self) -> str:
        return str(self.model["family"])

    def job(self, task: str, layout: Layout, directory: Path | None, **changes: Any) -> dict[str, Any]:
        place = str(directory) if directory else None
        words = {"do": task, "model": self.model, "layout": layout, "directory": place}
        return {**words, "optimizer": self.optimizer, "format": self.format, **changes}


TP2_PP2 = {"tp": 2, "pp": 2, "dp": 2}
OTHERS: list[Layout] = [{"tp": 4}, {"pp": 4, "dp": 2}]
CASES = [
    Case("plain", LLAMA, TP2_PP2, OTHERS, "plain"),
    Case("fully", QWEN3, TP2_PP2, [{"pp": 2, "dp": 4}], version=NEWER),
    Case("buckets", QWEN2, {"tp": 4, "dp": 2, "bucket": 700}, [{"pp": 2, "tp": 2}], "dp_reshardable", NEWER),
    Case("virtual", LLAMA, {"pp": 2, "vpp": 2, "dp": 2, "bucket": 900}, [{"tp": 2, "pp": 4}], "dp_reshardable"),
    Case("uneven", QWEN3, {"pp": 2, "first": 1, "dp": 2}, [{"tp": 2}], "dp_reshardable", NEWER),
    Case("tied", TIED, {"pp": 2, "dp": 2}, [{"tp": 2, "pp": 4}]),
    Case("experts", MOE, {"pp": 2, "ep": 2, "dp": 2}, [{"ep": 4, "dp": 4}, {"tp": 2, "ep": 2, "dp": 2}]),
    Case("experts-buckets", MIXED, {"ep": 2, "dp": 4}, [{"tp": 2, "ep": 2, "dp": 2}], "dp_reshardable", NEWER),
    Case("mla", MLA, {"ep": 2, "dp": 2}, [{"ep": 4, "dp": 4}], version=NEWER),
    Case("0.14-blocks", QWEN3, TP2_PP2, OTHERS, "fully_sharded_model_space", "0.14.0"),
    Case("0.14-grouped", GROUPED, {"tp": 2, "ep": 2, "dp": 2}, [{"pp": 2}], "fully_sharded_model_space", "0.14.0"),
    Case("0.14-gathered", LLAMA, TP2_PP2, [{"tp": 4}], "dp_zero_gather_scatter", "0.14.0"),
    Case("0.12-blocks", LLAMA, {"tp": 2, "pp": 2, "dp": 2}, [{"pp": 4}], "fully_sharded_model_space", "0.12.1"),
    Case(
        "0.12-grouped",
        GROUPED,
        {"tp": 2, "ep": 2, "dp": 2},
        [{"ep": 2, "dp": 2}],
        "fully_sharded_model_space",
        "0.12.1",
    ),
    Case("tree", QWEN3, TP2_PP2, [{"tp": 4}], "distributed", format="torch"),
    Case("tree-plain", QWEN2, {"tp": 2}, [{"pp": 2}], "plain", NEWER, "torch"),
    Case("tree-virtual", TIED, {"pp": 2, "vpp": 2, "dp": 2}, [{"tp": 2}], "distributed", NEWER, "torch"),
    Case(
        "0.12-tree",
        GROUPED,
        {"tp": 2, "pp": 2, "ep": 2, "dp": 2},
        [{"ep": 4, "dp": 4}],
        "distributed",
        "0.12.1",
        "torch",
    ),
]

#: Layouts that core 0.12.1, by which MindSpeed-LLM trains, loads written trees on.
TREES: list[tuple[str, Layout]] = [
    ("plain", {"tp": 2, "pp": 2, "dp": 2}),
    ("tree-plain", {"tp": 2, "pp": 2}),
    ("virtual", {"pp": 2, "vpp": 2}),
    ("tied", {"tp": 2, "pp": 2}),
    ("experts", {"tp": 2, "ep": 2, "dp": 2}),
    ("0.14-grouped", {"pp": 2, "ep": 2, "dp": 2}),
    ("0.12-grouped", {"tp": 2, "ep": 4, "dp": 4}),
]
STARTS = ("plain", "tied", "experts", "mla")
CORPUS = [case for case in mcore_cases("td") if case.expected["expect"] == "convert"]


def named(case: Case) -> str:
    return case.name


Saves = Callable[[Case], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The checkpoint of a case, saved once."""
    root = tmp_path_factory.mktemp("saved")

    def path_of(case: Case) -> Path:
        directory = root / case.name
        if not directory.exists():
            oracles.done(oracles.megatron(case.version, [case.job("train", case.layout, directory)]))
        return directory

    return path_of


def config_of(case: Case, directory: Path) -> Path:
    """config.json of the model for Hugging Face's library."""
    sizes = {**MODEL, **case.model}
    config: dict[str, Any] = {
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["groups"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": sizes["tied"],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}
    config.update(model_type=case.family, architectures=[f"{names[case.family]}ForCausalLM"])
    dense = [number for number, experts in enumerate(sizes["frequency"] or []) if not experts]
    if case.family == "qwen3_moe":
        config.update(
            num_experts=sizes["experts"],
            num_experts_per_tok=2,
            moe_intermediate_size=sizes["moe_ffn"],
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=dense,
        )
    if case.family == "deepseek_v3":
        config.update(
            num_key_value_heads=sizes["heads"],
            q_lora_rank=LATENT["q_lora"],
            kv_lora_rank=LATENT["kv_lora"],
            qk_nope_head_dim=LATENT["nope"],
            qk_rope_head_dim=LATENT["rope"],
            v_head_dim=LATENT["value"],
            n_routed_experts=sizes["experts"],
            num_experts_per_tok=2,
            moe_intermediate_size=sizes["moe_ffn"],
            n_shared_experts=sizes["shared_ffn"] // sizes["moe_ffn"],
            first_k_dense_replace=len(dense),
            norm_topk_prob=True,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=sizes["mtp"],
            rope_interleave=True,
        )
        del config["head_dim"]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def today(number: int = 0) -> str:
    """One of Megatron's versions of today that are here: in turns, as a test costs a loader's time, not two."""
    here = [version for version in (NEWER, OLDER) if oracles.has_megatron(version)] or [OLDER]
    return here[number % len(here)]


def check_loaded(case: Case, places: Sequence[tuple[Path, Layout]]) -> None:
    """Megatron of today holds on each layout after loading what it holds after training there."""
    changes: dict[str, Any] = {
        "model": {**case.model, "grouped": False},
        "format": "torch_dist",
        "optimizer": case.optimizer and "fully_reshardable",
    }
    for number, (place, layout) in enumerate(places, CASES.index(case)):
        jobs = [case.job("train", layout, None, **changes), case.job("start", layout, place, **changes)]
        trained, started = oracles.done(oracles.megatron(today(number), jobs))
        for rank, (wanted, got) in enumerate(zip(trained, started)):
            assert sorted(got) == sorted(wanted)
            differing = [name for name in wanted if got[name] != wanted[name]]
            assert not differing, f"rank {rank}: {len(differing)} of {len(wanted)} differ: {differing[:5]}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_megatron_resumes_anywhere(case: Case, saved: Saves, tmp_path: Path) -> None:
    source, places = saved(case), []
    for number, layout in enumerate(case.others):
        out = tmp_path / f"{number}"
        done("convert", source, out, "--to", "megatron", "--shards", 3, "--verify", *parallel(case, layout, tmp_path))
        places.append((out, layout))
    check_loaded(case, places)


def parallel(case: Case, layout: Layout, directory: Path) -> list[Argument]:
    """Megatron has an optimizer for experts only if they are parallel: what is written depends on the next run, too."""
    if not case.model.get("experts"):
        return []
    path = directory / "args.json"
    path.write_text(json.dumps({"expert_model_parallel_size": layout.get("ep", 1)}))
    return ["--args", path]


@pytest.mark.parametrize("case", [case for case in CASES if LONG or case.version != "0.14.0"], ids=named)
def test_logits_of_transformers_are_megatrons(case: Case, saved: Saves, tmp_path: Path) -> None:
    source = saved(case)
    out = tmp_path / "out"
    config = config_of(case, tmp_path)
    words: list[Argument] = ["--names", case.family, "--config", config, "--verify"]
    done("convert", source, out, "--to", "huggingface", *words)
    config_of(case, out)
    jobs: list[oracles.Job] = [
        {"do": "logits", "model": {**case.model, "grouped": False}},
        {"do": "transformers", "directory": str(out)},
    ]
    (expected,), loaded = oracles.done(oracles.megatron(today(), jobs))
    assert loaded["missing"] == []
    assert all(name.startswith(f"model.layers.{config_layers(case)}.") for name in loaded["unknown"])
    np.testing.assert_allclose(loaded["logits"], expected["logits"], rtol=0, atol=2e-5)
    assert np.std(expected["logits"]) > 0.1


def config_layers(case: Case) -> int:
    return int({**MODEL, **case.model}["layers"])


@pytest.mark.parametrize("case", [case for case in CASES if LONG or case.version in (OLDER, NEWER)], ids=named)
def test_megatron_resumes_after_mindformers(case: Case, saved: Saves, tmp_path: Path) -> None:
    """Over rank directories of MindFormers, by whose strategy each moment and master is cut."""
    source = saved(case)
    config = config_of(case, tmp_path)
    table = case.family + PACKING[case.family]
    names: list[Argument] = ["--names", table]
    words: list[Argument] = ["--config", config, "--optimizer", "keep", "--verify"]
    cut: list[Argument] = ["--to", "unified"]
    if case.family in RULES:
        strategy = tmp_path / "strategy.json"
        sizes: list[Argument] = ["--sizes", "dp=2,mp=2,pp=2", "--set", "vocab_emb_dp=false"]
        done("strategy", "make", RULES[case.family], strategy, "--shapes", source, *names, "--config", config, *sizes)
        cut = ["--dst-strategy", strategy]
    done("convert", source, tmp_path / "ranks", *cut, *names, *words)
    if case.family in RULES:
        words += ["--src-strategy", strategy]
    words += ["--names", table + LOCAL.get(case.name, ""), "--args", source]
    done("convert", tmp_path / "ranks", tmp_path / "out", "--to", "megatron", *words)
    check_loaded(case, [(tmp_path / "out", case.others[0])])


@pytest.mark.parametrize(("name", "layout"), TREES, ids=[each[0] for each in TREES])
def test_megatron_resumes_from_a_tree(name: str, layout: Layout, saved: Saves, tmp_path: Path) -> None:
    """Of .pt files, with its plain optimizer."""
    case = next(case for case in CASES if case.name == name)
    sizes = ",".join(f"{each}={layout[each]}" for each in ("tp", "pp", "ep") if each in layout)
    args = tmp_path / "args.json"
    stages = {"virtual_pipeline_model_parallel_size": layout.get("vpp"), "decoder_first_pipeline_num_layers": None}
    args.write_text(json.dumps({**stages, "num_virtual_stages_per_pipeline_rank": layout.get("vpp")}))
    words: list[Argument] = ["--to", "megatron", "--format", "torch", "--sizes", sizes, "--args", args, "--verify"]
    done("convert", saved(case), tmp_path / "tree", *words)
    changes = {"optimizer": "plain", "format": "torch"}
    jobs = [case.job("train", layout, None, **changes), case.job("start", layout, tmp_path / "tree", **changes)]
    trained, started = oracles.done(oracles.megatron("0.12.1", jobs))
    assert started == trained


def weights_of(held: Mapping[str, Any]) -> dict[str, Any]:
    states = ("param.", "exp_avg.", "exp_avg_sq.", "steps")
    return {name: digest for name, digest in held.items() if not name.startswith(states)}


@pytest.mark.parametrize("case", [case for case in CASES[:9] if LONG or case.name in STARTS], ids=named)
def test_megatron_starts_from_a_model_of_transformers(case: Case, saved: Saves, tmp_path: Path) -> None:
    """And the checkpoint that it starts from gives the model again."""
    source, config = saved(case), config_of(case, tmp_path)
    words: list[Argument] = ["--names", case.family, "--config", config]
    done("convert", source, tmp_path / "hf", "--to", "huggingface", *words)
    start: list[Argument] = ["--names", case.family + LOCAL.get(case.name, ""), "--config", config, "--args", source]
    done("convert", tmp_path / "hf", tmp_path / "start", "--to", "megatron", *start, "--verify")
    done("convert", tmp_path / "start", tmp_path / "back", "--to", "huggingface", *words, "--verify")
    for path in (tmp_path / "hf").glob("*.safetensors"):
        same_checkpoints(read_checkpoint(tmp_path / "back" / path.name), read_checkpoint(path))
    layout, jobs = case.others[0], []
    jobs.append(case.job("train", layout, None, format="torch_dist"))
    jobs.append(case.job("start", layout, tmp_path / "start", optimizer=None, format="torch_dist"))
    trained, started = oracles.done(oracles.megatron(case.version, jobs))
    assert [weights_of(rank) for rank in trained] == started


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("plain", "0.14-blocks")], ids=named)
def test_fsdp2_starts_from_megatron(case: Case, saved: Saves, tmp_path: Path) -> None:
    config = config_of(case, tmp_path / "model")
    words: list[Argument] = ["--names", case.family, "--config", config, "--cast", "Float32", "--verify"]
    done("convert", saved(case), tmp_path / "dcp", "--to", "dcp", "--shards", 3, *words)
    job = {"do": "start", "model": str(tmp_path / "model"), "directory": str(tmp_path / "dcp"), "form": "dcp"}
    (started,) = oracles.done(
        oracles.torch_checkpoints([{**job, "mesh": (1, 2, 2), "optimizer": False}], beside_megatron=True)
    )
    done("convert", saved(case), tmp_path / "hf", "--to", "huggingface", *words)
    started.pop("logits")
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = read_checkpoint(path)
    assert {name: hashlib.sha256(each.array.tobytes()).hexdigest() for name, each in tensors.items()} == started


@pytest.mark.parametrize(
    "case", [case for case in CORPUS if LONG or case.name.startswith("td14")], ids=lambda case: case.name
)
def test_megatron_reads_what_is_written_from_its_own_files(case: McoreCase, tmp_path: Path) -> None:
    done("convert", case.root, tmp_path / "out", "--to", "megatron", "--shards", 3, "--verify")
    (directory,) = (tmp_path / "out").glob("iter_*")
    ((held,),) = oracles.done(oracles.megatron(today(), [{"do": "plain", "directory": str(directory)}]))
    weights = {name: digest for name, digest in held.items() if not name.startswith("optimizer.")}
    assert weights == {name: each["sha256"] for name, each in case.expected["native"].items()}
    states = [name for name in held if name.startswith("optimizer.state.")]
    with_state = len(weights) - sum(name.endswith("expert_bias") for name in weights)
    assert len(states) == (3 * with_state if case.optimizer else 0)
