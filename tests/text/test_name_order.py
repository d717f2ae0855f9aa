"""The order of names: layers by number, other names unchanged."""

from __future__ import annotations

import random

from reshard.text.names import layers_in_order, natural_order


def test_files_are_in_the_order_of_their_numbers() -> None:
    assert natural_order(["part10.s", "part9.s", "part1.s", "hyper.s"]) == ["hyper.s", "part1.s", "part9.s", "part10.s"]
    assert natural_order(["a", "1" * 5000, "2"]) == ["2", "1" * 5000, "a"]


def test_layers_are_sorted_by_number_and_other_names_keep_their_order() -> None:
    names = ["lm_head", "layers.1.b", "layers.10.a", "layers.2.b", "layers.2.a", "embed", "layers.1.a", "norm"]
    assert layers_in_order(names) == [
        *("lm_head", "layers.1.b", "layers.1.a", "layers.2.b", "layers.2.a", "layers.10.a", "embed", "norm"),
    ]


def test_numbers_within_layers_are_sorted() -> None:
    names = [
        f"layers.{layer}.experts.{expert}.w{which}" for layer in range(3) for expert in range(11) for which in (1, 3, 2)
    ]
    shuffled = random.Random(0).sample(names, len(names))
    assert layers_in_order(shuffled) == [
        f"layers.{layer}.experts.{expert}.w{which}" for layer in range(3) for expert in range(11) for which in (1, 2, 3)
    ]


def test_the_order_depends_only_on_the_names() -> None:
    names = ["a.01.x", "a.1.x", "a.1", "a", "a." + "9" * 5000, "", "1", "a.1.x.1"]
    assert sorted(layers_in_order(names)) == sorted(names)
    assert layers_in_order(layers_in_order(names)) == layers_in_order(names)
