"""Files of rules: invalid ones are errors that name file and rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NamesError
from reshard.names import apply_rules, parse_rules, read_config, read_rules, rules_named
from tests.layouts import examples

RULE = '[[rule]]\nfrom = ["a.{n}", "b.{n}"]\nto = "c.{n}"\n'
COUNTS = '[sizes]\nk = "k"\n[numbers]\nn = "k"\nm = "k"\n'
TWO = '[[rule]]\nfrom = "a.{n}.{m}"\nto = "b"\n'
OPTION = '[options.x]\nvalues = ["a", "b"]\n'
SIZES = '[sizes]\nheads = "h"\ngroups = "g"\nhead_dim = "d"\n'


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("[", "is not TOML"),
        ("rulez = 1", "'rulez' is unknown. Did you mean rule?"),
        ("rule = 1", "rule must be a list of tables"),
        ("[[rule]]", "has neither from nor to"),
        ('[[rule]]\nfrom = "a"', 'to skip such names, add do = "drop"'),
        ('[[rule]]\nfrom = "a"\nto = "b"\ndo = "drop"', "needs from or to alone"),
        ('[[rule]]\nfrom = 3\nto = "b"', "from must be a text"),
        ('[[rule]]\nfrom = "a"\nto = "b"\nfro = 1', "'fro' is unknown. Did you mean from?"),
        (RULE, "makes 2 tensors, and to has 1 names"),
        (RULE + 'do = "concatt"', "there is no operation 'concatt'. Did you mean concat?"),
        (RULE + "do = 3", "is not an operation such as"),
        (RULE + "do = { concat = -1 }", "-1 is not a dimension"),
        (RULE + "do = { concat = 0, part = [] }", "'part' is unknown. Did you mean parts?"),
        (RULE + 'do = { concat = 0, parts = ["1"] }', "parts must be a list of 2 sizes"),
        (RULE + 'do = { concat = 0, parts = ["x", "rest"] }', "x is not a size"),
        (RULE + 'do = ["concat", "concat"]', "concat needs several tensors"),
        (RULE + 'do = "split"', "split takes one tensor, not 2"),
        (SIZES + RULE + 'do = "group_qkv"', "group_qkv needs three tensors"),
        (RULE + 'do = ["concat", { stack = "n" }]', "{n} must be on both sides, or on one"),
        (RULE + 'do = ["concat", { stack = "m" }]', "{m} must be on both sides"),
        (RULE + 'do = ["concat", { transpose = [0, 2] }]', "is not an order of dimensions"),
        (RULE + 'do = ["concat", { reshape = ["x"], to = ["y"] }]', "is not a size and is in only one shape"),
        (RULE + 'do = ["concat", { reshape = ["x+1"], to = ["y"] }]', "is not a product of sizes"),
        (RULE + 'do = ["concat", { pad = 0, size = "1" }]', "pad needs multiple"),
        (RULE + 'do = ["concat", "copy"]', "copy needs one tensor"),
        ('[[rule]]\nfrom = "a.{n}"\nto = "b"', "{n} must be on both sides"),
        ('[[rule]]\nfrom = "a.{n"\nto = "b"', "an unmatched brace"),
        ('[[rule]]\nfrom = "a.{n}{m}"\nto = "b"', "need a text between them"),
        ('[[rule]]\nfrom = "a1{n}"\nto = "b"', "must not be next to a digit"),
        ('[[rule]]\nfrom = "a.{n}.{n}"\nto = "b.{n}"', "has {n} twice"),
        ('[[rule]]\nfrom = "a.{n+q}"\nto = "b.{n}"', "q is not a size"),
        ('[[rule]]\nfrom = "a.*"\nto = "b"', "different numbers of stars"),
        ('[[rule]]\nfrom = ["a.{n}", "b"]\nto = "b.{n}"\ndo="concat"', "differ in numbers or stars"),
        ('[[rule]]\nfrom = ["a", "a"]\nto = "b"\ndo="concat"', "has a name twice"),
        ('[[rule]]\nfrom = "a"\nto = "b"\nwhen = "x=y"', "is not an option and a value"),
        ('[[rule]]\nfrom = "a"\nto = "b"\nchoice = "x"', "choice and case go together"),
        ('[[rule]]\nfrom = "a.*"\nto = "b.*"\nchoice = "x"\ncase = "y"', "must not have stars"),
        ('[[rule]]\nfrom = "a"\nto = "b"\noptional = 1', "optional must be true or false"),
        ("[sizes]\nx = []", "sizes.x: is empty"),
        ('[sizes]\nX = "x"', "must be a name of small letters"),
        ('[sizes]\nx = "a b"', "is not a product of sizes"),
        ('[numbers]\nlayer = "layers"', "layers is not a size"),
        ("[options]\nx = 1", "must be a table"),
        ('[options.x]\nvalues = ["a"]\ndefault = "b"', "default must be a"),
        ('[options.x]\nvalues = ["a"]\nconfig_values = { true = "b" }', "'b' must be a"),
        ('[options.x]\nvalues = ["a"]\nname_values = { "n.*" = "a" }', "must not have stars"),
        ('[options.x]\nvalues = ["a"]\nname_values = { "n.{=q}" = "a" }', "must not have stars or unknown sizes"),
        ('[sizes]\nx = "x"\n[options.x]\ndefault = 1', "is the name of a size, too"),
        ('[[blocks.b]]\nfrom = "x"', "lacks from or to"),
        (
            '[[blocks.b]]\nfrom = "x"\nto = "y"\ndo = "concatt"\n[[rule]]\nfrom = "{b}"\nto = "{b}"',
            "no operation 'concatt'",
        ),
        (
            TWO + 'do = [{ stack = "m" }, { stack = "n" }]',
            "m is stacked with another number, and [numbers] has no count",
        ),
        (COUNTS + TWO + 'do = [{ stack = "n" }, { stack = "m" }, { stack = "n" }]', "stacks a number twice"),
        (OPTION + '[[rule]]\nfrom = "a"\nto = "b"\nwhen = "x!=c"', "x is one of a, b"),
        ('sides = ["a"]', "must be two different names"),
        ('direction = "back"', "direction: must be either or forward"),
    ],
)
def test_invalid_rules_are_an_error(text: str, texts: str) -> None:
    with pytest.raises(NamesError) as caught:
        parse_rules(text, "mine.toml")
    assert texts in str(caught.value)
    assert str(caught.value).startswith("mine.toml")


_PIECES = st.sampled_from(
    [
        *(RULE, SIZES, "[[rule]]\n", 'do = "concat"\n', "do = [", '{ stack = "n" }', ", ", "]\n", "}", '"', "0", "-1"),
        *('from = "*.w"\n', 'to = "*.v"\n', "[options.x]\n", 'values = ["a"]\n', "[blocks]\n", "[numbers]\n", "{n}"),
        *("1979-05-27", "nan", "x = ", "{ transpose = ", "when = "),
    ]
)


@examples(300)
@given(st.lists(_PIECES, max_size=12).map("".join))
def test_any_rule_file_is_read_or_refused(text: str) -> None:
    try:
        rules = parse_rules(text, "any.toml")
        apply_rules(rules, {"a.0": (2, 3), "b.0": (2, 3), "x.w": (4,)}, {"h": 2})
    except NamesError:
        pass


def test_rule_files_that_are_not_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(NamesError, match="file of rules is missing"):
        read_rules(str(tmp_path / "absent.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(NamesError, match="is not UTF-8"):
        read_rules(str(tmp_path / "binary.toml"))
    with pytest.raises(NamesError, match="is a directory"):
        read_rules(str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_an_invalid_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NamesError, match=r"config.json: is damaged: (it|NaN)"):
        read_config(str(tmp_path / "config.json"))


def test_a_path_to_a_file_named_like_a_built_in_table_selects_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").write_text('title = "mine"\n')
    assert rules_named("llama").title == "mine"
    assert rules_named("qwen2").title.startswith("Qwen2")
