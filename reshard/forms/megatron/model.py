"""The tensors of a model under Megatron's keys: what they show of its arguments, and which objects belong to them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.dtypes import TORCH_NAMES
from reshard.checkpoints.formats.pickles import inert_class
from reshard.errors import CheckpointError, NamesError
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT, STATE, place_of
from reshard.forms.megatron.origin import numbers_layers
from reshard.layout.views import View
from reshard.text.messages import listing, quoted

STATES = ("exp_avg", "exp_avg_sq", "param")
"""What an optimizer keeps of each parameter: moments, and the master copy."""

EXTRA = "_extra_state"
"""The last part of the name of an object that belongs to a module of Transformer Engine."""

_ALL_EXPERTS = re.compile(r"\.experts\.experts\.(?![0-9]+\.)")
# Models of one kind of layer, and those beside which there are others.
_SIZED, _OTHER_MODEL = re.compile(r"(?:decoder|embedding|output_layer|mtp)\."), re.compile(r"encoder\.")
_OF_TOKENS = re.compile(f"(?:{re.escape(EMBEDDING)}|{re.escape(OUTPUT)})$")
_ROOTS = ("decoder.", "encoder.", "embedding.", "output_layer.", "mtp.")
# Parameters of modules that have an object, and modules that have none.
_PARAMETERS = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
# Halves of a gated linear under keys of their own.
_APART = ("weight_w", "weight_v", "bias_w", "bias_v")
_WITHOUT_OBJECT = re.compile(r"(?:^|\.)(?:embedding\..*|output_layer|router|position_embeddings|word_embeddings)$")
# Buffers have no optimizer state.
_BUFFERS = (".expert_bias", ".local_tokens_per_expert")


def _queries(args: Mapping[str, Any]) -> int | None:
    """Columns of the projection after attention."""
    heads, size = args.get("num_attention_heads"), args.get("kv_channels")
    size = args.get("v_head_dim") if args.get("multi_latent_attention") else size
    return heads * size if type(heads) is int and type(size) is int else None


def _rows_of_qkv(args: Mapping[str, Any]) -> int | None:
    heads, size = args.get("num_attention_heads"), args.get("kv_channels")
    grouped = args.get("group_query_attention")
    groups = args.get("num_query_groups") if grouped or grouped is None else heads
    if args.get("multi_latent_attention") or args.get("attention_output_gate"):
        return None
    known = type(heads) is int and type(size) is int and type(groups) is int
    return (heads + 2 * groups) * size if known else None  # type: ignore[operator]


# Dimensions of weights that arguments determine: the end of their names, the dimension, counted from the last, the
# arguments, and their number; None where it is the one argument.
_SIZES: tuple[tuple[str, int, str, Callable[[Mapping[str, Any]], int | None] | None], ...] = (
    (EMBEDDING, -2, "padded_vocab_size", None),
    (EMBEDDING, -1, "hidden_size", None),
    (OUTPUT, -2, "padded_vocab_size", None),
    (".mlp.linear_fc2.weight", -1, "ffn_hidden_size", None),
    (".mlp.router.weight", -2, "num_experts", None),
    (".mlp.experts.experts.linear_fc2.weight", -3, "num_experts", None),
    (".mlp.experts.experts.linear_fc2.weight", -1, "moe_ffn_hidden_size", None),
    (".mlp.shared_experts.linear_fc2.weight", -1, "moe_shared_expert_intermediate_size", None),
    (".self_attention.linear_proj.weight", -1, "num_attention_heads and the size of a head", _queries),
    (
        ".self_attention.linear_qkv.weight",
        -2,
        "num_attention_heads, num_query_groups (of group_query_attention) and kv_channels",
        _rows_of_qkv,
    ),
)


class Model:
    """Tensors to be written, under Megatron's keys.

    Args:
        tensors: all tensors by name, with optimizer state.
        place: the source, for messages.
    """

    def __init__(self, tensors: Mapping[str, GlobalTensor], place: str) -> None:
        self._place = place
        self.tensors = tensors
        self.weights = [name for name in tensors if not name.startswith(STATE)]
        self.has_optimizer = len(self.weights) < len(tensors)
        self.has_experts = any(".mlp.experts." in name for name in self.weights)

    @property
    def layers(self) -> int | None:
        """How many layers there are."""
        layers = self._layers()
        return None if layers is None else layers[1]

    @property
    def has_numbered_layers(self) -> bool:
        """Whether names have the numbers of layers."""
        return any(place_of(name).layer is not None for name in self.weights)

    def content(self) -> dict[str, bool]:
        """What Megatron has to know of the names to ask for the same."""
        apart = any(name.rpartition(".")[2] in _APART for name in self.weights)
        # It reads numbers also where all layers are alike then.
        return {
            "singleton_local_shards": apart,
            **({"non_homogeneous_layers": True} if self.has_numbered_layers else {}),
        }

    def check_names(self) -> None:
        """Refuse weights under other names than Megatron's."""
        others = [name for name in self.weights if not name.startswith(_ROOTS)]
        if others and len(others) == len(self.weights):
            raise NamesError(
                f"{self._place}: names such as {quoted(others[0])} are not Megatron's",
                file=self._place,
                hint="add --names with the table of the model: `reshard names list`",
            )

    def check_optimizer(self) -> None:
        """Refuse optimizer state of some parameters or of some kinds only: Megatron loads none of it then."""
        parameters = {name for name in self.weights if not name.endswith(_BUFFERS)}
        for kind in STATES if self.has_optimizer else ():
            prefix = f"{STATE}{kind}."
            held = {name[len(prefix) :] for name in self.tensors if name.startswith(prefix)}
            lacking = sorted(parameters - held)
            if lacking:
                raise CheckpointError(
                    f"{self._place}: {prefix}* is missing of {len(lacking)} parameters: {listing(lacking)}",
                    file=self._place,
                    parameter=lacking[0],
                    hint="Megatron loads the optimizer as a whole: convert weights alone with --exclude 'optimizer.*'",
                )
            others = sorted(name for name in held if self.tensors[prefix + name].dtype != "Float32")
            if others:
                raise CheckpointError(
                    f"{self._place}: {prefix}{others[0]} is {self.tensors[prefix + others[0]].dtype}, and Megatron has "
                    "optimizer state in Float32",
                    file=self._place,
                    parameter=prefix + others[0],
                    hint="name only weights in --cast, or add --cast 'optimizer.*=Float32'",
                )

    def pad(self, rows: object, size: object, path: str) -> None:
        """Give embedding, output layer and their state other padding: rows that are added are zeros.

        Args:
            rows: ``padded_vocab_size``; the tensors stay if it is unknown.
            size: ``vocab_size``.
            path: where the arguments are from.

        Raises:
            CheckpointError: ``vocab_size`` is unknown, or rows of tokens would be missing.
        """
        for name in filter(_OF_TOKENS.search, self.tensors):
            tensor = self.tensors[name]
            if type(rows) is not int or rows == tensor.shape[0]:
                continue
            kept = min(rows, tensor.shape[0])
            if type(size) is not int or size > kept:
                raise CheckpointError(
                    f"{path}: padded_vocab_size is {rows:,}, {quoted(name)} has {tensor.shape[0]:,} rows, and "
                    f"vocab_size is {size}",
                    file=path,
                    parameter=name,
                    hint='state "vocab_size" in a JSON file of --args: rows after it are padding',
                )
            view = View.whole(0, tensor.shape) if tensor.view is None else tensor.view
            view = View.concat([view.part(0, 0, kept), View.zeros((rows - kept, *tensor.shape[1:]))], 0)
            padded = tensor._replace(shape=view.shape, stored=tensor.sources, view=view)
            self.tensors = {**self.tensors, name: padded}

    def check(self, args: Mapping[str, Any], path: str) -> None:
        """Refuse arguments that contradict the tensors.

        Args:
            args: arguments by name; those that are absent are not compared.
            path: where they are from.
        """
        uniform = not (args.get("heterogeneous_layers_config_path") or any(map(_OTHER_MODEL.match, self.weights)))
        for name in filter(_SIZED.match, self.weights) if uniform else ():
            shape = self.tensors[name].shape
            for ending, dimension, words, number in _SIZES:
                if name.endswith(ending) and -dimension <= len(shape):
                    stated = args.get(words) if number is None else number(args)
                    self._compare(path, words, stated, shape[dimension], name)
        layers = self._layers()
        if layers is not None and uniform:
            name, count = layers
            self._compare(path, "num_layers", args.get("num_layers"), count, name)
        mtp = 1 + max((-1 if place.mtp is None else place.mtp for place in map(place_of, self.weights)), default=-1)
        if mtp:
            self._compare(path, "mtp_num_layers", args.get("mtp_num_layers"), mtp, "mtp.layers.*")
        stacked = [name for name in self.weights if place_of(name).is_stacked]
        if stacked and self.has_numbered_layers:
            raise CheckpointError(
                f"{self._place}: holds a key for each layer, and {quoted(stacked[0])} of all layers",
                file=self._place,
                parameter=stacked[0],
                hint="leave out those of another checkpoint, with --exclude",
            )
        if OUTPUT in self.weights and args.get("untie_embeddings_and_output_weights") is False:
            problem = f"untie_embeddings_and_output_weights is False, but there is {OUTPUT!r}"
            raise _of_other_model(path, problem, OUTPUT)
        if args.get("num_experts") and not self.has_experts:
            raise _of_other_model(path, f"num_experts is {args['num_experts']}, but no weight is of experts")
        if numbers_layers(args) and stacked:
            raise CheckpointError(
                f"{path}: with these arguments Megatron reads decoder.layers.N.*, a key for each layer, and the layers "
                "are stacked",
                file=path,
                hint="write them by number: --names TABLE,layer_keys=numbered",
            )

    def _compare(self, path: str, words: str, stated: object, found: int, name: str) -> None:
        if type(stated) is int and stated != found:
            raise _of_other_model(path, f"{words} gives {stated:,}, but {quoted(name)} has {found:,}", name)

    def _layers(self) -> tuple[str, int] | None:
        """A name that shows the number of layers, and the number."""
        numbers: dict[int, str] = {}
        for name, place in zip(self.weights, map(place_of, self.weights)):
            if place.is_stacked:
                return name, self.tensors[name].shape[0]
            if place.layer is not None:
                numbers[place.layer] = name
        return (numbers[max(numbers)], max(numbers) + 1) if numbers else None

    def arguments(self) -> dict[str, Any]:
        """Arguments that the tensors show, for those that nothing records."""
        embedding = self.tensors.get(EMBEDDING)
        args: dict[str, Any] = {}
        if embedding is not None:
            rows, _ = embedding.shape
            dtype = inert_class(TORCH_NAMES[embedding.dtype])
            args.update(padded_vocab_size=rows, params_dtype=dtype)
            args.update(bf16=embedding.dtype == "BFloat16", fp16=embedding.dtype == "Float16")

        def holds(*endings: str) -> bool:
            return any(name.endswith(endings) for name in self.weights)

        return {
            **args,
            "untie_embeddings_and_output_weights": holds(OUTPUT),
            "add_qkv_bias": holds(".self_attention.linear_qkv.bias"),
            "add_bias_linear": holds(".linear_proj.bias", ".mlp.linear_fc1.bias"),
            "qk_layernorm": holds(".q_layernorm.weight", ".linear_q_up_proj.layer_norm_weight"),
            "moe_router_enable_expert_bias": holds(".router.expert_bias"),
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        }

    def objects(self) -> list[str]:
        """The names of the objects that Transformer Engine asks for: one for each module, layer and expert."""
        names: dict[str, None] = {}
        for name in self.weights:
            module, _, parameter = name.rpartition(".")
            if parameter not in (*_PARAMETERS, *_APART) or _WITHOUT_OBJECT.search(module):
                continue
            shape = self.tensors[name].shape
            axes = sum(map(bool, (place_of(name).is_stacked, _ALL_EXPERTS.search(name))))
            modules = [module]
            if module.endswith(".self_attention.linear_proj"):
                # Attention itself has an object, and no parameter.
                modules.append(module[: -len("linear_proj")] + "core_attention")
            for each in modules:
                names.update((f"{each}.{shard}", None) for shard in _shards(shape[:axes]))
        return [*names]


def _of_other_model(path: str, problem: str, parameter: str | None = None) -> CheckpointError:
    hint = "name the arguments of this model, with --args or --config"
    return CheckpointError(f"{path}: {problem}", file=path, parameter=parameter, hint=hint)


def _shards(counts: tuple[int, ...]) -> Iterator[str]:
    of = ".".join(map(str, counts or (1,)))
    for place in itertools.product(*map(range, counts or (1,))):
        yield f"{EXTRA}/shard_{'.'.join(map(str, place))}_{of}"
