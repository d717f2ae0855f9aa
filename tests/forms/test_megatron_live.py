"""Parts of models that ranks of Megatron and MindSpeed-LLM hold, cut by NumPy and put together by the reader."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.pickles import read_pickle
from reshard.forms.megatron.arguments import configuration_of
from reshard.forms.megatron.common import is_named
from reshard.forms.megatron.stages import stages_of
from reshard.forms.recorded import ProblemError
from tests.forms.legacy_trees import Array, OnNpu, Strided, values, write_rank
from tests.forms.test_megatron_legacy import converted
from tests.running import fails

H, F, E = 6, 8, 4


def rows(array: Array, rank: int, count: int) -> Array:
    return np.array_split(array, count)[rank]


def halves(array: Array, rank: int, count: int) -> Array:
    """The rows of a rank of both halves of fc1."""
    gate, up = np.split(array, 2)
    return np.concatenate([rows(gate, rank, count), rows(up, rank, count)])


def columns(array: Array, rank: int, count: int) -> Array:
    return np.array_split(array, count, axis=1)[rank]


def experts(up: Array, down: Array, kind: str, part: range, rank: int, count: int) -> dict[str, Any]:
    """The experts of a rank.

    Args:
        up: the first layers, [experts, 2F, H].
        down: the second layers, [experts, H, F].
        kind: how they are stored.
        part: the experts of the rank.
        rank: the cut of each.
        count: cuts.
    """
    first = [halves(up[number], rank, count) for number in part]
    second = [columns(down[number], rank, count) for number in part]
    if kind == "grouped":
        return {
            "experts.weight1": np.stack([each.T for each in first]).reshape(H, -1),
            "experts.weight2": np.stack([each.T for each in second]).reshape(-1, H),
        }
    if kind == "stacked":
        return {"experts.linear_fc1.weight": np.stack(first), "experts.linear_fc2.weight": np.stack(second)}
    if kind == "rows":
        return {
            "experts.linear_fc1.weight": np.concatenate(first),
            "experts.linear_fc2.weight": np.concatenate(second),
        }
    names = {
        "sequential": "experts.local_experts.{1}.{0}.weight",
        "te": "experts.{0}.weight{1}",
    }
    return {
        names[kind].format(f"linear_fc{layer}", number): each
        for layer, all_of_layer in ((1, first), (2, second))
        for number, each in enumerate(all_of_layer)
    }


def whole(directory: Path, tmp_path: Path) -> dict[str, Array]:
    return {name: each.array for name, each in converted(directory, tmp_path / "out").items()}


def agree(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].shape == array.shape, name
        assert np.array_equal(actual[name], array), name


@pytest.mark.parametrize("kind", ["grouped", "stacked", "rows", "sequential", "te"])
@pytest.mark.parametrize("division", ["cut", "whole", "extended"])
def test_experts_come_together_however_they_are_stored(kind: str, division: str, tmp_path: Path) -> None:
    """Cut over tensor ranks, whole (etp 1, each pair of ranks once), or dealt over tensor ranks as well."""
    up, down, router = values(1, E, 2 * F, H), values(2, E, H, F), values(3, E, H)
    args = {
        "num_layers": 1,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1 if division == "whole" else 2,
        "moe_tp_extend_ep": division == "extended",
    }
    for tensor in range(2):
        for expert in range(2):
            if division == "whole" and tensor != expert:
                continue
            count = E // 4 if division == "extended" else E // 2
            first = (expert * 2 + tensor) * count if division == "extended" else expert * count
            cut = (tensor, 2) if division == "cut" else (0, 1)
            mine = experts(up, down, kind, range(first, first + count), *cut)
            model = {f"decoder.layers.0.mlp.{name}": each for name, each in mine.items()}
            model["decoder.layers.0.mlp.router.weight"] = router
            write_rank(tmp_path / "tree", f"mp_rank_{tensor:02d}_{expert:03d}", [model], args)
    prefix = "decoder.layers.0.mlp."
    agree(
        whole(tmp_path / "tree", tmp_path),
        {
            f"{prefix}router.weight": router,
            f"{prefix}experts.experts.linear_fc1.weight": up,
            f"{prefix}experts.experts.linear_fc2.weight": down,
        },
    )


@pytest.mark.parametrize("split", [False, True])
def test_latent_attention_of_mindspeed_is_taken_apart(split: bool, tmp_path: Path) -> None:
    heads, nope, rope, of_value, query_rank, kv_rank = 4, 3, 2, 5, 6, 4
    down = values(1, query_rank, H), values(2, kv_rank + rope, H)
    up = values(3, heads * (nope + rope), query_rank), values(4, heads * (nope + of_value), kv_rank)
    norms = values(5, query_rank), values(6, kv_rank), values(7, H)
    args = {"num_layers": 1, "num_attention_heads": heads, "tensor_model_parallel_size": 2}
    prefix = "decoder.layers.0."
    for tensor in range(2):
        inner: dict[str, Any] = {
            "linear_qkv.weight": np.concatenate(down),
            "q_layernorm.weight": norms[0],
            "kv_layernorm.weight": norms[1],
        }
        if split:
            pairs = (("linear_qk_nope", "linear_qk_rope"), ("linear_kv_nope", "linear_v"))
            for names, array in zip(pairs, up):
                of_heads = array.reshape(heads, -1, array.shape[1])
                for name, part in zip(names, (of_heads[:, :nope], of_heads[:, nope:])):
                    inner[f"{name}.weight"] = rows(part.reshape(-1, array.shape[1]), tensor, 2)
        else:
            inner["linear_q_up_proj.weight"] = rows(up[0], tensor, 2)
            inner["linear_kv_up_proj.weight"] = rows(up[1], tensor, 2)
        model = {f"{prefix}self_attention.{name}": each for name, each in inner.items()}
        model[f"{prefix}input_layernorm.weight"] = norms[2]
        write_rank(tmp_path / "tree", f"mp_rank_{tensor:02d}", [model], args)
    agree(
        whole(tmp_path / "tree", tmp_path),
        {
            f"{prefix}input_layernorm.weight": norms[2],
            f"{prefix}self_attention.linear_q_down_proj.weight": down[0],
            f"{prefix}self_attention.linear_kv_down_proj.weight": down[1],
            f"{prefix}self_attention.linear_q_up_proj.weight": up[0],
            f"{prefix}self_attention.linear_kv_up_proj.weight": up[1],
            f"{prefix}self_attention.q_layernorm.weight": norms[0],
            f"{prefix}self_attention.kv_layernorm.weight": norms[1],
        },
    )


def test_prediction_of_more_tokens_has_megatrons_names(tmp_path: Path) -> None:
    """With MindSpeed's names of norms, and a copy of the embedding on the last stage."""
    embedding, norm, mtp_norm, projection = values(1, 8, H), values(2, H), values(3, H), values(4, H, 2 * H)
    args = {"num_layers": 2, "pipeline_model_parallel_size": 2, "mtp_num_layers": 1}
    layer = "self_attention.linear_proj.weight"
    weights = [values(5 + number, H, H) for number in range(3)]
    for stage, model in enumerate(
        (
            {"embedding.word_embeddings.weight": embedding, f"decoder.layers.0.{layer}": weights[0]},
            {
                f"decoder.layers.0.{layer}": weights[1],
                "embedding.word_embeddings.weight": embedding,
                "final_layernorm.weight": norm,
                "mtp.layers.0.eh_proj.weight": projection,
                f"mtp.layers.0.transformer_layer.{layer}": weights[2],
                "mtp.final_layernorms.0.weight": mtp_norm,
            },
        )
    ):
        write_rank(tmp_path / "tree", f"mp_rank_00_{stage:03d}", [model], args)
    agree(
        whole(tmp_path / "tree", tmp_path),
        {
            "embedding.word_embeddings.weight": embedding,
            f"decoder.layers.0.{layer}": weights[0],
            f"decoder.layers.1.{layer}": weights[1],
            "decoder.final_layernorm.weight": norm,
            "mtp.layers.0.eh_proj.weight": projection,
            f"mtp.layers.0.transformer_layer.{layer}": weights[2],
            "mtp.layers.0.final_layernorm.weight": mtp_norm,
        },
    )


@pytest.mark.parametrize("size", [9, 10])
def test_a_vocabulary_may_leave_fewer_rows_to_the_last_rank(size: int, tmp_path: Path) -> None:
    embedding = values(1, size, H)
    part = -(-size // 3)
    for tensor in range(3):
        model = {"embedding.word_embeddings.weight": embedding[tensor * part : (tensor + 1) * part]}
        args = {"num_layers": 0, "tensor_model_parallel_size": 3}
        write_rank(tmp_path / "tree", f"mp_rank_{tensor:02d}", [model], args)
    agree(whole(tmp_path / "tree", tmp_path), {"embedding.word_embeddings.weight": embedding})


@pytest.mark.parametrize("stored", [Strided, OnNpu])
def test_tensors_may_be_transposed_in_memory_or_be_an_npus(stored: Callable[[Array], Any], tmp_path: Path) -> None:
    """A converter saves slices of transposed weights with their strides."""
    projection = values(1, H, F)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    args = {"num_layers": 1, "tensor_model_parallel_size": 2}
    for tensor in range(2):
        write_rank(tmp_path / "tree", f"mp_rank_{tensor:02d}", [{name: stored(columns(projection, tensor, 2))}], args)
    agree(whole(tmp_path / "tree", tmp_path), {name: projection})


def test_a_stage_without_its_layers_is_refused(tmp_path: Path) -> None:
    """No other file shows that they are missing."""
    args = {"pipeline_model_parallel_size": 2, "num_layers": 2}
    model = {"embedding.word_embeddings.weight": values(0, 8, 4), "decoder.layers.0.mlp.router.weight": values(1, 2, 4)}
    write_rank(tmp_path / "src" / "iter_0000001", "mp_rank_00_000", [model], args)
    write_rank(tmp_path / "src" / "iter_0000001", "mp_rank_00_001", [{}], args)
    fails(3, "convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface", texts=["mp_rank_00_001"])


def test_a_parameter_of_unknown_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    for tensor in range(2):
        model = {"decoder.layers.0.self_attention.softmax_sinks": values(tensor, 4)}
        args = {"num_layers": 1, "tensor_model_parallel_size": 2}
        write_rank(tmp_path / "tree", f"mp_rank_{tensor:02d}", [model], args)
    fails(3, "convert", tmp_path / "tree", tmp_path / "out", "--to", "huggingface", texts=["softmax_sinks"])


@pytest.mark.parametrize(
    "args, expected",
    [
        ({"num_layers": 8}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ({"num_layers": 8, "schedules_method": "dualpipev"}, [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]),
        ({"num_layers": 8, "noop_layers": "4,5"}, [[[0, 1], [None, None]], [[2, 3], [4, 5]]]),
        ({"pipeline_model_parallel_layout": "Et*3|(tt|)*2,t|L"}, None),
        ({"pipeline_model_parallel_layout": "Ett|t|(t|)*1,tmL"}, [[[0, 1], [3]], [[2], [4]]]),
        ({"num_layers": 8, "num_virtual_stages_per_pipeline_rank": 4}, None),
    ],
)
def test_layers_of_virtual_stages_are_those_that_megatron_deals(args: dict[str, Any], expected: Any) -> None:
    if expected is None:
        with pytest.raises(ProblemError):
            stages_of(args, 2, 2)
        return
    assert stages_of(args, 2, 2) == tuple(tuple(map(tuple, each)) for each in expected)


@pytest.mark.parametrize(
    "args, expected",
    [
        ({"num_layers": 6}, [2, 2, 2]),
        ({"num_layers": 7, "num_layer_list": "1,4,2"}, [1, 4, 2]),
        ({"num_layers": 7, "decoder_first_pipeline_num_layers": 1}, [1, 3, 3]),
        ({"num_layers": 7, "decoder_last_pipeline_num_layers": 3}, [2, 2, 3]),
        (
            {
                "num_layers": 4,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [1, 2, 1],
        ),
        ({"num_layers": 5, "account_for_embedding_in_pipeline_split": True}, [1, 2, 2]),
        ({"num_layers": 7}, None),
        ({}, None),
        ({"num_layers": 7, "num_layer_list": "1,4"}, None),
    ],
)
def test_uneven_stages_have_the_layers_that_args_state(args: dict[str, Any], expected: Any) -> None:
    if expected is None:
        with pytest.raises(ProblemError):
            stages_of(args, 3)
        return
    stages = stages_of(args, 3)
    assert [len(chunk) for (chunk,) in stages] == expected
    assert [layer for (chunk,) in stages for layer in chunk] == [*range(sum(expected))]


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    per_chunk=st.integers(1, 3),
    empty=st.sets(st.integers(0, 35), max_size=4),
    dual=st.booleans(),
)
def test_every_layer_is_in_one_place(ranks: int, chunks: int, per_chunk: int, empty: set[int], dual: bool) -> None:
    chunks = 2 if dual else chunks
    count = ranks * chunks * per_chunk
    empty = {layer for layer in empty if layer < count}
    args: dict[str, Any] = {"num_layers": count, "noop_layers": sorted(empty) or None}
    if dual:
        args["schedules_method"] = "dualpipev"
    stages = stages_of(args, ranks, chunks)
    layers = [layer for of_rank in stages for chunk in of_rank for layer in chunk]
    assert sorted(layer for layer in layers if layer is not None) == [*range(count - len(empty))]
    assert layers.count(None) == len(empty)
    assert all(len(of_rank) == chunks for of_rank in stages)


@pytest.mark.parametrize("protocol", [2, 4])
def test_dictionaries_with_a_factory_are_plain_ones(protocol: int) -> None:
    """MindSpeed-LLM's converter saves such; the factory is never called."""
    data = pickle.dumps({"model": defaultdict(dict, {"a": 1})}, protocol)
    state = read_pickle(data, is_named)
    assert state == {"model": {"a": 1}}
    with pytest.raises(KeyError):
        state["model"]["b"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("empty", [{1, 3}, "1,3", [1, 3]])
def test_layers_that_do_nothing_have_no_numbers(empty: Any, protocol: int) -> None:
    """MindSpeed-LLM's args have them as a set, its converter's as text."""
    args = read_pickle(pickle.dumps({"num_layers": 4, "noop_layers": empty}, protocol), is_named)
    assert stages_of(args, 2) == (((0, None),), ((1, None),))
    assert configuration_of(args, "model_optim_rng.pt")["num_hidden_layers"] == 2
