"""`reshard suggest`: commands that run as printed, and placeholders for values that only the user has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reshard.cli.main import cli
from tests.corpus import FIXTURES
from tests.model_weights import MODELS, cut, mindformers, weights, write_huggingface
from tests.object_store import Objects
from tests.running import Argument, done, fails, install, reshard
from tests.small import PLAIN, World, tensors
from tests.trees import cut_ranks, layout, single, value, write_checkpoint, write_strategy, write_tree

DEMO = FIXTURES / "demo"
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b")
# The aims of each form.
AIMS = {
    "ranks": ["check-strategy", "cluster", "huggingface", "pytorch"],
    "checkpoint2": ["cluster", "huggingface", "pytorch"],
    "unified": ["mindspore", "huggingface", "pytorch"],
    "huggingface": ["mindspore", "pytorch"],
    "dcp": ["cluster", "mindspore", "huggingface"],
    "hf-sharded": ["cluster", "mindspore", "huggingface"],
    "hyper-parallel": ["cluster", "mindspore", "huggingface"],
}
WRITTEN_AS = {
    "checkpoint2": ["--dst-strategy", "same"],
    "unified": [],
    "huggingface": ["--exclude", "*_num", "--exclude", "global_step"],
    **{form: ["--shards", "2"] for form in ("dcp", "hf-sharded", "hyper-parallel")},
}


def suggested(*words: Argument) -> Any:
    """What `suggest --json` prints. Every command parses, and its placeholders are those that it names as missing."""
    printed = done("suggest", *words, "--json").json
    for item in printed["suggestions"]:
        name, *arguments = item["command"]
        assert name == "reshard"
        missing = {each["placeholder"] for each in item["missing"]} - {None}
        assert missing == placeholders(item["command"]), item
        if not missing:
            parse(arguments)
    return printed


def placeholders(command: Sequence[str]) -> set[str]:
    return {actual for word in command if "/" not in word for actual in PLACEHOLDER.findall(word)}


def parse(arguments: Sequence[str]) -> None:
    """Parse a command line, which raises an error where it is wrong usage."""
    group: Any = cli
    rest = list(arguments)
    context = cli.make_context("reshard", ["plan"])
    while hasattr(group, "list_commands"):
        group = group.get_command(context, rest.pop(0))
    # Click keeps a command's option of help from its first context.
    group.make_context("reshard", rest, parent=context).close()


def of_aim(printed: Any, aim: str) -> Any:
    """The only suggestion for an aim."""
    (item,) = (item for item in printed["suggestions"] if item["aim"] == aim)
    return item


def run(item: Any, **replaced: str) -> None:
    """Run a command with its placeholders replaced."""
    words = item["command"][1:]
    for placeholder, word in replaced.items():
        words = [re.sub(rf"\b{placeholder}\b", word, each) for each in words]
    done(*words)


def run_all(printed: Any) -> list[str]:
    """Run every command without a placeholder; their aims."""
    items = [item for item in printed["suggestions"] if not placeholders(item["command"])]
    for item in items:
        run(item)
    return [item["aim"] for item in items]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in every form, and its strategies in a directory beside."""
    place = tmp_path_factory.mktemp("forms")
    shutil.copytree(DEMO / "src_checkpoints", place / "ranks")
    (place / "strategy").mkdir()
    for name in ("src_strategy.ckpt", "dst_strategy.ckpt"):
        shutil.copy(DEMO / name, place / "strategy")
    for form, options in WRITTEN_AS.items():
        source: list[Argument] = ["--src-strategy", place / "strategy" / "src_strategy.ckpt"]
        done("convert", place / "ranks", place / form, "--quiet", "--to", form, *source, *options)
    return place


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, for the targets."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.mark.deep
@pytest.mark.parametrize("form", AIMS)
def test_every_command_for_every_form_runs_and_proves_its_result(demo: Path, form: str) -> None:
    printed = suggested(demo / form, "--devices", 4)
    assert printed["form"] == form
    assert [item["aim"] for item in printed["suggestions"]] == AIMS[form]
    assert run_all(printed) == AIMS[form]
    assert all("--verify" in item["command"] for item in printed["suggestions"] if "convert" in item["command"])


@pytest.mark.long
def test_every_command_for_one_device_runs(demo: Path) -> None:
    for form in AIMS:
        run_all(suggested(demo / form, "--devices", 1))


@pytest.mark.deep
def test_one_file_counts_as_whole_only_if_the_user_states_it(demo: Path, tmp_path: Path) -> None:
    done("convert", demo / "unified", tmp_path / "one", "--dst-strategy", "none", "--quiet")
    file = shutil.copy(tmp_path / "one" / "rank_0" / "checkpoint_0.safetensors", tmp_path / "model.safetensors")
    for item in suggested(file, "--devices", 1)["suggestions"]:
        assert "SRC_STRATEGY" in item["command"]
    printed = suggested(file, "--devices", 1, "--src-strategy", "none")
    assert run_all(printed) == ["cluster", "huggingface", "pytorch"]


@pytest.mark.deep
def test_the_output_is_a_script(demo: Path, tmp_path: Path, elsewhere: Path) -> None:
    source = tmp_path / "it's\na $(touch x) ünï"
    shutil.copytree(demo / "ranks", source)
    shutil.copytree(demo / "strategy", tmp_path / "strategies")
    script = done("suggest", source, "--devices", 4).out
    shell = subprocess.run(["bash", "-e"], input=script, env=install(tmp_path / "bin"), text=True, capture_output=True)
    assert shell.returncode == 0, shell.stderr
    assert len([*elsewhere.iterdir()]) == 3 and not (elsewhere / "x").exists()


def test_paths_starting_with_a_hyphen_are_not_options(demo: Path, elsewhere: Path) -> None:
    shutil.copytree(demo / "huggingface", elsewhere / "--quiet")
    printed = suggested("--devices", 2, "./--quiet")
    assert of_aim(printed, "pytorch")["command"][2:4] == ["./--quiet", "./--quiet-dcp"]
    run(of_aim(printed, "pytorch"))


def test_suggested_targets_are_new_and_outside_the_source(
    demo: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo / "dcp", elsewhere / "ckpt")
    (elsewhere / "ckpt-huggingface").mkdir()
    assert of_aim(suggested("ckpt"), "huggingface")["command"][3] == "ckpt-huggingface-2"
    monkeypatch.chdir(elsewhere / "ckpt")
    item = of_aim(suggested("."), "huggingface")
    assert item["command"][2:4] == [".", "../ckpt-huggingface-2"]
    run(item)


def test_suggest_restores_lost_ranks_from_replicas(plain: World) -> None:
    plain.save(tensors(), ranks=[1, 2])
    item = of_aim(suggested(plain.src), "recover")
    assert item["title"] == "Restore ranks 0,3 from replicas"
    run(item)
    whole = Path(item["command"][3])
    assert sorted(path.parent.name for path in whole.glob("rank_*/*.ckpt")) == ["rank_0", "rank_1", "rank_2", "rank_3"]
    done("verify", whole, "--replicas", "--strategy", plain.old)


def test_a_larger_strategy_is_used_only_where_ranks_are_evidently_lost(plain: World) -> None:
    plain.new.unlink()
    plain.save(tensors(), ranks=[0, 1])
    printed = suggested(plain.src)
    assert printed["strategy"] is None and "recover" not in [item["aim"] for item in printed["suggestions"]]
    assert of_aim(printed, "huggingface")["missing"][0]["placeholder"] == "SRC_STRATEGY"
    run_all(suggested(plain.src, "--src-strategy", plain.old))


def test_strategies_that_fit_alike_are_not_chosen_from(plain: World, tmp_path: Path) -> None:
    """Both have the shapes of the slices, and place them on other ranks."""
    other = single({"w": layout([2, 2], [1, -1]), "v": layout([2, 2], [-1])})
    path = write_strategy(tmp_path / "strategies" / "other", other)
    plain.save(tensors())
    printed = suggested(plain.src)
    assert printed["strategy"] is None
    assert all(item["aim"] == "check-strategy" or "SRC_STRATEGY" in item["command"] for item in printed["suggestions"])
    checks = {item["command"][3]: item for item in printed["suggestions"] if item["aim"] == "check-strategy"}
    assert checks.keys() == {str(plain.old), str(path)}
    run(checks[str(plain.old)])
    assert reshard(*checks[str(path)]["command"][1:]).status == 4
    assert str(path) in of_aim(printed, "huggingface")["missing"][0]["text"]


def test_every_command_refuses_a_wrong_strategy_that_fits_the_headers(plain: World, tmp_path: Path) -> None:
    other = single({"w": layout([2, 2], [1, -1]), "v": layout([2, 2], [-1])})
    path = write_strategy(tmp_path / "strategies" / "other", other)
    plain.save(tensors())
    plain.old.unlink()
    printed = suggested(plain.src, "--devices", 8)
    assert printed["strategy"] == str(path)
    statuses = {
        item["aim"]: reshard(*item["command"][1:]).status
        for item in printed["suggestions"]
        if not placeholders(item["command"])
    }
    assert statuses == {"check-strategy": 4, "huggingface": 3, "pytorch": 3}


def test_a_strategy_of_more_devices_that_places_slices_alike_is_no_doubt(plain: World, tmp_path: Path) -> None:
    larger = single({"w": layout([4, 2], [0, -1]), "v": layout([4, 2], [-1])})
    write_strategy(tmp_path / "strategies" / "larger", larger)
    plain.save(tensors())
    printed = suggested(plain.src)
    assert printed["strategy"] == str(plain.old)
    titles = [item["title"] for item in printed["suggestions"] if item["aim"] == "cluster"]
    assert sorted(re.findall(r"[0-9]+ devices", "\n".join(titles))) == ["2 devices", "8 devices"]


def test_a_strategy_that_lacks_a_weight_is_not_used(plain: World) -> None:
    plain.save({**tensors(), "extra": tensors()["w"]}, copied={"extra": tensors()["w"]})
    assert suggested(plain.src)["strategy"] is None


def test_a_target_strategy_with_weights_that_the_checkpoint_lacks_is_not_offered(plain: World, tmp_path: Path) -> None:
    plain.new.unlink()
    cut_, names = layout([4], [0, -1]), ("w", "adam_m.w", "v", "head.weight")
    beside = write_strategy(tmp_path / "strategies" / "deeper", single({name: cut_ for name in names}))
    plain.save(tensors())
    words = (plain.src, "--src-strategy", plain.old)
    (item,) = [item for item in suggested(*words)["suggestions"] if item["aim"] == "cluster"]
    (missing,) = item["missing"]
    assert missing["placeholder"] == "DST_STRATEGY" and str(beside) in missing["text"]
    assert "'head.weight'" in missing["text"] and "adam_m" not in missing["text"]
    write_strategy(tmp_path / "strategies" / "deeper", single({name: cut_ for name in names if name != "head.weight"}))
    assert any(str(beside) in item["command"] for item in suggested(*words)["suggestions"])


def test_the_line_that_derives_the_next_strategy_is_printed(demo: Path, elsewhere: Path) -> None:
    shutil.copytree(demo / "ranks", elsewhere / "ckpt")
    shutil.copy(demo / "strategy/src_strategy.ckpt", elsewhere)
    printed = suggested("ckpt", "--devices", 4)
    derive, cluster = of_aim(printed, "derive"), of_aim(printed, "cluster")
    run(derive, DP="2", MP="4", NEW_DP="1", NEW_MP="4")
    run(cluster, DST_STRATEGY=derive["command"][4])
    assert "derive" not in [item["aim"] for item in suggested("ckpt", "--devices", 1)["suggestions"]]


@pytest.mark.parametrize(
    ("case", "text"),
    [("legacy_dense", "torch_dist"), ("td_dense_plain", "any sizes"), ("td_moe_fully", "any sizes")],
)
def test_suggest_states_at_which_sizes_megatron_loads_a_checkpoint(case: str, text: str) -> None:
    (note,) = of_aim(suggested(FIXTURES / "megatron" / case / "checkpoint"), "cluster")["missing"][-1:]
    assert note["placeholder"] is None and text in note["text"]


def test_copies_of_a_strategy_in_two_formats_are_one(plain: World, tmp_path: Path) -> None:
    copy = write_strategy(tmp_path / "strategies" / "copy", PLAIN, {"w": (8, 6), "v": (4,)}, "json")
    plain.save(tensors())
    assert suggested(plain.src)["strategy"] in (str(plain.old), str(copy))


def test_without_a_strategy_suggestions_contain_a_placeholder(demo: Path, tmp_path: Path) -> None:
    source = shutil.copytree(demo / "ranks", tmp_path / "alone" / "ckpt")
    printed = suggested(source)
    assert [item["aim"] for item in printed["suggestions"]] == ["cluster", "huggingface", "pytorch"]
    item = of_aim(printed, "cluster")
    assert placeholders(item["command"]) == {"SRC_STRATEGY", "DST_STRATEGY"}
    strategy = str(demo / "strategy")
    run(item, SRC_STRATEGY=f"{strategy}/src_strategy.ckpt", DST_STRATEGY=f"{strategy}/dst_strategy.ckpt")


def test_an_incomplete_checkpoint_is_not_converted(demo: Path, tmp_path: Path) -> None:
    source = shutil.copytree(demo / "ranks", tmp_path / "torn" / "ckpt")
    shutil.copytree(demo / "strategy", tmp_path / "torn" / "strategy")
    shutil.rmtree(source / "rank_5")
    printed = suggested(source)
    assert printed["complete"] is False and [item["aim"] for item in printed["suggestions"]] == ["check-strategy"]
    assert any("rank 5" in problem["text"] for problem in printed["problems"])


def test_an_unfinished_conversion_is_resumed_first(demo: Path, tmp_path: Path) -> None:
    strategies: list[Argument] = [
        "--src-strategy",
        demo / "strategy/src_strategy.ckpt",
        "--dst-strategy",
        demo / "strategy/dst_strategy.ckpt",
    ]
    done("by-rank", 1, demo / "ranks", tmp_path / "part", *strategies, "--quiet")
    printed = suggested(tmp_path / "part")
    assert printed["suggestions"][0]["command"] == ["reshard", "resume", str(tmp_path / "part")]
    run(printed["suggestions"][0])
    assert "resume" not in [item["aim"] for item in suggested(tmp_path / "part")["suggestions"]]


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel", "hf-sharded"])
def test_an_unfinished_checkpoint_of_pytorch_is_resumed(form: str, demo: Path, tmp_path: Path) -> None:
    words: list[Argument] = ["--src-strategy", demo / "strategy/src_strategy.ckpt", "--to", form, "--shards", 2]
    done("by-rank", 1, demo / "ranks", tmp_path / "part", *words, "--quiet")
    printed = suggested(tmp_path / "part")
    assert [item["aim"] for item in printed["suggestions"]] == ["resume"] and printed["problems"]
    assert "reshard resume" in done("suggest", tmp_path / "part").out
    run(printed["suggestions"][0])
    assert [item["aim"] for item in suggested(tmp_path / "part")["suggestions"]] == AIMS[form]


def test_a_conversion_asks_for_a_prefix_that_may_be_the_models_own(tmp_path: Path) -> None:
    full = {name: value(name, (4, 2)) for name in ("model.embed.weight", "model.norm.weight")}
    write_checkpoint(tmp_path / "hf" / "model.safetensors", full)
    (tmp_path / "hf" / "config.json").write_text("{}")
    for form in ("hf-sharded", "dcp"):
        done("convert", tmp_path / "hf", tmp_path / form, "--to", form, "--shards", 2)
    printed = suggested(tmp_path / "hf-sharded")
    assert placeholders(of_aim(printed, "cluster")["command"]) == {"DEVICES"}
    command = of_aim(printed, "huggingface")["command"]
    fails(3, *command[1:], texts=["--rename '*=*'"])
    done(*command[1:], "--rename", "*=*")
    # The keys of this one are recorded.
    run(of_aim(suggested(tmp_path / "dcp"), "huggingface"))


@pytest.mark.deep
def test_the_recorded_strategy_of_a_converted_tree_is_used(demo: Path, tmp_path: Path) -> None:
    target = shutil.copy(demo / "strategy/dst_strategy.ckpt", tmp_path / "new.ckpt")
    source: list[Argument] = ["--src-strategy", demo / "strategy/src_strategy.ckpt"]
    done("convert", demo / "ranks", tmp_path / "out" / "mp4", *source, "--dst-strategy", target, "--quiet")
    printed = suggested(tmp_path / "out" / "mp4", "--devices", 1)
    assert printed["strategy"] == str(target)
    assert run_all(printed) == ["check-strategy", "cluster", "huggingface", "pytorch"]
    assert "recorded by the conversion" in done("suggest", tmp_path / "out" / "mp4").out
    # Another content under its name is not the recorded one.
    shutil.copy(demo / "strategy/src_strategy.ckpt", target)
    assert suggested(tmp_path / "out" / "mp4")["strategy"] is None
    Path(target).unlink()
    assert suggested(tmp_path / "out" / "mp4")["strategy"] is None


def test_a_strategy_that_does_not_fit_is_an_error(demo: Path) -> None:
    for strategy, text in (("none", "one device"), (demo / "strategy/dst_strategy.ckpt", "has 4 devices")):
        for words in ([], ["--json"]):
            fails(3, "suggest", demo / "ranks", "--src-strategy", strategy, *words, texts=[text])


def test_lines_fit_a_terminal_of_eighty_columns(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo)
    for line in done("suggest", "ranks", "--devices", 16).out.split("\n"):
        assert len(line) <= 80, line


def test_suggest_states_whether_replicas_restore_lost_ranks(demo: Path, tmp_path: Path) -> None:
    source = shutil.copytree(demo / "ranks", tmp_path / "torn" / "ckpt")
    shutil.rmtree(source / "rank_5")
    assert of_aim(suggested(source), "recover")["title"] == "Restore rank 5 from replicas, if replicas exist"
    printed = suggested(source, "--src-strategy", demo / "strategy/src_strategy.ckpt")
    assert [item["aim"] for item in printed["suggestions"]] == ["check-strategy"]
    assert any("is not complete" in each["text"] and "rank 5" in each["text"] for each in printed["problems"])


def test_options_are_repeated_in_every_command(world: World) -> None:
    world.save_step("1_10", tensors())
    world.save_step("2_10", tensors("later"))
    printed = suggested(world.src, "--step", "1_10", "--devices", 2)
    assert printed["step"] == "1_10"
    assert all(item["command"][-2:] == ["--step", "1_10"] for item in printed["suggestions"])
    assert run_all(printed)


@pytest.mark.parametrize(
    ("family", "options"), [("llama", set()), ("qwen3", {"GATE_UP", "QKV"}), ("deepseek_v3", {"GATE_UP", "MTP"})]
)
def test_mindformers_names_become_those_of_hugging_face(family: str, options: set[str], tmp_path: Path) -> None:
    config, full = MODELS[family][0], weights(family)
    ours = mindformers(family, full, config)
    strategy = cut(ours, config["num_hidden_layers"])
    write_strategy(tmp_path / "run" / "strategy", strategy)
    write_tree(tmp_path / "run" / "ckpt", cut_ranks(strategy, ours, {}), "rank_{rank}/net-1_10.ckpt")
    item = of_aim(suggested(tmp_path / "run" / "ckpt"), "huggingface")
    assert placeholders(item["command"]) == {"TABLE", "CONFIG"}
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "model_type": family}))
    item = of_aim(suggested(tmp_path / "run" / "ckpt"), "huggingface")
    # Without them, gate and up, or q, k and v would be exchanged, and shapes would not show it.
    assert placeholders(item["command"]) == options
    assert any("tokenizer" in each["text"] and "--config" in each["text"] for each in item["missing"])
    run(item, GATE_UP="interleaved", QKV="grouped", MTP="copies")
    expected = write_huggingface(tmp_path / "expected", full, config)
    done("diff", item["command"][3], expected)


def test_a_damaged_configuration_is_a_problem(tmp_path: Path) -> None:
    config, full = MODELS["qwen3"][0], weights("qwen3")
    (write_huggingface(tmp_path / "model", full, config) / "config.json").write_text("{")
    printed = suggested(tmp_path / "model")
    assert printed["model"] is None and "config.json" in printed["problems"][0]["text"]
    assert placeholders(of_aim(printed, "mindspore")["command"]) == {"DST_STRATEGY", "TABLE", "CONFIG"}


@pytest.mark.parametrize("source", ["fp8", "packed/int4_partial_words/checkpoint"])
def test_suggest_dequantizes_quantised_weights(source: str) -> None:
    printed = suggested(FIXTURES / source, "--devices", 2)
    assert run_all(printed) == ["pytorch", "dequantize"]
    assert all("--dequantize" in item["command"] for item in printed["suggestions"])


def test_quantised_weights_without_their_settings_need_the_configuration(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "fp8", tmp_path / "fp8")
    (source / "config.json").unlink()
    printed = suggested(source, "--devices", 2)
    assert "config.json does not exist" in printed["problems"][0]["text"] and printed["suggestions"] == []
    # Another scheme: no program has a use for the codes.
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    printed = suggested(source, "--devices", 2)
    assert "gptq" in printed["problems"][0]["text"] and printed["suggestions"] == []


def test_the_recorded_strategy_of_a_tree_that_is_cut_as_its_source_is_used(tmp_path: Path) -> None:
    strategy = DEMO / "src_strategy.ckpt"
    words: list[Argument] = ["--src-strategy", strategy, "--dst-strategy", "same"]
    done("convert", DEMO / "src_checkpoints", tmp_path / "out", *words)
    printed = suggested(tmp_path / "out")
    assert printed["strategy"] == str(strategy)
    assert all("SRC_STRATEGY" not in item["command"] for item in printed["suggestions"])


def test_the_written_strategy_of_a_tree_that_is_cut_as_a_recorded_layout_is_used(tmp_path: Path) -> None:
    source = FIXTURES / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint"
    done("convert", source, tmp_path / "out", "--dst-strategy", "same")
    printed = suggested(tmp_path / "out")
    assert printed["strategy"] == str(tmp_path / "out" / "reshard-strategy.json") and not printed["problems"]


@pytest.mark.long
def test_commands_for_objects_write_objects(demo: Path, objects: Objects) -> None:
    source = objects.upload(demo / "huggingface", "models/demo")
    item = of_aim(suggested(source, "--devices", 2), "pytorch")
    assert item["command"][3] == objects.path("models/demo-dcp")
    run(item)
    assert "models/demo-dcp/.metadata" in objects.content()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("strategy/src_strategy.ckpt", "is a strategy file, not a checkpoint"),
        ("ranks/rank_3", "is the directory of one rank"),
        ("ranks/rank_3/mlp-2_10.ckpt", "is the file of one rank"),
        ("nothing", "does not exist"),
    ],
)
def test_a_path_without_a_checkpoint_is_an_error(demo: Path, path: str, text: str) -> None:
    fails(3, "suggest", demo / path, texts=[text])


def test_json_and_text_contain_the_same_commands(demo: Path) -> None:
    text = done("suggest", demo / "ranks").out.replace(" \\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    assert commands == [item["command"] for item in suggested(demo / "ranks")["suggestions"]]
