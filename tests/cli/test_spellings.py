"""Other spellings of types, sizes, forms and steps; errors name the cause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.asking import open_checkpoint
from tests.running import Argument, done, fails
from tests.small import World, tensors


@pytest.mark.parametrize(
    ("spelled", "dtype"),
    [
        ("bf16", "BFloat16"),
        ("torch.bfloat16", "BFloat16"),
        ("half", "Float16"),
        ("mstype.float16", "Float16"),
        ("fp32", "Float32"),
        ("float", "Float32"),
    ],
)
def test_cast_accepts_other_spellings_of_dtypes(spelled: str, dtype: str, plain: World) -> None:
    plain.save(tensors())
    with open_checkpoint(plain.src, src_strategy=plain.old, cast=f"w={spelled}") as opened:
        assert opened["w"].dtype_name == dtype
    report = done("get", plain.src, "w", "--strategy", plain.old, "--cast", f"w={spelled}", "--json").json
    assert report[0]["dtype"] == dtype


@pytest.mark.parametrize("spelled", ["fp8", "int8", "float64", "torch"])
def test_an_unknown_cast_dtype_is_refused(spelled: str, plain: World) -> None:
    plain.save(tensors())
    fails(2, "stats", plain.src, "--strategy", plain.old, "--cast", spelled, texts=["no type to cast to"])


@pytest.mark.parametrize("command", ["convert", "get", "fingerprint"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model_00-model_00.pt"])
def test_a_directory_of_pytorch_files_requires_no_strategy(command: str, name: str, tmp_path: Path) -> None:
    src = tmp_path / "torch"
    src.mkdir()
    (src / "config.json").write_text("{}")
    (src / name).write_bytes(b"x")
    words: dict[str, list[Argument]] = {"convert": [tmp_path / "out", "--to", "hf"], "get": ["w"], "fingerprint": []}
    fails(3, command, src, *words[command], texts=[f"holds PyTorch files ({name})", "safe_serialization=True"])


@pytest.mark.parametrize("command", ["convert", "get", "inspect"])
def test_a_directory_of_an_adapter_points_to_merge_lora(command: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.a.lora_A.weight": np.ones((2, 3), "f4")}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    words: dict[str, list[Argument]] = {"convert": [tmp_path / "out", "--to", "hf"], "get": ["a"]}
    file = adapter / "adapter_model.safetensors"
    texts = ["is an adapter that PEFT saved", f"reshard merge-lora BASE {adapter} OUT", f"give its file: {file}"]
    fails(3, command, adapter, *words.get(command, []), texts=texts)


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("--dtype=bf16", ["--cast"]),
        ("--precision=bf16", ["--cast"]),
        ("--num-workers=4", ["--jobs"]),
        ("--tp=4", ["strategy make", "--sizes"]),
        ("--target-tp=4", ["strategy make", "--sizes"]),
        ("--output=x", ["reshard convert SRC DST"]),
        ("--src_ckpt_strategy=x", ["Use --src-strategy"]),
        ("--dst_ckpt_strategy=None", ["Use --dst-strategy"]),
        ("--src_ckpt_dir=x", ["SRC", "reshard convert SRC DST"]),
        ("--dst_ckpt_dir=x", ["DST", "reshard convert SRC DST"]),
        ("--prefx=x", ["--prefix"]),
        ("--to=fsdp", ["--to dcp"]),
        ("--to=pytorch", ["--to dcp"]),
        ("--to=mindspore", ["--to ranks"]),
        ("--to=mindformers", ["--to ranks"]),
        ("--to=torch_dist", ["--to megatron"]),
        ("--to=verl", ["only be read"]),
        ("--dst-strategy=4", ["strategy derive", "--shards"]),
        ("--dst-strategy=tp=4", ["strategy derive", "--shards"]),
        ("--dst-strategy=auto", ["strategy derive", "--shards"]),
        ("--to=HuggingFace", ["--to huggingface"]),
        ("--to=hugging_face", ["--to huggingface"]),
        ("--to=DCP", ["--to dcp"]),
        ("--threads=2", ["--jobs"]),
        ("--in=x", ["SRC"]),
        ("--no-optimizer", ["--exclude 'adam_*'"]),
        ("--weights-only", ["--exclude 'adam_*'"]),
        ("--force", ["--overwrite"]),
        ("--validate", ["--verify"]),
        ("--check", ["Use --verify"]),
        ("--epoch=3", ["--step"]),
        ("--devices=8", ["reshard suggest SRC --devices", "--sizes"]),
        ("--tokenizer=x", ["--config"]),
        ("--mem=8", ["--max-memory"]),
        ("--html", ["view", "-o"]),
        ("--max-shard-size=5", ["5GB"]),
        ("--max-memory=8", ["8G"]),
    ],
)
def test_words_of_other_tools_are_answered_with_what_to_type(option: str, texts: list[str], plain: World) -> None:
    plain.save(tensors())
    words: list[Argument] = [plain.src, plain.root / "out", "--src-strategy", plain.old, option]
    fails(3 if option.startswith("--dst-strategy") else 2, "convert", *words, texts=texts)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["verify", "out", "src"], ["--src src"]),
        (["convert", "a", "b", "--names", "qwen3", "gate_up=halves"], ["--names qwen3,gate_up=halves"]),
        (["view", "a", "out.html"], ["-o out.html"]),
        (["view", "a", "b", "out.html"], ["-o out.html"]),
        (["convert", "a", "b", "--to", "hf", "--shards", 4], ["--max-shard-size SIZE"]),
        (["compare"], ["reshard diff"]),
        (["check"], ["reshard verify"]),
        (["ls"], ["reshard inspect"]),
        (["cat"], ["reshard get"]),
        (["help"], ["--help"]),
        (["export"], ["--to huggingface"]),
    ],
)
def test_arguments_in_another_place_are_answered_with_what_to_type(words: list[Argument], texts: list[str]) -> None:
    fails(2, *words, texts=texts)


@pytest.mark.parametrize(
    ("status", "words", "texts"),
    [
        (2, ["--cast", "*.bias:bf16"], ["--cast 'GLOB=TYPE'"]),
        (2, ["--cast", "bf16=*.bias"], ["--cast 'GLOB=TYPE'"]),
        (2, ["--shards", "two"], ["a whole number"]),
        (2, ["--rename", "model.*="], ["--rename 'model.*=*'"]),
        (3, ["--names", "mcore"], ["strategy make", "qwen3"]),
        (3, ["--names", "hf"], ["--to huggingface"]),
    ],
)
def test_values_of_another_kind_are_answered_with_what_to_type(
    status: int, words: list[Argument], texts: list[str], plain: World
) -> None:
    plain.save(tensors())
    fails(status, "plan", plain.src, plain.root / "o", "--src-strategy", plain.old, "--to", "hf", *words, texts=texts)


def test_a_model_that_is_not_there_is_to_be_downloaded(tmp_path: Path) -> None:
    for command, words in (("inspect", []), ("convert", [str(tmp_path / "out"), "--to", "hf"])):
        fails(3, command, "Qwen/Qwen3-8B", *words, texts=["download", "Qwen/Qwen3-8B"])


@pytest.mark.parametrize("command", ["inspect", "stats", "fingerprint", "get", "diff", "view", "suggest"])
def test_a_strategy_in_the_place_of_a_checkpoint_is_named(command: str, plain: World) -> None:
    more: dict[str, list[Argument]] = {"get": ["w"], "diff": [plain.old], "view": ["-o", plain.root / "a.html"]}
    fails(3, command, plain.old, *more.get(command, []), texts=["strategy show", "strategy diff"])
    assert not (plain.root / "a.html").exists()


@pytest.mark.parametrize("option", ["--foobarbaz", "--xyzzy"])
def test_an_option_that_is_near_to_none_suggests_none(option: str, plain: World) -> None:
    assert "mean" not in fails(2, "convert", plain.src, plain.root / "out", option, texts=[option]).err


def test_strategies_as_arguments_are_answered_with_their_options(plain: World) -> None:
    words: list[Argument] = [plain.src, plain.root / "out", plain.old, plain.new]
    fails(2, "convert", *words, texts=[plain.old, "--src-strategy", "--dst-strategy"])
    fails(2, "replicas", plain.old, texts=[f"reshard replicas --strategy {plain.old}"])
    plain.save(tensors())
    fails(2, "replicas", plain.src, texts=["replicas --strategy FILE", f"verify {plain.src} --replicas"])
    fails(2, "merge", plain.src, texts=["--dst-strategy none"])


def test_a_file_system_without_files_is_no_target(plain: World) -> None:
    plain.save(tensors())
    words: list[Argument] = ["--src-strategy", plain.old, "--dst-strategy", plain.new]
    assert "again" not in fails(3, "convert", plain.src, "/proc/reshard", *words, texts=["/proc/reshard"]).err


def test_an_empty_directory_is_reported_before_a_missing_strategy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(3, "convert", tmp_path / "empty", tmp_path / "out", texts=["empty directory", "Hugging Face"])


@pytest.mark.parametrize(
    ("tool", "files"),
    [
        ("Orbax", ["_CHECKPOINT_METADATA", "d/0"]),
        ("Orbax", ["100/_CHECKPOINT_METADATA", "100/default/manifest.ocdbt"]),
        ("Orbax", ["ocdbt.process_0/manifest.ocdbt"]),
        ("DeepSpeed", ["latest", "zero_to_fp32.py", "global_step9/mp_rank_00_model_states.pt"]),
        ("DeepSpeed", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
        ("Megatron", ["model_optim_rng.pt"]),
        ("vLLM", ["config.json", "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"]),
        ("TensorRT-LLM", ["config.json", "rank0.safetensors", "rank1.safetensors"]),
        ("TensorRT-LLM", ["config.json", "rank0.engine"]),
        ("GGUF", ["llama-q4_0.gguf"]),
        ("ONNX", ["config.json", "model.onnx", "model.onnx_data"]),
        ("NeMo", ["model.nemo"]),
        ("TensorFlow", ["saved_model.pb", "variables/variables.index"]),
        ("TensorFlow", ["checkpoint", "model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"]),
        ("NumPy", ["weights.npz"]),
        ("zarr", [".zarray", "0.0"]),
    ],
)
def test_checkpoints_of_other_tools_are_named(tool: str, files: list[str], tmp_path: Path) -> None:
    src = tmp_path / "other"
    for file in files:
        (src / file).parent.mkdir(parents=True, exist_ok=True)
        (src / file).write_text("100")
    fails(3, "convert", src, tmp_path / "out", "--to", "hf", texts=[src, tool])


@pytest.mark.parametrize("step", [41, "41", np.int64(41)])
def test_step_accepts_the_number_of_an_iteration(step: str | int, plain: World) -> None:
    plain.save(tensors())
    root = plain.root / "root"
    done("convert", plain.src, root, "--src-strategy", plain.old, "--to", "checkpoint2", "--dst-strategy", "same")
    with open_checkpoint(root, step=step) as opened:
        assert opened.step == "41" and "w" in opened
