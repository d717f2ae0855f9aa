"""Megatron's names and packing to Hugging Face's and MindFormers', by a chain of tables, and back."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reshard.forms.request import EditRules
from reshard.names import Edge, tables
from reshard.plan import tables as plan_tables
from tests.corpus import FIXTURES
from tests.corpus_dcp import held_in
from tests.corpus_mcore import McoreCase, mcore_case, mcore_cases
from tests.forms.test_megatron_written import common_in, with_other_argument
from tests.model_weights import MODELS, bfloat16, weights, write_huggingface
from tests.running import Argument, done, fails, reshard

_READ = ("td_dense_plain", "td_moe_fully", "td_moe_layer_keys", "td_mla_mtp", "td_tied", "td_tp4_bias", "td_uneven")
ALL = [case for case in mcore_cases() if case.expected["expect"] == "convert"]
CASES = [case for case in ALL if case.name in _READ]
# Options of the tables of MindFormers' names that nothing else determines.
PACKING = {
    "qwen3": ",gate_up=interleaved,qkv=contiguous",
    "qwen3_moe": ",gate_up=interleaved,qkv=contiguous",
    "deepseek_v3": ",gate_up=interleaved,mla=joined",
}
RANKS = ("--sizes", "dp=2,mp=2,pp=2", "--set", "vocab_emb_dp=false")
STATES = {"adam_m.": "exp_avg", "adam_v.": "exp_avg_sq", "main_param.": "fp32_param"}


def named(case: McoreCase) -> str:
    return case.name


def config_of(case: McoreCase, directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps({**case.expected["config"], **changes}))
    return path


def family(case: McoreCase, options: bool = False) -> str:
    name = str(case.expected["names"])
    return name + (PACKING.get(name, "") if options else "")


def contents(directory: Path) -> dict[str, dict[str, Any]]:
    """Type, shape and digest of each tensor of a directory, as expected.json has them."""
    return {
        name: {"dtype": dtype, "shape": [*shape], "sha256": digest}
        for name, (dtype, shape, digest) in held_in(directory).items()
    }


def check_huggingface(directory: Path, case: McoreCase, states: Collection[str]) -> None:
    """Weights and optimizer state are those that are expected."""
    tensors, expected = contents(directory), case.expected
    step = tensors.pop("global_step", None)
    assert (step is not None) == bool(states)
    if step is not None:
        count = int(expected["optimizer"]["step"]).to_bytes(4, "little")
        assert step == {"dtype": "I32", "shape": [1], "sha256": hashlib.sha256(count).hexdigest()}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(STATES))}
    optional = expected.get("tensors_optional", {})
    assert {name: tensor for name, tensor in weights.items() if name not in optional} == expected["tensors"]
    assert all(weights[name] == tensor for name, tensor in optional.items() if name in weights)
    for prefix, state in STATES.items():
        of_state = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        assert of_state == (expected["optimizer"]["state"][state] if state in states else {})


def check_both_ways(case: McoreCase, directory: Path) -> None:
    states = set(case.expected["optimizer"]["state"]) if case.optimizer else set()
    words: list[Argument] = ["--config", config_of(case, directory), "--optimizer", "keep", "--verify"]
    done("convert", case.root, directory / "hub", "--to", "huggingface", "--names", family(case), *words)
    check_huggingface(directory / "hub", case, states)

    unified = directory / "unified"
    done("convert", case.root, unified, "--to", "unified", "--names", family(case, options=True), *words)
    names = contents(unified).keys()
    assert not any(name.startswith(("optimizer.", "model.layers.0.self_attn.")) for name in names)
    # The records list the options of the table of MindFormers' names.
    done("convert", unified, directory / "back", "--to", "huggingface", "--names", family(case), *words)
    check_huggingface(directory / "back", case, states)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_megatron_to_hugging_face_and_to_mindformers_names_and_back_gives_the_expected_bits(
    case: McoreCase, tmp_path: Path
) -> None:
    check_both_ways(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in ALL if case not in CASES], ids=named)
def test_older_states_and_legacy_trees_go_both_ways(case: McoreCase, tmp_path: Path) -> None:
    check_both_ways(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("form", [pytest.param("huggingface", marks=pytest.mark.long), "unified"])
def test_hugging_faces_and_mindformers_names_become_megatrons(form: str, case: McoreCase, tmp_path: Path) -> None:
    words: list[Argument] = ["--config", config_of(case, tmp_path), "--verify", "--names"]
    done("convert", case.root, tmp_path / "src", "--to", form, *words, family(case, options=form == "unified"))
    options = family(case) + (",mtp=copies" if family(case) == "deepseek_v3" and form == "unified" else "")
    out = tmp_path / "megatron"
    done("convert", tmp_path / "src", out, "--to", "megatron", "--args", case.root, *words, options)
    done("convert", out, tmp_path / "plain", "--to", "huggingface", "--names", "none")
    padded = case.expected["model"]["vocab"] != case.expected["model"]["padded_vocab"]
    rows = ("embedding.word_embeddings.weight", "output_layer.weight") if padded else ()
    written, expected = contents(tmp_path / "plain"), case.expected["native"]
    # Layers without Transformer Engine have other names for some norms.
    tensors = {tensor["sha256"] for name, tensor in written.items() if name not in rows}
    assert tensors == {tensor["sha256"] for name, tensor in expected.items() if name not in rows}
    # Rows of padding are zeros, not those of the source.
    assert all(written[name]["shape"] == expected[name]["shape"] for name in rows)
    done("convert", out, tmp_path / "back", "--to", "huggingface", *words, family(case))
    check_huggingface(tmp_path / "back", case, ())


def test_a_run_of_mindformers_goes_to_megatron_and_back_with_its_optimizer(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    strategy, names = tmp_path / "strategy.json", ["--names", family(case, options=True)]
    words: list[Argument] = [*names, "--config", config_of(case, tmp_path)]
    done("strategy", "make", "llama", strategy, "--shapes", case.root, *words, *RANKS)
    words += ["--optimizer", "keep", "--verify"]
    done("convert", case.root, tmp_path / "ranks", "--dst-strategy", strategy, *words)
    out: list[Argument] = [tmp_path / "megatron", "--to", "megatron", "--args", case.root]
    done("convert", tmp_path / "ranks", *out, "--src-strategy", strategy, *words)
    done("convert", tmp_path / "megatron", tmp_path / "ranks2", "--dst-strategy", strategy, *words)
    files = [path.relative_to(tmp_path / "ranks") for path in (tmp_path / "ranks").glob("rank_*/*.safetensors")]
    assert len(files) == 8
    assert all((tmp_path / "ranks" / file).read_bytes() == (tmp_path / "ranks2" / file).read_bytes() for file in files)
    done("convert", tmp_path / "ranks2", tmp_path / "hub", "--to", "huggingface", "--src-strategy", strategy, *words)
    check_huggingface(tmp_path / "hub", case, set(STATES.values()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_family_goes_from_hugging_face_over_megatron_and_mindformers_and_back(name: str, tmp_path: Path) -> None:
    # Multi-head latent attention has no groups of queries, whatever its config.json states.
    write_huggingface(tmp_path / "src", bfloat16(weights(name)), dict(MODELS[name][0]))
    words: list[Argument] = ["--config", tmp_path / "src" / "config.json", "--verify", "--names"]
    mtp = ",mtp=copies" if name == "deepseek_v3" else ""
    place = tmp_path / "src"
    for number, (form, options) in enumerate(
        [("megatron", ""), ("unified", PACKING.get(name, "")), ("megatron", mtp), ("huggingface", "")]
    ):
        out = tmp_path / str(number)
        done("convert", place, out, "--to", form, *words, name + options)
        place = out
    assert contents(place) == contents(tmp_path / "src")


def test_mindformers_options_stay_errors_that_name_the_choices(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--config", config_of(case, tmp_path)]
    fails(2, *words, "--to", "unified", "--names", family(case), texts=["qkv=grouped", "qkv=contiguous"])
    # Hugging Face's names need none.
    done(*words, "--to", "huggingface", "--names", family(case))


def test_an_option_of_a_table_that_no_end_needs_is_wrong_usage(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["--config", config_of(case, tmp_path), "--names"]
    option = "gate_up=halves"
    hub: list[Argument] = [tmp_path / "hub", "--to", "huggingface", *words]
    fails(2, "convert", case.root, *hub, f"{family(case)},{option}", texts=[option])
    done("convert", case.root, *hub, family(case))
    back: list[Argument] = [tmp_path / "back", "--to", "megatron", "--args", case.root, *words]
    fails(2, "convert", tmp_path / "hub", *back, f"{family(case)},{option}", texts=[option])
    assert not (tmp_path / "back").exists()


def test_records_of_a_chain_verify_it_and_show_the_family(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    out, names = tmp_path / "out", family(case, options=True)
    words: list[Argument] = ["convert", case.root, out, "--to", "unified", "--names", names]
    words += ["--config", config_of(case, tmp_path)]
    done(*words)
    done(*words)
    done("verify", out, "--src", case.root)
    back = done("suggest", out).out
    assert f"{names.partition(',')[0]},gate_up=interleaved,qkv=contiguous" in back


def test_records_of_megatrons_files_verify_them(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["--names", family(case), "--config", config_of(case, tmp_path)]
    done("convert", case.root, tmp_path / "huggingface", "--to", "huggingface", *words)
    done("convert", tmp_path / "huggingface", tmp_path / "out", "--to", "megatron", *words)
    done("verify", tmp_path / "out", "--src", tmp_path / "huggingface")


def test_a_strategy_for_ranks_is_made_of_megatrons_shapes(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    strategy, names = tmp_path / "strategy.json", ["--names", family(case, options=True)]
    config: list[Argument] = ["--config", config_of(case, tmp_path)]
    done("strategy", "make", "mcore", strategy, "--shapes", case.root, *names, *config, *RANKS)
    words: list[Argument] = [*config, "--optimizer", "keep", "--verify"]
    done("convert", case.root, tmp_path / "ranks", "--dst-strategy", strategy, *names, *words)
    words += ["--src-strategy", strategy]
    done("convert", tmp_path / "ranks", tmp_path / "back", "--to", "huggingface", "--names", family(case), *words)
    check_huggingface(tmp_path / "back", case, set(STATES.values()))


@pytest.mark.parametrize(
    "changes, texts",
    [
        ({"num_attention_heads": 2, "head_dim": None}, ["num_attention_heads", "2", "4"]),
        ({"num_hidden_layers": 3}, ["num_hidden_layers", "3", "2"]),
        ({"vocab_size": 64}, ["vocab_size", "64", "32"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    ],
)
def test_a_configuration_that_contradicts_the_arguments_is_refused(
    changes: dict[str, object], texts: list[str], tmp_path: Path
) -> None:
    case = mcore_case("td_dense_plain")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "huggingface", "--names", family(case)]
    fails(3, *words, "--config", config_of(case, tmp_path, **changes), texts=[*texts, "config.json"])


def test_fewer_tokens_than_a_run_had_are_refused_unless_they_are_stated(tmp_path: Path) -> None:
    """Rows after them are padding and left out: the 12 last rows of this run were trained."""
    case = mcore_case("td_dense_plain")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "huggingface", "--names", family(case)]
    words += ["--config", config_of(case, tmp_path, vocab_size=20), "--verify"]
    fails(3, *words, texts=["vocab_size", "20", "32", "--args"])
    (tmp_path / "args.json").write_text(json.dumps({"vocab_size": 20}))
    done(*words, "--args", tmp_path / "args.json")
    assert contents(tmp_path / "out")["lm_head.weight"]["shape"] == [20, 8]
    done("verify", tmp_path / "out", "--src", case.root)


def test_padding_bounds_the_tokens_where_no_argument_counts_them(tmp_path: Path) -> None:
    """These ranks pad to a multiple of 8 times 2."""
    case = mcore_case("td_dense_plain")
    src = with_other_argument(case.root, tmp_path / "src", "vocab_size", None)
    words: list[Argument] = ["--to", "huggingface", "--names", family(case), "--config"]
    few, enough = (config_of(case, tmp_path / name, vocab_size=size) for name, size in (("few", 16), ("enough", 17)))
    fails(3, "convert", src, tmp_path / "out", *words, few, texts=["vocab_size", "16", "17", "--args"])
    done("convert", src, tmp_path / "out", *words, enough, "--verify")


def test_a_json_file_of_arguments_is_no_configuration(tmp_path: Path) -> None:
    """No argument is computed from the other arguments of a checkpoint."""
    args = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "kv_channels": 4}
    (tmp_path / "args.json").write_text(json.dumps({**args, "num_query_groups": 2, "vocab_size": 64}))
    ignored = shutil.ignore_patterns("config.json")
    src = shutil.copytree(FIXTURES / "models" / "qwen3", tmp_path / "src", ignore=ignored)
    words: list[Argument] = ["--to", "megatron", "--names", "qwen3", "--args", tmp_path / "args.json", "--verify"]
    done("convert", Path(src), tmp_path / "out", *words)
    written = common_in(tmp_path / "out" / "release").args
    assert written["num_query_groups"] == 2 and "group_query_attention" not in written


def test_arguments_give_sizes_without_a_configuration(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    done("convert", case.root, tmp_path / "out", "--to", "huggingface", "--names", family(case))
    check_huggingface(tmp_path / "out", case, ())


def test_the_table_of_megatron_is_chosen_by_the_form(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "huggingface"]
    fails(2, *words, "--names", "megatron", texts=["--names llama"])
    fails(2, *words, "--names", "llama,qkv=contiguous", texts=["qkv", "leave it out", "megatron"])
    fails(2, *words, "--names", family(case), "--reverse", texts=["--reverse"])
    # A table of one's own is used alone.
    table = tmp_path / "own.toml"
    table.write_text('others = "keep"\ndirection = "forward"\n[[rule]]\nfrom = "decoder.*"\nto = "net.*"\n')
    done(*words, "--names", table, "--verify")
    assert any(name.startswith("net.layers.") for name in contents(tmp_path / "out"))


def test_a_weight_that_the_family_lacks_is_refused_by_name_or_left_out(tmp_path: Path) -> None:
    case = mcore_case("td_dense_te_names")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "huggingface", "--names", "llama"]
    words += ["--config", config_of(case, tmp_path)]
    fails(3, *words, texts=["self_attention.q_layernorm.weight", "--names qwen3"])
    result = done(*words, "--exclude", "*.self_attention.[qk]_layernorm.weight", "--verify")
    assert "--names qwen3" in result.err
    expected = case.expected["tensors"]
    norms = {name for name in expected if name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert contents(tmp_path / "out") == {name: expected[name] for name in expected.keys() - norms}


def swapped(edits: EditRules, shapes: Any) -> Any:
    """The path in the other order."""
    return tuple(reversed(PATH_OF(edits, shapes)))


def second_alone(edits: EditRules, shapes: Any) -> Any:
    return PATH_OF(edits, shapes)[1:]


def backwards(edits: EditRules, shapes: Any) -> Any:
    return tuple(Edge(rules, not reverse) for rules, reverse in PATH_OF(edits, shapes))


PATH_OF = plan_tables.path_of


@pytest.mark.parametrize("mutant", [swapped, second_alone, backwards])
def test_a_wrong_path_gets_no_certificate(mutant: Any, tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "unified", "--verify"]
    with mock.patch.object(plan_tables, "path_of", mutant):
        result = reshard(*words, "--names", family(case, options=True), "--config", config_of(case, tmp_path))
    assert result.status != 0


@pytest.mark.parametrize("wrong", ["qwen3", "llama", "deepseek_v3"])
def test_another_family_gets_no_certificate(wrong: str, tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "huggingface", "--verify"]
    named = tables.tables_named

    def of_another(text: str, *sides: str) -> Any:
        return named(text, *sides)[0], named(wrong, *sides)[1]

    with mock.patch("reshard.names.tables_named", of_another):
        result = reshard(*words, "--names", family(case), "--config", config_of(case, tmp_path))
    assert (result.status == 0) == (wrong == family(case))


def test_a_second_table_on_unmapped_tensors_gets_no_certificate(tmp_path: Path) -> None:
    """The views of the first table are ignored where the second packs."""
    from reshard.layout.views import View
    from reshard.plan.editing import Editing

    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "unified", "--verify"]

    made = Editing._made

    def whole(self: Any, recipe: Any) -> View:
        shape = self._shape(recipe)
        stored = self._checkpoint.tensors[recipe.sources[0]].shape
        corner = View.whole(0, stored)
        for dimension in range(len(stored) - len(shape)):
            corner = corner.part(dimension, 0, 1)
        for dimension, size in enumerate(shape, len(stored) - len(shape)):
            corner = corner.part(dimension, 0, min(size, stored[dimension]))
        return corner.reshape(shape)

    def of_whole(self: Any, operations: Any, operands: Any) -> Any:
        return made(
            self,
            operations,
            [
                each if each.view is None else each._replace(sources=each.sources[:1], view=whole(self, each))
                for each in operands
            ]
            if operations
            else operands,
        )

    with mock.patch.object(Editing, "_made", of_whole):
        result = reshard(*words, "--names", family(case, options=True), "--config", config_of(case, tmp_path))
    assert result.status != 0
