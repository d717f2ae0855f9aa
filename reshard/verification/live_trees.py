"""Legacy trees of Megatron: files name layers by number, norms as their kind of layers does, and hold copies.

To compare a written tree, tensors of all layers are divided, aliases of norms get one name, and every copy is compared
with what it is a copy of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from reshard.forms.recorded import ChunkedCheckpoint
from reshard.names.operations import SizedOperation
from reshard.strategies import Strategy
from reshard.verification.operations import DerivedTensor
from reshard.verification.stored import Content, Source, stored_source

_STACKED = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(?![0-9]+\.)(.+)")
# The same norm beside a linear layer and within it. Queries and keys have norms of other names and meanings, where no
# projection leads up to them.
_ALIASES = (
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r".q_layernorm.\1"),
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r".kv_layernorm.\1"),
)


def as_layers(source: Source, written: Source) -> Source:
    """A source with a tensor for each layer, and norms under the names that the tree has them under."""
    in_tree = {_one_name(name): name for name in written.tensors}
    tensors: dict[str, Content] = {}
    for content in source.tensors.values():
        for each in _layers(content):
            name = in_tree.get(_one_name(each.name), each.name)
            tensors[name] = each if name == each.name else replace(each, name=name)
    return replace(source, tensors=tensors, model_names={name: name for name in tensors})


def _one_name(name: str) -> str:
    for alias, other in _ALIASES:
        name = alias.sub(other, name)
    return name


def _layers(content: Content) -> Iterator[Content]:
    match = _STACKED.fullmatch(content.name)
    if match is None:
        yield content
        return
    count = content.shape[0]
    unstack = SizedOperation("unstack", count=count)
    for layer in range(count):
        name = f"{match[1]}{layer}.{match[2]}"
        yield DerivedTensor(
            name, content.dtype, content.item_size, content.shape[1:], (content,), (unstack,), layer, content.cast
        )


def with_copies(source: Source, written: Source) -> tuple[Source, Source]:
    """Source and tree with the copies that the tree holds, each to be compared as what it is a copy of."""
    checkpoint = written.checkpoint
    assert isinstance(checkpoint, ChunkedCheckpoint)
    tensors, expected = dict(checkpoint.tensors), dict(source.tensors)
    for equal in checkpoint.tied:
        name = equal.representative.name
        for copy in equal.copies:
            if copy.name in tensors or name not in source.tensors:
                continue
            tensors[copy.name] = copy
            expected[copy.name] = replace(source.tensors[name], name=copy.name)
    written = stored_source(replace(checkpoint, tensors=tensors), Strategy.none())
    return replace(source, tensors=expected, model_names={name: name for name in expected}), written
