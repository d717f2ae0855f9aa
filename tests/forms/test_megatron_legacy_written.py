"""Legacy trees that are written for Megatron-Core 0.12.1 and MindSpeed-LLM: read back, and element by element."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import Archive, plain_tensor
from reshard.checkpoints.formats.pickles import PickledInstance
from reshard.forms.megatron.live_forms import order_of
from tests.corpus_mcore import McoreCase, mcore_case
from tests.forms.test_megatron_legacy import converted
from tests.forms.test_megatron_written import with_other_argument
from tests.running import Argument, done, fails


class Written(NamedTuple):
    """A case, and the sizes of the tree that it is written to."""

    case: str
    sizes: str
    optimizer: bool = True


WRITTEN = [
    Written("legacy_dense", "tp=2,pp=2"),
    Written("legacy_moe", "tp=1,pp=2,ep=4"),
    Written("legacy14_grouped", "tp=2,ep=2"),
    Written("legacy_vpp", "pp=2"),
    Written("td_tied", "tp=2,pp=2"),
    Written("td_mla_mtp", "tp=2,pp=2,ep=2", False),
]
MORE = [
    Written("legacy_dense", "tp=1,pp=1"),
    Written("legacy_moe", "tp=2,pp=2"),
    Written("legacy_vpp", "tp=2"),
    Written("legacy_plain", "tp=2"),
    Written("legacy_te_names", "tp=2,pp=2"),
    Written("td_dense_plain", "tp=2,pp=2"),
    Written("td_moe_fully", "ep=2"),
    Written("td_moe_layer_keys", "tp=2,ep=2"),
    Written("td_uneven", "pp=2", False),
]


def write(case: McoreCase, directory: Path, sizes: str, *options: Argument) -> Path:
    done(
        *("convert", case.root, directory, "--to", "megatron", "--format", "torch", "--sizes", sizes, "--verify"),
        *options,
    )
    (iteration,) = directory.glob("iter_*")
    return iteration


def arrays_in(path: Path) -> Any:
    """The contents of a file, with an array of bits for each tensor, by NumPy alone but for the pickle."""
    data = path.read_bytes()
    with FileHandles() as handles, handles.borrow(str(path)) as file:
        archive = Archive(file, 0, len(data))

        def plain(value: Any) -> Any:
            value = plain_tensor(value)
            if isinstance(value, PickledInstance) and value.name.startswith("torch._utils._rebuild"):
                elements = archive.tensor(value)
                dtype = {"BFloat16": "<u2", "Float32": "<u4", "Int64": "<i8"}[elements.dtype]
                count = int(np.prod(elements.shape, dtype=int))
                return np.frombuffer(data, dtype, count, elements.offset).reshape(elements.shape)
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items()}
            return [plain(each) for each in value] if isinstance(value, list) else value

        return plain(archive.pickled(lambda name: True))


@pytest.mark.parametrize(
    "written",
    [*WRITTEN, *(pytest.param(each, marks=pytest.mark.deep) for each in MORE)],
    ids=lambda each: f"{each.case}-{each.sizes}",
)
def test_a_written_tree_has_all_that_megatron_held(written: Written, tmp_path: Path) -> None:
    case = mcore_case(written.case)
    tree = write(case, tmp_path / "tree", written.sizes)
    names = ["--names", case.expected["names"], *(["--optimizer", "keep"] if written.optimizer else [])]
    tensors = converted(tree.parent, tmp_path / "out", *names)
    actual = {name: (each.dtype, each.array.shape, each.digest) for name, each in tensors.items()}
    expected = {
        name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
        for name, entry in case.expected["tensors"].items()
    }
    kinds = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
    for kind, before in kinds.items() if written.optimizer else ():
        for name, entry in case.expected["optimizer"]["state"][kind].items():
            expected[before + name] = (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
    assert {name: actual.get(name) for name in expected} == expected
    if written.optimizer:
        assert tensors["global_step"].array.tolist() == [case.expected["optimizer"]["step"]]


def test_interleaved_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"moe_mlp_glu_interleave_size": 8}))
    options = ["--to", "megatron", "--format", "torch", "--sizes", "tp=2", "--args", str(tmp_path / "args.json")]
    fails(3, "convert", mcore_case("td_dense_plain").root, tmp_path / "out", *options, texts=["glu_interleave_size"])


@pytest.mark.parametrize("split", [True, False])
def test_latent_attention_is_written_as_mindspeed_has_it(split: bool, tmp_path: Path) -> None:
    """Down projections joined, heads' parts apart with ``mla_mm_split``; experts dealt over tensor ranks as well."""
    case = mcore_case("td_mla_mtp")
    args = {"mla_mm_split": split, "moe_tp_extend_ep": split, "transformer_impl": "local", "moe_grouped_gemm": split}
    (tmp_path / "args.json").write_text(json.dumps(args))
    tree = write(case, tmp_path / "tree", "tp=2,pp=2", "--args", tmp_path / "args.json")
    model = arrays_in(tree / "mp_rank_01_001" / "model_optim_rng.pt")["model"]
    names = {name.rpartition("self_attention.")[2] for name in model if "decoder" in name and "_proj" in name}
    assert names == {"linear_proj.weight"} | (
        set() if split else {"linear_q_up_proj.weight", "linear_kv_up_proj.weight"}
    )
    assert "mtp.final_layernorms.0.weight" in model
    assert len([name for name in model if "decoder.layers.0.mlp.experts" in name]) == (2 if split else 4)
    tensors = converted(tree.parent, tmp_path / "out", "--names", case.expected["names"])
    expected = {name: entry["sha256"] for name, entry in case.expected["tensors"].items()}
    assert {name: tensors[name].digest for name in expected} == expected


def test_weights_and_optimizer_of_hugging_faces_names_become_a_tree(tmp_path: Path) -> None:
    """What it lacks is in --args; files are those of the run that the names came from, groups and steps included."""
    case = mcore_case("legacy_moe")
    names = ["--names", case.expected["names"], "--optimizer", "keep"]
    done("convert", case.root, tmp_path / "hf", "--to", "huggingface", *names)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(case.expected["config"]))
    args = {"transformer_impl": "local", "moe_grouped_gemm": False, "lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95}
    args |= {"adam_eps": 1e-8, "weight_decay": 0.1, "global_batch_size": 32, "train_iters": 1000}
    (tmp_path / "args.json").write_text(json.dumps(args))
    tree = [
        write(case._replace(root=root), tmp_path / place, "tp=2,ep=2", *options)
        for root, place, options in (
            (tmp_path / "hf", "from_hf", [*names, "--args", tmp_path / "args.json"]),
            (case.root, "same", []),
        )
    ]
    for rank in ("mp_rank_00_000", "mp_rank_01_001"):
        first, second = (arrays_in(each / rank / "model_optim_rng.pt") for each in tree)
        assert first["model"].keys() == second["model"].keys()
        assert all(np.array_equal(array, second["model"][name]) for name, array in first["model"].items())
        for one, two in zip(first["optimizer"], second["optimizer"]):
            groups = [each["optimizer"]["param_groups"] for each in (one, two)]
            assert [(group["params"], group["step"].tolist()) for group in groups[0]] == [
                (group["params"], group["step"].tolist()) for group in groups[1]
            ]
            for number, state in one["optimizer"]["state"].items():
                assert all(
                    np.array_equal(each, two["optimizer"]["state"][number][kind]) for kind, each in state.items()
                )


def test_parameters_of_a_module_have_the_order_in_which_megatron_makes_them() -> None:
    names = [
        *("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
        *("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.input_layernorm.bias"),
        *("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
        *("mtp.layers.0.enorm.weight", "mtp.layers.0.enorm.bias", "output_layer.weight", "output_layer.bias"),
    ]
    assert sorted(sorted(names), key=order_of) == names


def test_a_plan_of_a_tree_has_its_files(tmp_path: Path) -> None:
    options = ["--to", "megatron", "--format", "torch", "--sizes", "tp=2,pp=2", "--json"]
    plan = done("plan", mcore_case("legacy_dense").root, tmp_path / "out", *options).json
    assert len(plan["files"]) == 4


def test_names_that_args_do_not_decide_are_asked_for(tmp_path: Path) -> None:
    case = mcore_case("legacy_dense")
    done("convert", case.root, tmp_path / "hf", "--to", "huggingface", "--names", "llama", "--exclude", "global_step")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(case.expected["config"]))
    options = ["--to", "megatron", "--format", "torch", "--names", "llama"]
    fails(3, "convert", tmp_path / "hf", tmp_path / "out", *options, texts=["transformer_impl", "--args"])


def test_the_same_sizes_give_every_parameter_back(tmp_path: Path) -> None:
    """Weights of each rank are those that Megatron wrote; the optimizer has as many groups and the same numbers."""
    case = mcore_case("legacy_plain")
    tree = write(case, tmp_path / "tree", "tp=2")
    for rank in ("mp_rank_00", "mp_rank_01"):
        theirs, ours = (arrays_in(root / rank / "model_optim_rng.pt") for root in (case.directory, tree))
        expected = {name: value for name, value in theirs["model"].items() if isinstance(value, np.ndarray)}
        assert ours["model"].keys() == expected.keys()
        assert all(np.array_equal(value, ours["model"][name]) for name, value in expected.items())
        groups = [each["optimizer"]["optimizer"]["param_groups"] for each in (theirs, ours)]
        assert [group["params"] for group in groups[0]] == [group["params"] for group in groups[1]]
        for number, state in theirs["optimizer"]["optimizer"]["state"].items():
            mine = ours["optimizer"]["optimizer"]["state"][number]
            assert all(np.array_equal(value, mine[kind]) for kind, value in state.items())
        masters = [each["optimizer"]["fp32_from_fp16_params"] for each in (theirs, ours)]
        assert [len(group) for group in masters[0]] == [len(group) for group in masters[1]]
        assert all(np.array_equal(a, b) for one, two in zip(*masters) for a, b in zip(one, two))


def test_experts_of_a_group_are_transposed_one_after_the_other(tmp_path: Path) -> None:
    case = mcore_case("legacy14_grouped")
    tree = write(case, tmp_path / "tree", "tp=2,ep=2")
    for rank in sorted(path.name for path in tree.iterdir()):
        theirs, ours = (arrays_in(root / rank / "model_optim_rng.pt")["model"] for root in (case.directory, tree))
        for name in ("mlp.experts.weight1", "mlp.experts.weight2"):
            assert np.array_equal(theirs[f"decoder.layers.0.{name}"], ours[f"decoder.layers.0.{name}"])


def test_the_tracker_and_arguments_are_those_of_the_new_run(tmp_path: Path) -> None:
    tree = write(mcore_case("legacy_dense"), tmp_path / "tree", "tp=1,pp=2")
    assert (tree.parent / "latest_checkpointed_iteration.txt").read_text() == "100"
    args = arrays_in(tree / "mp_rank_00_001" / "model_optim_rng.pt")["args"].fields
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (1, 2)
    assert (args["ckpt_format"], args["use_distributed_optimizer"]) == ("torch", False)


@pytest.mark.parametrize("cast", [True, False])
def test_state_of_float32_weights_is_no_tree(cast: bool, tmp_path: Path) -> None:
    """Megatron keeps no masters of them, and without masters nothing shows whose state is whose."""
    src, options = mcore_case("td_dense_plain").root, ["--cast", "Float32"]
    if not cast:
        done("convert", src, tmp_path / "src", "--to", "megatron", *options)
        src, options = tmp_path / "src", []
    words = [*options, "--to", "megatron", "--format", "torch", "--sizes", "tp=2"]
    fails(3, "convert", src, tmp_path / "out", *words, texts=["Float32", "torch_dist", "--exclude 'optimizer.*'"])
    assert not (tmp_path / "out").exists()
    done("convert", src, tmp_path / "out", *words, "--exclude", "optimizer.*", "--verify")
    (path, _) = sorted((tmp_path / "out").rglob("*.pt"))
    assert {array.dtype.name for array in arrays_in(path)["model"].values()} == {"uint32"}


def with_padding(directory: Path, rows: int, **more: int) -> Path:
    """A file of arguments."""
    path = directory / "args.json"
    path.write_text(json.dumps({"padded_vocab_size": rows, **more}))
    return path


@pytest.mark.parametrize(("rows", "tokens"), [(48, 32), (24, 20)])
def test_a_tree_has_the_padding_of_its_run(rows: int, tokens: int, tmp_path: Path) -> None:
    """Rows of tokens stay, state included; rows that the source lacks are zeros."""
    case = mcore_case("td_dense_plain")
    args = with_padding(tmp_path, rows, vocab_size=tokens)
    padded: dict[str, list[Argument]] = {"same": [], "padded": ["--args", args]}
    before, after = (
        arrays_in(write(case, tmp_path / name, "tp=1", *options) / "mp_rank_00" / "model_optim_rng.pt")
        for name, options in padded.items()
    )
    assert after["args"].fields["padded_vocab_size"] == rows
    pairs = [(before["model"][name], after["model"][name]) for name in before["model"]]
    for number, states in before["optimizer"]["optimizer"]["state"].items():
        others = after["optimizer"]["optimizer"]["state"][number]
        pairs += [(array, others[kind]) for kind, array in states.items()]
    for masters in zip(before["optimizer"]["fp32_from_fp16_params"], after["optimizer"]["fp32_from_fp16_params"]):
        pairs += zip(*masters)
    resized = [(one, two) for one, two in pairs if one.shape != two.shape]
    assert len(resized) == 8
    for one, two in resized:
        assert (len(one), len(two)) == (32, rows)
        assert np.array_equal(one[:rows], two[:32]) and not two[32:].any()


def test_verify_finds_padding_that_is_not_zero(tmp_path: Path) -> None:
    case, args = mcore_case("td_dense_plain"), with_padding(tmp_path, 48)
    path = write(case, tmp_path / "tree", "tp=1", "--args", args) / "mp_rank_00" / "model_optim_rng.pt"
    rows = arrays_in(path)["model"]["output_layer.weight"].tobytes()
    data = path.read_bytes().replace(rows, rows[:-1] + b"\x01")
    path.write_bytes(data)
    (tmp_path / "tree" / "reshard-manifest.json").unlink()
    assert "output_layer.weight" in fails(4, "verify", tmp_path / "tree", "--src", case.root, "--args", args).out


@pytest.mark.parametrize(("rows", "tokens"), [(48, None), (24, None), (24, 32), (48, 40)])
def test_other_padding_needs_the_number_of_tokens(rows: int, tokens: int | None, tmp_path: Path) -> None:
    """No row of a token is left out, and none is made up."""
    src = with_other_argument(mcore_case("td_dense_plain").root, tmp_path / "src", "vocab_size", tokens)
    words: list[Argument] = [
        "--to",
        "megatron",
        "--format",
        "torch",
        "--exclude",
        "optimizer.*",
        "--args",
        with_padding(tmp_path, rows),
    ]
    fails(3, "convert", src, tmp_path / "out", *words, texts=["vocab_size", "padded_vocab_size", rows, "--args"])
    assert not (tmp_path / "out").exists()


def test_another_runs_arguments_leave_out_no_token(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    fewer = write(case, tmp_path / "fewer", "tp=1", "--args", with_padding(tmp_path, 24, vocab_size=20))
    words: list[Argument] = ["--to", "megatron", "--format", "torch", "--args", fewer]
    fails(3, "convert", case.root, tmp_path / "out", *words, texts=["vocab_size", "32", "24"])


def test_crcs_of_a_tree_are_those_of_its_tensors(tmp_path: Path) -> None:
    tree = write(mcore_case("td_dense_plain"), tmp_path / "tree", "tp=2", "--checksum", "crc32")
    for path in tree.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None and all(entry.CRC for entry in archive.infolist())
    done("verify", tmp_path / "tree")


@pytest.mark.parametrize("sizes", ["pp=3", "tp=3", "ep=3"])
def test_sizes_that_do_not_divide_a_model_are_refused(sizes: str, tmp_path: Path) -> None:
    fails(
        *(3, "convert", mcore_case("legacy_moe").root, tmp_path / "out", "--to", "megatron"),
        *("--format", "torch", "--sizes", sizes),
    )
    assert not any(path.suffix == ".pt" for path in tmp_path.rglob("*"))


def test_a_changed_element_is_found(tmp_path: Path) -> None:
    case = mcore_case("legacy_vpp")
    tree = write(case, tmp_path / "tree", "pp=2")
    path = tree / "mp_rank_00_001" / "model_optim_rng.pt"
    (place,) = [match.start() for match in re.finditer(re.escape(_output_layer(path)), path.read_bytes())]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    (tmp_path / "tree" / "reshard-manifest.json").unlink()
    fails(4, "verify", tmp_path / "tree", "--src", case.root)


def _output_layer(path: Path) -> bytes:
    """The bytes of the copy of the embedding on the last stage."""
    return bytes(arrays_in(path)["model1"]["output_layer.weight"].tobytes())
