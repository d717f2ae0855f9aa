"""Rules that do not match a checkpoint: one error lists all problems, with the nearest names."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.errors import NamesError, ReshardError, UsageError
from reshard.names import Configuration, NameRules, apply_rules, parse_renames, parse_rules, rules_named
from tests.corpus import FIXTURES
from tests.names.models import TINY, table_of
from tests.names.naive import arrays_of, assert_equal, made_by, numbered
from tests.running import Argument, done, fails, warns

QWEN3, SHAPES = TINY["qwen3"]
NAMES = table_of("qwen3")
PACKING = table_of("qwen3")[len("qwen3") :]
MIXTURE, EXPERTS = TINY["qwen3_moe"]


def without(shapes: Mapping[str, tuple[int, ...]], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name not in names}


def refused(
    rules: NameRules, shapes: Mapping[str, tuple[int, ...]], config: Any, texts: list[str], **options: Any
) -> None:
    with pytest.raises(ReshardError) as caught:
        apply_rules(rules, shapes, config, **options)
    for words in texts:
        assert words in str(caught.value)


def test_unknown_and_missing_names_are_listed_with_the_nearest() -> None:
    shapes = without(SHAPES, "model.layers.1.mlp.up_proj.weight")
    shapes.update({"model.layers.1.mlp.upproj.weight": (5, 6), "extra.w": (2,)})
    refused(
        rules_named("qwen3"),
        shapes,
        QWEN3,
        [
            "no rule matches 'model.layers.1.mlp.upproj.weight'; did you mean 'model.layers.{layer}.mlp.up_proj.wei",
            "no rule matches 'extra.w'",
            "missing: 'model.layers.1.mlp.up_proj.weight'; is it 'model.layers.1.mlp.upproj.weight'?",
        ],
    )


STARRED = """
[sizes]
layers = "num_hidden_layers"
[numbers]
layer = "layers"
[[rule]]
from = "m.{layer}.dense.*"
to = "x.{layer}.fc.*"
[[rule]]
from = ["m.{layer}.q.*", "m.{layer}.k.*"]
to = "x.{layer}.qk.*"
do = { concat = 0 }
[[rule]]
from = "m.{layer}.extra.*"
to = "x.{layer}.more.*"
optional = true
"""
STARRED_NAMES = [
    f"m.{layer}.{part}.{text}"
    for layer in range(3)
    for part in ["dense", "q", "k", "extra"]
    for text in ("weight", "a.b")
]


@given(st.sets(st.sampled_from(STARRED_NAMES)))
def test_a_star_matches_the_same_names_for_every_number(left_out: set[str]) -> None:
    table = parse_rules(STARRED, "t.toml")
    shapes = {name: (2, 2) for name in STARRED_NAMES if name not in left_out}
    assume(shapes)
    layers = range(3)
    texts: dict[tuple[str, ...], set[str]] = {("dense",): set(), ("q", "k"): set(), ("extra",): set()}
    for name in shapes:
        _, _, part, text = name.split(".", 3)
        next(actual for parts, actual in texts.items() if part in parts).add(text)
    missing = {
        f"m.{layer}.{part}.{text}"
        for parts, expected in texts.items()
        for part in parts
        for text in expected
        for layer in layers
    } - shapes.keys()
    unfit = {parts for parts, expected in texts.items() if not expected} - {("extra",)}
    if not missing and not unfit:
        assert made_by(apply_rules(table, shapes, {"num_hidden_layers": 3}))
        return
    with pytest.raises(NamesError) as caught:
        apply_rules(table, shapes, {"num_hidden_layers": 3})
    message = str(caught.value)
    assert ("missing: " in message) == bool(missing)
    for parts in unfit:
        assert f"no name matches 'm.{{layer}}.{parts[0]}.*'" in message


def test_a_rename_may_match_some_layers_only() -> None:
    shapes = {"m.0.a.w": (2,), "m.0.b.w": (2,), "m.1.a.w": (2,)}
    assert set(made_by(apply_rules(parse_renames(["m.{layer}.*=n.{layer}.*"]), shapes))) == {
        "n.0.a.w",
        "n.0.b.w",
        "n.1.a.w",
    }


def test_a_missing_configuration_is_an_error_where_a_size_is_needed() -> None:
    refused(rules_named("qwen3"), SHAPES, None, ["need the size heads", "num_attention_heads", "--config FILE"])
    less = {key: value for key, value in QWEN3.items() if key != "num_attention_heads"}
    less["num_attention_head"] = 4
    refused(rules_named("qwen3"), SHAPES, less, ["does not give the size heads", "'num_attention_head'"])


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"num_key_value_heads": 4}, "groups*head_dim = 12"),
        ({"head_dim": 5}, "contradict"),
        # As many rows in all, but other heads.
        ({"num_attention_heads": 2, "num_key_value_heads": 3}, "contradict"),
        ({"head_dim": None, "hidden_size": 7}, "7/4, no whole number"),
        ({"head_dim": "3"}, "head_dim is '3', which is not a size"),
        ({"vocab_size": 12}, "vocab = 12"),
        ({"num_hidden_layers": 2}, "layer must be less than 2"),
        ({"num_hidden_layers": 1 << 40}, "and perhaps more"),
        ({"use_interleaved_weight_layout_mlp": "maybe"}, "is not a value of gate_up"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_an_error(changed: dict[str, Any], texts: str) -> None:
    config = Configuration({**QWEN3, **changed}, "there/config.json")
    refused(rules_named("qwen3"), SHAPES, config, [texts])


def test_experts_that_are_missing_or_too_many_are_an_error() -> None:
    table = rules_named(table_of("qwen3_moe"))
    refused(table, EXPERTS, {**MIXTURE, "num_experts": 4}, ["missing: 'model.layers.0.mlp.experts.3.gate_proj.weight'"])
    refused(table, EXPERTS, {**MIXTURE, "num_experts": 2}, ["expert must be less than 2, by config.json"])
    created = {name: each.view.shape for name, each in made_by(apply_rules(table, EXPERTS, MIXTURE)).items()}
    refused(table, created, {**MIXTURE, "num_experts": 4}, ["is not [experts*hidden, columns] with experts 4"])
    refused(table, created, {**MIXTURE, "num_experts": 2}, ["is not [experts*hidden, columns] with experts 2"])


def test_a_layer_with_dense_weights_and_experts_is_an_error() -> None:
    table = rules_named(table_of("qwen3_moe"))
    both = {**EXPERTS, "model.layers.0.mlp.down_proj.weight": (6, 5)}
    refused(table, both, MIXTURE, ["mlp: both experts and dense are present for layer 0"])
    neither = {name: shape for name, shape in EXPERTS.items() if ".layers.1.mlp." not in name}
    refused(table, neither, MIXTURE, ["mlp: none of experts, dense is present for layer 1"])


def test_names_of_both_sides_or_neither_leave_the_direction_open() -> None:
    turned = parse_rules('[[rule]]\nfrom = "*.w"\nto = "*.w"\ndo = "transpose"', "t.toml")
    refused(turned, {"a.w": (2, 3)}, None, ["match the checkpoint as left as well as right", "--reverse"])
    assert made_by(apply_rules(turned, {"a.w": (2, 3)}, reverse=True))["a.w"].view.shape == (3, 2)
    refused(rules_named("qwen3"), {"something": (2, 2)}, QWEN3, ["match none of the checkpoint's 1 weights"])


def test_a_name_in_two_rules_is_ambiguous() -> None:
    rules = parse_renames(["model.*=net.*", "*.weight=*.w"])
    refused(rules, SHAPES, None, ["more than one rule matches ('model.*', '*.weight')"])
    refused(parse_renames(["*a*=*b*"]), {"xaxax": (1,)}, None, ["more than one rule matches ('*a*'): 'xaxax'"])
    with pytest.raises(NamesError) as caught:
        apply_rules(parse_renames(["a=x", "a=y"]), {"a": (1,)}, None)
    assert "more than one rule matches ('a'): 'a'" in str(caught.value)
    assert "missing" not in str(caught.value) and "no name matches" not in str(caught.value)


def test_two_tensors_of_one_name_are_an_error() -> None:
    refused(parse_renames(["a=b"]), {"a": (1, 2), "b": (1, 2)}, None, ["would be made more than once ('a', 'b'): 'b'"])


def test_a_rename_without_a_match_is_an_error() -> None:
    refused(parse_renames(["a.ww=b"]), {"a.w": (1, 2)}, None, ["no name matches 'a.ww'; did you mean 'a.w'?"])
    refused(parse_renames(["a.{x}=b.{x}"]), {"a.w": (1, 2)}, None, ["no name matches 'a.{x}'"])


@pytest.mark.parametrize("text", ["a", "=b", "a=", "a.*=b", "a.{layer}=b.*", "{=x}=b", "**=c**", "a{1}=b{1}"])
def test_an_invalid_rename_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError):
        parse_renames([text])


def test_renames_keep_other_names_and_states_follow_their_weights() -> None:
    shapes = {"model.a.w": (2, 3), "adam_m.model.a.w": (2, 3), "head": (4,), "adam_m.head": (4,), "global_step": (1,)}

    applied = apply_rules(parse_renames(["model.*=net.*", "head=out"]), shapes)

    created = {name: each.sources for name, each in made_by(applied).items()}
    assert created == {
        "net.a.w": ("model.a.w",),
        "adam_m.net.a.w": ("adam_m.model.a.w",),
        "out": ("head",),
        "adam_m.out": ("adam_m.head",),
        "global_step": ("global_step",),
    }


def test_optimizer_state_is_skipped_by_default() -> None:
    shapes = {**SHAPES, **{f"adam_m.{name}": shape for name, shape in SHAPES.items()}, "global_step": (1,)}
    table, arrays = rules_named(table_of("qwen3")), numbered(shapes)

    alone = apply_rules(table, shapes, QWEN3)
    applied = apply_rules(table, shapes, QWEN3, optimizer=True)
    weights, states = arrays_of(alone, arrays), arrays_of(applied, arrays)

    assert len(alone.skipped_state) == len(SHAPES)
    assert not applied.skipped_state
    assert_equal({"global_step": weights.pop("global_step")}, {"global_step": arrays["global_step"]})
    # The running numbers of the states are those of the weights, so much later.
    later = arrays["adam_m.lm_head.weight"].min() - arrays["lm_head.weight"].min()
    moved = {f"adam_m.{name}": array + later for name, array in weights.items()}
    assert_equal({name: array for name, array in states.items() if name.startswith("adam_m.")}, moved)
    back = apply_rules(table, {name: array.shape for name, array in states.items()}, QWEN3, optimizer=True)
    assert_equal(arrays_of(back, states), arrays)


def test_incomplete_state_or_state_of_another_shape_is_an_error() -> None:
    more = {"adam_m.model.layers.0.self_attn.q_proj.weight": (12, 6), "exp_avg_sq_row.lm_head.weight": (11,)}
    refused(
        rules_named("qwen3"),
        {**SHAPES, **more},
        QWEN3,
        [
            "missing: 'adam_m.model.layers.0.self_attn.k_proj.weight'",
            "state of another shape than its weight cannot follow it: 'exp_avg_sq_row.lm_head.weight'",
        ],
        optimizer=True,
    )


def test_rules_can_be_pickled() -> None:
    table = rules_named("deepseek_v3,mla=joined")
    assert pickle.loads(pickle.dumps(table)) == table


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        ("qwen4", "no built-in table has this name. Did you mean qwen3?"),
        ("qwen3,gate_up=halvs", "gate_up must be one of interleaved, halves"),
        ("qwen3,gateup=halves", "Did you mean gate_up?"),
        ("qwen3,vocab_multiple=many", "vocab_multiple must be a number"),
        ("qwen3,qkv=grouped,qkv=grouped", "qkv is stated twice"),
        ("none.toml", "file of rules is missing"),
    ],
)
def test_an_unknown_table_is_an_error(typed: str, texts: str) -> None:
    with pytest.raises(ReshardError, match=texts):
        rules_named(typed)


def test_heads_that_fit_only_the_packed_tensor_are_an_error_in_reverse() -> None:
    table = rules_named(table_of("qwen3"))
    created = {name: each.view.shape for name, each in made_by(apply_rules(table, SHAPES, QWEN3)).items()}
    wrong = {**QWEN3, "num_attention_heads": 2, "num_key_value_heads": 3}
    refused(table, created, wrong, ["shape [6, 12] is not [hidden, heads*head_dim] with heads 2, head_dim 3"])


@pytest.mark.parametrize("target", [["--dst-strategy", "none"], ["--to", "megatron"]])
@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3"])
def test_the_table_of_another_family_is_answered_with_that_of_config_json(
    family: str, target: list[str], tmp_path: Path
) -> None:
    convert: list[Argument] = ["convert", FIXTURES / "models" / "qwen3", tmp_path / "out", *target]
    assert "--exclude" not in fails(3, *convert, "--names", family, texts=["model_type qwen3: --names qwen3"]).err
    done(*convert, "--names", "qwen3" if "megatron" in target else NAMES)
    verify: list[Argument] = ["verify", tmp_path / "out", "--src", FIXTURES / "models" / "qwen3", "--names", family]
    assert "--exclude" not in fails(3, *verify, texts=["model_type qwen3: --names qwen3"]).err


def test_weights_left_out_with_the_table_of_another_family_are_a_warning(tmp_path: Path) -> None:
    convert: list[Argument] = ["convert", FIXTURES / "models" / "qwen3", tmp_path / "out", "--dst-strategy", "none"]
    result = done(*convert, "--names", "llama", "--exclude", "*.q_norm.weight", "--exclude", "*.k_norm.weight")
    warns(result, "warning:", "--names qwen3", "8 left out by --exclude")
    assert "dropped by a rule" not in result.err
