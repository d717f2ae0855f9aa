"""A small model with packed tensors, and the rules that convert it."""

HIDDEN, HEADS, GROUPS, SIZE, INNER, VOCABULARY, EXPERTS = 8, 4, 2, 2, 8, 5, 2
CONFIG = {"heads": HEADS, "groups": GROUPS, "head_dim": SIZE, "vocabulary": VOCABULARY, "experts": EXPERTS}
RULES = """
[sizes]
heads = "heads"
groups = "groups"
head_dim = "head_dim"
vocabulary = "vocabulary"
experts = "experts"

[numbers]
expert = "experts"

[[rule]]
from = ["model.q", "model.k", "model.v"]
to = "net.qkv"
do = "group_qkv"

[[rule]]
from = ["model.gate", "model.up"]
to = "net.gate_up"
do = { concat = 0 }

[[rule]]
from = "model.down"
to = "net.down"
do = "transpose"

[[rule]]
from = "model.embedding"
to = "net.embedding"
do = { pad = 0, size = "vocabulary", multiple = 4 }

[[rule]]
from = "model.experts.{expert}.up"
to = "net.experts"
do = [{ stack = "expert" }, { reshape = ["experts", "rows", "columns"], to = ["experts*rows", "columns"] }]

[[rule]]
from = "model.norm"
to = "net.norm"
"""
SHAPES: dict[str, tuple[int, ...]] = {
    "model.q": (HEADS * SIZE, HIDDEN),
    "model.k": (GROUPS * SIZE, HIDDEN),
    "model.v": (GROUPS * SIZE, HIDDEN),
    "model.gate": (INNER, HIDDEN),
    "model.up": (INNER, HIDDEN),
    "model.down": (HIDDEN, INNER),
    "model.embedding": (VOCABULARY, HIDDEN),
    **{f"model.experts.{expert}.up": (4, HIDDEN) for expert in range(EXPERTS)},
    "model.norm": (HIDDEN,),
}
