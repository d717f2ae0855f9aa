"""Built-in rules make the strategies that MindSpore compiles for networks of the same families.

The networks of the compiled strategies have short names; here they get those of MindFormers' models.
"""

from __future__ import annotations

import re

import pytest

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.strategies.rules import (
    FullTensor,
    ShardSetting,
    TargetRun,
    builtin_names,
    make_strategy,
    model_tensors,
    parse_rules,
    parse_sizes,
    rules_named,
)
from reshard.strategies.rules.candidates import slices_by_device
from tests import made_cases
from tests.running import done, fails
from tests.strategies.test_made_strategies import CASES, PANGU, as_recorded, pangu_shape

_LLAMA = [(r"\.(wq|wk|wv|wo|w_qkv)\.", r".attention.\1."), (r"\.(w1|w2|w3)\.weight", r".feed_forward.\1.weight")]
_GLM = [
    (r"model\.tok_embeddings", "transformer.embedding"),
    (r"lm_head", "transformer.output_layer"),
    (r"model\.norm_out", "transformer.encoder.final_layernorm"),
    (r"model\.layers", "transformer.encoder.layers"),
    (r"\.(wq|wk|wv)\.", r".self_attention.\1."),
    (r"\.wo\.", ".self_attention.dense."),
    (r"\.w1\.", ".mlp.dense_left."),
    (r"\.w3\.", ".mlp.dense_right."),
    (r"\.w2\.", ".mlp.dense_4h_to_h."),
    (r"attention_norm", "input_layernorm"),
    (r"ffn_norm", "post_attention_layernorm"),
]
_MCORE = [
    (r"model\.tok_embeddings\.embedding_weight", "model.embedding.word_embeddings.weight"),
    (r"lm_head", "model.output_layer"),
    (r"model\.norm_out", "model.decoder.final_layernorm"),
    (r"model\.layers", "model.decoder.layers"),
    (r"\.wq\.", ".self_attention.linear_qkv."),
    (r"\.wk\.", ".self_attention.linear_q_up_proj."),
    (r"\.wv\.", ".self_attention.linear_kv_up_proj."),
    (r"\.wo\.", ".self_attention.linear_proj."),
    (r"\.w1\.", ".mlp.linear_fc1."),
    (r"\.w3\.", ".self_attention.linear_kv."),
    (r"\.w2\.", ".mlp.linear_fc2."),
    (r"attention_norm", "input_layernorm"),
    (r"ffn_norm", "pre_mlp_layernorm"),
    (r"feed_forward\.", "mlp.experts."),
]
_CUT = '[[parameter]]\nmatch = ["*.embedding_weight", "*word_embeddings.weight"]\nmap = ["mp*cp?", "None"]\n'
_HEAD = '[[parameter]]\nmatch = ["lm_head.weight", "transformer.output_layer.weight"]\nmap = ["mp?", "None"]\n'
_TABLES = '[[parameter]]\nmatch = ["*.embedding_table", "head.weight"]\nmap = ["mp", "None"]\n'
_WHOLE = '[[parameter]]\nmatch = ["model.tok*", "lm_head*"]\nmap = ["None", "None"]\n'

FAMILIES: list[tuple[str, str, list[tuple[str, str]], str, str | None]] = [
    # Rules, cases that begin so, their names, what is kept of what the rules leave open, cases left out.
    ("llama", "20_llama", _LLAMA, _CUT + _HEAD, None),
    ("llama", "21_vocabdp", _LLAMA, _WHOLE, None),
    # The network's bias does not opt out, as that of MindFormers' Linear does.
    ("llama", "22_bf16concat", _LLAMA, _CUT + _HEAD, "t0"),
    ("llama", "24_vocab100", _LLAMA, _CUT + _HEAD, None),
    ("llama", "25_cp", _LLAMA, _CUT + _HEAD, None),
    ("glm", "23_kvcap", _GLM, _CUT + _HEAD, None),
    ("mcore", "20_llama", _MCORE, _CUT, None),
    ("mcore", "27_mcoremoe", _MCORE, _CUT, None),
    # Its biases and norms do not opt out, as PanGu-alpha's do.
    ("pangu", "10_", [], _TABLES, "opt"),
]


def renamed(name: str, changes: list[tuple[str, str]]) -> str:
    for before, after in changes:
        name = re.sub(before, after, name)
    return name


def cases_of(start: str, leave_out: str | None) -> list[str]:
    return [name for name in CASES if name.startswith(start) and not (leave_out and leave_out in name)]


PARAMETERS = [
    pytest.param(*family[:1], name, *family[2:4], id=f"{family[0]}-{name}")
    for family in FAMILIES
    for name in cases_of(family[1], family[4])
]


@pytest.mark.parametrize(("builtin", "name", "changes", "preserved"), PARAMETERS)
def test_built_in_rules_make_the_compiled_strategy(
    builtin: str, name: str, changes: list[tuple[str, str]], preserved: str
) -> None:
    """The slices and optimizer shards; MindFormers' newer models write the same cuts in another form."""
    case = made_cases.load(name)
    tensors = [tensor._replace(name=renamed(tensor.name, changes)) for tensor in case.tensors]
    model = model_tensors("shapes", tensors, ITEM_SIZES)
    assert len(model.weights) == len(case.model.weights)
    text = rules_named(builtin).text.replace("[[parameter]]", f"{preserved}[[parameter]]", 1)
    strategy = make_strategy(parse_rules(text, builtin), model, case.target, "rules")
    for stage, compiled in case.compiled().items():
        expected = {renamed(parameter, changes): placed(record.layout()) for parameter, record in compiled.items()}
        actual = {parameter: placed(record.layout()) for parameter, record in strategy[stage].layouts.items()}
        assert actual == expected


@pytest.mark.parametrize(("start", "value"), [("20_llama", "False"), ("21_vocabdp", "true"), ("25_cp", "false")])
def test_a_switch_of_the_configuration_makes_the_compiled_strategy(start: str, value: str) -> None:
    for name in cases_of(start, None):
        case = made_cases.load(name)
        tensors = [tensor._replace(name=renamed(tensor.name, _LLAMA)) for tensor in case.tensors]
        rules = rules_named("llama", {"vocab_emb_dp": value})
        strategy = make_strategy(rules, model_tensors("shapes", tensors, ITEM_SIZES), case.target, "rules")
        for stage, compiled in case.compiled().items():
            assert {parameter: placed(record.layout()) for parameter, record in strategy[stage].layouts.items()} == {
                renamed(parameter, _LLAMA): placed(record.layout()) for parameter, record in compiled.items()
            }


def placed(layout: Layout) -> object:
    return slices_by_device(layout.without_shards()), layout.shard_size, layout.shard_step


def test_layouts_that_depend_on_the_configuration_stay_undecided() -> None:
    """vocab_emb_dp leaves embedding and head whole: rules cannot derive that, and do not guess."""
    case = made_cases.load("20_llama_dp4mp2pp1")
    texts = "(?s)does not settle 2 parameters.*--set vocab_emb_dp=true or --set vocab_emb_dp=false"
    with pytest.raises(StrategyError, match=texts):
        make_strategy(rules_named("llama"), case.model, case.target, "rules")


def test_a_switch_has_one_value() -> None:
    words = ("strategy", "make", "mcore", "out.ckpt", "--shapes", "x", "--sizes", "mp=2")
    for value in ("false", "true"):
        texts = ["--set: vocab_emb_dp is stated twice"]
        fails(2, *words, "--set", "vocab_emb_dp=true", "--set", f"vocab_emb_dp={value}", texts=texts)


def test_built_in_rules_are_listed_and_printed() -> None:
    output = done("strategy", "rules").out
    assert done("strategy", "rules", "--list").out == output
    for name in builtin_names():
        assert f"{name} " in output
        assert done("strategy", "rules", name).out == rules_named(name).text
    fails(2, "strategy", "rules", "lama", texts=["Did you mean llama?"])
    fails(3, "strategy", "make", "lama", "out.ckpt", "--shapes", "x", "--sizes", "mp=2", texts=["Did you mean llama?"])


@pytest.mark.skipif(not PANGU.is_file(), reason="the whole corpus is not on this machine")
def test_the_rules_of_pangu_make_a_production_strategy_record_for_record() -> None:
    compiled = as_recorded(PANGU)
    tensors = [FullTensor(name, pangu_shape(name, record), "Float32") for name, record in compiled.items()]
    whole = '[[parameter]]\nmatch = "*.embedding_table"\nmap = ["None", "None"]\noptimizer_shard = false\n'
    text = rules_named("pangu").text.replace("[[parameter]]", f"{whole}[[parameter]]", 1)
    target = TargetRun(parse_sizes("dp=64,mp=8"), ShardSetting(-1, 0))
    (strategy,) = make_strategy(
        parse_rules(text, "pangu"), model_tensors("shapes", tensors, ITEM_SIZES), target, "rules"
    )
    assert strategy.layouts == compiled
