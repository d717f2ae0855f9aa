"""Built-in tables: a round trip is the identity and uses every element once, for tiny and real models."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from reshard.errors import NamesError, UsageError
from reshard.layout.views import Region, View
from reshard.names import Applied, apply_rules, builtin_names, rules_named
from tests.names.models import REAL, TINY, dense, fused, table_of
from tests.names.naive import Shapes, arrays_of, assert_equal, made_by, numbered, redone

_OPTIONS: dict[str, list[tuple[str, ...]]] = {
    "llama": [(), ("vocab_multiple=8",), ("output=shared",), ("output=copied",)],
    "qwen2": [(), ("vocab_multiple=8",)],
    "qwen3": [(), ("gate_up=halves",), ("qkv=contiguous", "vocab_multiple=4"), ("output=copied", "vocab_multiple=8")],
    "qwen3_moe": [(), ("gate_up=halves", "qkv=contiguous"), ("vocab_multiple=16",), ("expert_names=fused",)],
    "deepseek_v3": [(), ("mla=joined",), ("gate_up=halves", "vocab_multiple=8"), ("expert_names=fused",)],
    "fused_experts": [(), ("model=lfm2_moe",), ("model=mixtral",)],
    "megatron": [
        ("family=qwen3_moe", "layer_keys=numbered"),
        ("family=qwen3_moe", "layer_keys=numbered", "fc1=apart", "vocab_multiple=8"),
        ("family=qwen3_moe", "layer_keys=numbered", "expert_names=fused"),
    ],
}
_TABLES = [(name, options) for name, each in _OPTIONS.items() for options in each]


def _whole(name: str, options: Sequence[str] = ()) -> str:
    """A table for both ways: MindFormers' names do not show which further tensors Hugging Face's release has."""
    return table_of(name, [*options, "mtp=copies"] if name == "deepseek_v3" else options)


def test_every_built_in_table_is_tested() -> None:
    assert sorted(_OPTIONS) == builtin_names()


@pytest.mark.parametrize(("name", "options"), _TABLES)
def test_a_tiny_model_round_trips_and_uses_each_element_once(name: str, options: Sequence[str]) -> None:
    config, shapes = TINY[name]
    if "output=copied" in options:
        shapes = {tensor: shape for tensor, shape in shapes.items() if tensor != "lm_head.weight"}
    if "expert_names=fused" in options:
        shapes = fused(shapes)
    arrays = numbered(shapes)
    table = rules_named(_whole(name, options))

    applied = apply_rules(table, shapes, config)
    outputs = arrays_of(applied, arrays)
    back = apply_rules(table, {tensor: array.shape for tensor, array in outputs.items()}, config)

    assert not applied.reversed and back.reversed
    assert not applied.dropped and not applied.skipped_state
    assert_equal(redone(applied, arrays), outputs)
    returned = arrays_of(back, outputs)
    assert_equal(redone(back, outputs), returned)
    # Tied tensors are read once, and written twice in reverse.
    for one, other in applied.tied:
        arrays[other] = arrays[one]
    assert_equal(returned, arrays)
    used = np.concatenate([array.ravel() for array in outputs.values()])
    twins = {other for _, other in applied.tied}
    expected = np.concatenate([array.ravel() for tensor, array in arrays.items() if tensor not in twins])
    if "output=copied" in options:
        expected = np.concatenate([expected, arrays["model.embed_tokens.weight"].ravel()])
    np.testing.assert_array_equal(np.sort(used[used > 0]), np.sort(expected))


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(REAL))
def test_a_real_model_round_trips_and_uses_each_element_once(name: str) -> None:
    config, shapes = REAL[name]
    table = rules_named(_whole(name))

    applied = apply_rules(table, shapes, config)
    assert_each_element_once(applied, shapes)
    created = {tensor: each.view.shape for tensor, each in made_by(applied).items()}
    back = apply_rules(table, created, config)
    selected = {one for one, _ in applied.tied}
    assert_each_element_once(
        back, created, {name for name, each in made_by(applied).items() if selected & {*each.sources}}
    )

    assert {tensor: each.view.shape for tensor, each in made_by(back).items()} == shapes
    # The inverse of the result: each tensor is restored.
    for tensor in _one_of_each_kind(shapes):
        assert_itself_again(back, applied, tensor)


def assert_each_element_once(applied: Applied, shapes: Shapes, twice: Collection[str] = ()) -> None:
    """By counting: the regions of every tensor are all of it, and so are those of every source."""
    counts: Counter[str] = Counter()
    for view in made_by(applied).values():
        assert sum(region.volume for region in view.view.regions) == math.prod(view.view.shape)
        for region in view.view.regions:
            counts[view.sources[region.source]] += region.volume
    spare = {other for _, other in applied.tied}
    for name, shape in shapes.items():
        if name not in spare:
            assert counts[name] == math.prod(shape) * (2 if name in twice else 1), name


def assert_itself_again(back: Applied, target: Applied, tensor: str) -> None:
    """A tensor that was made back is the one that it was, at places all over it."""
    created = made_by(back)[tensor]
    twins = {other: one for one, other in target.tied}
    for position in _places(created.view.shape):
        source, place = _at(created.view, position)
        between = made_by(target)[created.sources[source]]
        first, origin = _at(between.view, place)
        assert (between.sources[first], origin) == (twins.get(tensor, tensor), position)


def _one_of_each_kind(shapes: Iterable[str]) -> list[str]:
    last: dict[str, str] = {}
    for name in shapes:
        last[re.sub("[0-9]+", "0", name)] = name
    return [*last.values()]


def _places(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return [*itertools.product(*(sorted({0, size // 3, size * 2 // 3, size - 1}) for size in shape))]


def _at(view: View, position: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The source of an element, and its position in it."""
    actual = [place for region in view.regions for place in _within(region, position)]
    assert len(actual) == 1
    return actual[0]


def _within(region: Region, position: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    box = tuple((place, place + 1) for place in position)
    return [(part.source, part.source_origin) for part in region.within_box(box)]


def test_a_model_whose_output_is_its_embedding_needs_no_head() -> None:
    config, shapes = TINY["qwen3"]
    tied = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}

    applied = apply_rules(rules_named(table_of("qwen3")), tied, {**config, "tie_word_embeddings": True})

    assert "output_layer.weight" not in made_by(applied)
    with pytest.raises(NamesError, match=r"missing: 'lm_head\.weight'"):
        apply_rules(rules_named("qwen3"), tied, config)


def test_settings_of_a_mindformers_configuration_apply() -> None:
    config, shapes = TINY["qwen3"]
    stated = apply_rules(rules_named("qwen3,gate_up=halves,qkv=contiguous"), shapes, config)

    applied = apply_rules(
        rules_named("qwen3"),
        shapes,
        {**config, "use_interleaved_weight_layout_mlp": False, "use_contiguous_weight_layout_attention": True},
    )

    assert made_by(applied) == made_by(stated)
    assert made_by(applied) != made_by(apply_rules(rules_named(table_of("qwen3")), shapes, config))


def test_packing_that_nothing_determines_is_an_error_that_lists_the_choices() -> None:
    config, shapes = TINY["qwen3"]

    with pytest.raises(UsageError) as caught:
        apply_rules(rules_named("qwen3,qkv=contiguous"), shapes, config)
    assert "gate_up=interleaved or gate_up=halves" in str(caught.value) and "qkv=grouped" not in str(caught.value)
    with pytest.raises(UsageError, match="gate_up, qkv"):
        apply_rules(rules_named("qwen3"), shapes, config)
    recorded = {"gate_up": "halves", "qkv": "contiguous"}
    stated = apply_rules(rules_named("qwen3,gate_up=halves,qkv=contiguous"), shapes, config)
    assert made_by(apply_rules(rules_named("qwen3"), shapes, config, recorded=recorded)) == made_by(stated)
    # Names and shapes do not depend on it.
    names = made_by(apply_rules(rules_named("qwen3"), shapes, config, contents=False))
    assert {name: view.view.shape for name, view in names.items()} == {
        name: view.view.shape for name, view in made_by(stated).items()
    }


def test_packing_that_changes_no_element_is_not_needed() -> None:
    """One group of query heads, and one row of gate and of up."""
    config = {**TINY["qwen3"][0], "num_key_value_heads": 1, "intermediate_size": 1}
    shapes = dense(config, norms=True)

    both = [
        apply_rules(rules_named(table), shapes, config)
        for table in ("qwen3", "qwen3,gate_up=halves,qkv=contiguous", "qwen3,gate_up=interleaved,qkv=grouped")
    ]

    arrays = numbered(shapes)
    for applied in both[1:]:
        assert_equal(arrays_of(applied, arrays), arrays_of(both[0], arrays))


@pytest.mark.parametrize("mla", ["separate", "joined"])
def test_names_show_the_attention_of_mindformers_but_not_its_copies(mla: str) -> None:
    config, shapes = TINY["deepseek_v3"]
    stated = rules_named(f"deepseek_v3,gate_up=halves,mla={mla}")
    made = {name: view.view.shape for name, view in made_by(apply_rules(stated, shapes, config)).items()}

    with pytest.raises(UsageError, match=r"mtp must be stated(.|\n)*mtp=copies or mtp=shared or mtp=dropped"):
        apply_rules(rules_named("deepseek_v3,gate_up=halves"), made, config)
    back = apply_rules(rules_named("deepseek_v3,gate_up=halves,mtp=copies"), made, config)

    assert {name: view.view.shape for name, view in made_by(back).items()} == shapes
    # Of the packing, this alone changes names.
    with pytest.raises(UsageError, match="mla must be stated"):
        apply_rules(rules_named("deepseek_v3,vocab_multiple=1"), shapes, config, contents=False)


def test_the_multi_token_prediction_layer_can_be_dropped() -> None:
    config, shapes = TINY["deepseek_v3"]

    applied = apply_rules(rules_named(table_of("deepseek_v3", ["mtp=dropped"])), shapes, config)

    assert not any(name.startswith("mtp.") for name in made_by(applied))
    assert {name for name in shapes if name.startswith("model.layers.3.")} == set(applied.dropped)


def test_the_multi_token_prediction_layer_may_be_absent() -> None:
    """Hugging Face's own code leaves it out, and writes a configuration that counts it."""
    config, shapes = TINY["deepseek_v3"]
    less = {name: shape for name, shape in shapes.items() if not name.startswith("model.layers.3.")}

    table = rules_named(table_of("deepseek_v3"))
    applied = apply_rules(table, less, config)
    back = apply_rules(table, {name: made.view.shape for name, made in made_by(applied).items()}, config)

    assert not any(name.startswith("mtp.") for name in made_by(applied))
    assert {name: view.view.shape for name, view in made_by(back).items()} == less


def test_the_multi_token_prediction_layer_must_be_complete() -> None:
    config, shapes = TINY["deepseek_v3"]
    for name in ("model.layers.3.enorm.weight", "model.layers.3.mlp.experts.1.up_proj.weight"):
        less = {other: shape for other, shape in shapes.items() if other != name}
        with pytest.raises(NamesError, match=f"missing: '{re.escape(name)}'"):
            apply_rules(rules_named(table_of("deepseek_v3")), less, config)


def test_layers_over_the_configured_number_are_an_error() -> None:
    config, shapes = TINY["llama"]

    with pytest.raises(NamesError, match="layer must be less than 2"):
        apply_rules(rules_named("llama"), shapes, {**config, "num_hidden_layers": 2})
    with pytest.raises(NamesError, match=r"missing: 'model\.layers\.3\.input_layernorm\.weight'"):
        apply_rules(rules_named("llama"), shapes, {**config, "num_hidden_layers": 4})


def test_padding_is_printed() -> None:
    config, shapes = TINY["llama"]
    table = rules_named("llama,vocab_multiple=8")

    applied = apply_rules(table, shapes, config)
    back = apply_rules(table, {name: view.view.shape for name, view in made_by(applied).items()}, config)

    assert made_by(applied)["lm_head.weight"].view.shape == (16, 6)
    assert "padded with zeros along dimension 0 from 11 to 16" in " ".join(applied.notes)
    assert "removed" in " ".join(back.notes)


def test_a_directory_of_the_name_does_not_hide_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert rules_named("qwen3").path == "qwen3"
    assert rules_named("qwen3,gate_up=halves").chosen == (("gate_up", "halves"),)


def _with_biases(family: str) -> dict[str, tuple[int, ...]]:
    _, shapes = TINY[family]
    projections = [name for name in shapes if ".self_attn." in name and name.endswith("_proj.weight")]
    biases = {name.removesuffix("weight") + "bias": shapes[name][:1] for name in projections}
    return {**shapes, **biases}


_BIASED = [table_of("qwen3"), table_of("qwen3_moe"), "megatron,family=qwen3,layer_keys=numbered"]


@pytest.mark.parametrize("names", _BIASED)
def test_biases_of_attention_are_there_together(names: str) -> None:
    """Also as config.json states them."""
    family = "qwen3_moe" if "moe" in names else "qwen3"
    table, (config, plain), shapes = rules_named(names), TINY[family], _with_biases(family)
    made = apply_rules(table, shapes, config)
    back = apply_rules(table, {name: view.shape for name, _, view in made.views()}, config)
    assert {name: view.shape for name, _, view in back.views()} == shapes
    without = {name: shape for name, shape in shapes.items() if not name.endswith("o_proj.bias")}
    with pytest.raises(NamesError, match=r"missing: 'model.layers.0.self_attn.o_proj.bias'"):
        apply_rules(table, without, config)
    with pytest.raises(NamesError, match=r"missing: 'model.layers.0.self_attn.q_proj.bias'"):
        apply_rules(table, plain, {**config, "attention_bias": True})
