"""The table in docs/names.md equals the built-in one for the same weights in another packing."""

from __future__ import annotations

import numpy as np

from docs.tools.pages import ROOT, blocks
from reshard.names import apply_rules, parse_rules, rules_named
from tests.names.models import dense, table_of
from tests.names.naive import arrays_of, assert_equal, numbered

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
}


def test_the_example_of_an_own_table_converts() -> None:
    page = blocks((ROOT / "docs" / "names.md").read_text(encoding="utf-8"))
    [text] = [block.text for block in page if block.value == "phi3.toml"]
    separate = numbered(dense(CONFIG))
    packed = {name: array for name, array in separate.items() if "_proj" not in name}
    for layer in ("model.layers.0", "model.layers.1"):
        for place, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            room = place.split(".")[0]
            arrays = [separate[f"{layer}.{room}.{part}_proj.weight"] for part in parts]
            packed[f"{layer}.{place}.weight"] = np.concatenate(arrays)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            packed[f"{layer}.{name}"] = separate[f"{layer}.{name}"]
    shapes = {name: array.shape for name, array in packed.items()}
    table = parse_rules(text, "phi3.toml")

    outputs = arrays_of(apply_rules(table, shapes, CONFIG), packed)

    # Of the same model, Qwen3 has two norms more.
    more = {f"model.layers.{layer}.self_attn.{one}_norm.weight": (3,) for layer in (0, 1) for one in "qk"}
    twin = apply_rules(rules_named(table_of("qwen3")), {**dense(CONFIG), **more}, CONFIG)
    everything = {**separate, **{name: np.zeros(shape, np.int64) for name, shape in more.items()}}
    norms = ("q_layernorm.weight", "k_layernorm.weight")
    expected = {name: array for name, array in arrays_of(twin, everything).items() if not name.endswith(norms)}
    assert_equal(outputs, expected)
    back = apply_rules(table, {name: array.shape for name, array in outputs.items()}, CONFIG)
    assert_equal(arrays_of(back, outputs), packed)
