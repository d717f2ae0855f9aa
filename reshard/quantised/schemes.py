"""Quantised tensors of a checkpoint, recognised by names, types, shapes and `quantization_config`.

Nothing is assumed. A tensor is quantised if the checkpoint has a tensor of scales for it, a known scheme names scales
so, and their shape is exactly that of the blocks. A scale that fits no tensor is an error: without its scale, a weight
is garbage that no loader notices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.quantised.values import E2M1, FLOATS, INT4, INT8, OFFSET_TYPES, SCALE_TYPES, scale_box
from reshard.text.messages import as_pattern, listing, quoted
from reshard.text.names import is_weight

Shape = tuple[int, ...]

FP8 = ("Float8E4M3FN", "Float8E5M2")
_PACKED = ("Int8", "UInt8")
# Weights of 4 and 8 bits in words of 32, for which compressed-tensors has this format. Its releases store other numbers
# of bits in different ways.
_WORDS, _PACK_QUANTIZED, _WORD_BITS = ".weight_packed", "pack-quantized", 32
_CODE_OF_BITS = {4: INT4, 8: INT8}
# Rows and columns of a weight in words, whose rows end in whole words.
_SIZES = ".weight_shape"
# Elements per scale of the MX formats, which their definition fixes.
_MX = 32

# Endings of names of scales, and of their weights; the first that exists counts.
_SCALES = (
    (".weight_scale_inv", ".weight"),
    (".weight_scale", ".weight"),
    (".weight_scale", _WORDS),
    (".scale", ".weight"),
    ("_scale_inv", ""),
    ("_scales", "_blocks"),
)
# Endings of zero points, in place of `.weight`.
_OFFSETS = (".weight_offset", ".weight_zero_point")
# Scales of activations and of the cache of keys and values: a dequantised model does not use them.
_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".activation_scale",
    ".input_offset",
    ".deq_scale",
    ".quant_bias",
)
# Endings of tensors of schemes that are not supported.
_OTHER_SCHEMES = {
    ".weight_global_scale": "two levels of scales (nvfp4)",
    ".weight_g_idx": "groups in the order of activations",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".scales": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_second": "two levels of scales (W4A8)",
    ".scale_second": "two levels of scales (W4A8)",
}
# Endings of names of codes in words, and of scales after the whole name of their codes.
_IN_WORDS, _OF_WHOLE_NAMES = "_packed", ("_scale", "_scales", "_scale_inv")
# Endings that no unquantised model has. Others, such as logit_scale, may be parameters.
_ONLY_QUANTISED = (".weight_scale", ".weight_scale_inv", "_scale_inv", "_blocks", _SIZES, *_OFFSETS)

# Types that tensors of unquantised models have; Int64 and Bool are those of buffers.
_UNQUANTISED = ("Float16", "BFloat16", "Float32", "Float64", "Complex64", "Complex128", "Int64", "Bool")
_OF_CODES = ITEM_SIZES.keys() - set(_UNQUANTISED)

_COPY = "in a copy of the file, and pass that with --config"

METHODS = ("fp8", "compressed-tensors", "mxfp4")
"""Supported methods of `quantization_config`."""

# Keys that are read here, or do not change the meaning of codes. Others may: transform_config lists rotations, which
# the model undoes while it runs.
_KNOWN = frozenset(
    (
        *("quant_method", "format", "quantization_status", "version", "weight_block_size", "config_groups", "fmt"),
        *("scale_fmt", "activation_scheme", "kv_cache_scheme", "global_compression_ratio", "run_compressed"),
        *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "dequantize", "expert_dtype"),
    )
)
# Of msmodelslim, whose quant_model_description.json lists the scheme of each tensor.
_KNOWN_BESIDE_DESCRIPTION = frozenset(("group_size", "kv_quant_type", "fa_quant_type", "reduce_quant_type"))
_KNOWN_OF_GROUPS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_KNOWN_OF_WEIGHTS = frozenset(
    (
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "observer"),
        *("observer_kwargs", "scale_dtype", "zp_dtype"),
    )
)


class TypedShape(NamedTuple):
    """Type and shape of a stored tensor."""

    dtype: str
    shape: Shape


class Quantised(NamedTuple):
    """A quantised tensor.

    Attributes:
        codes: the stored tensor of the elements; `name` is that of the dequantised tensor.
        code: the type of its bytes, one of `values.CODES`.
        scales: the stored tensor of the scales.
        offsets: the stored tensor of the zero points; None without them.
        shape: shape of the stored tensor, in elements.
        block: elements per scale, per dimension.
        swapped: whether the last two dimensions of the stored tensor are swapped in the model.
        sizes: the stored tensor of the rows and columns of the model's; None without it.
        columns: the elements of a row of the model's; the other elements of stored rows are padding.
    """

    name: str
    codes: str
    code: str
    scales: str
    offsets: str | None
    shape: Shape
    block: Shape
    scheme: str
    swapped: bool = False
    sizes: str | None = None
    columns: int | None = None

    @property
    def scale_shape(self) -> Shape:
        """Scales per dimension; the stored ones may lack dimensions of one."""
        return tuple(high for _, high in scale_box(tuple((0, size) for size in self.shape), self.block))

    @property
    def sources(self) -> tuple[str, ...]:
        """The stored tensors of codes, scales, zero points and sizes."""
        return tuple(name for name in (self.codes, self.scales, self.offsets, self.sizes) if name is not None)


class Recognised(NamedTuple):
    """The quantised tensors by dequantised name; and scales of activations, which a dequantised model does not use."""

    tensors: Mapping[str, Quantised]
    left_out: Sequence[str]


class Quantisation(NamedTuple):
    """The type that quantised tensors get, one of `dtypes.CAST_TO`, and the settings by which they are recognised.

    Attributes:
        config: config.json; None without one.
        description: quant_model_description.json of msmodelslim; None without one.
        place: the file of ``config``, for messages.
    """

    dtype: str
    config: Mapping[str, Any] | None = None
    description: Mapping[str, Any] | None = None
    place: str = "config.json"

    @property
    def identity(self) -> str:
        """A text that is the same for settings that give the same tensors."""
        settings = [_stated_settings(self.config), self.description]
        return repr((self.dtype, json.dumps(settings, sort_keys=True)))


def recognise(stored: Mapping[str, TypedShape], quantisation: Quantisation) -> Recognised:
    """Find the quantised tensors of a checkpoint.

    Args:
        stored: all tensors, by name.
        quantisation: the settings; its type does not matter.

    Raises:
        CheckpointError: the scheme is unknown, a scale is missing or has no weight, or its shape does not fit.
    """
    settings, description = _settings(quantisation), quantisation.description
    quantised: dict[str, Quantised] = {}
    used: set[str] = set()
    examples: dict[object, Quantised] = {}
    for name, tensor in stored.items():
        pair = _scale_of(name, stored)
        if pair is None:
            if name.endswith(_WORDS):
                raise _without(name, name.removesuffix(_WORDS) + ".weight_scale")
            continue
        scales, new_name = pair
        if new_name != name and new_name in stored:
            raise CheckpointError(
                f"{quoted(name)} holds codes of {quoted(new_name)}, which is in the checkpoint, too",
                parameter=name,
                hint=f"convert the checkpoint without one of them first: {_first(name)}",
            )
        offsets = _offsets_of(new_name, stored)
        sizes = name.removesuffix(_WORDS) + _SIZES if name.endswith(_WORDS) else None
        if settings is None and description is None:
            missing = "does not exist" if quantisation.config is None else "has no quantization_config"
            raise CheckpointError(
                f"{quoted(scales)} is a scale of {quoted(name)}, but {quantisation.place} {missing}",
                parameter=name,
                hint="name the model's own config.json with --config",
            )
        # Decided once for all of the same types and shapes, unless the description lists each tensor.
        types = tensor, stored[scales], scales.endswith("_scales"), offsets and stored[offsets], stored.get(sizes or "")
        example = None if description is not None else examples.get(types)
        if example is None:
            example = _quantised(name, tensor, scales, offsets, sizes, new_name, stored, settings or {}, description)
            examples[types] = example
        quantised[new_name] = example._replace(name=new_name, codes=name, scales=scales, offsets=offsets, sizes=sizes)
        used.update(quantised[new_name].sources)
    left_out = [name for name in stored if name not in used and name.endswith(_OF_ACTIVATIONS)]
    used.update(left_out)
    _check_unused(stored, used, quantised, settings, description)
    return Recognised(quantised, left_out)


def describe(recognised: Recognised) -> dict[str, int]:
    """The number of tensors of each scheme."""
    counts: dict[str, int] = {}
    for each in recognised.tensors.values():
        counts[each.scheme] = counts.get(each.scheme, 0) + 1
    return counts


def looks_quantised(stored: Mapping[str, TypedShape]) -> bool:
    """Whether any weight of a checkpoint has a scale."""
    return any(_scale_of(name, stored) is not None for name in stored)


def holds_codes(types: Mapping[str, str]) -> bool:
    """Whether any weight is quantised in any scheme, also in an unknown one, by the types of all tensors by name."""
    endings = (*_ONLY_QUANTISED, *_OTHER_SCHEMES, *_OF_ACTIVATIONS)
    return any(
        name.endswith(endings) or (dtype in _OF_CODES and is_weight(name, types)) for name, dtype in types.items()
    )


def _stated_settings(config: Mapping[str, Any] | None) -> list[Any]:
    """The settings of quantisation in config.json and, of multimodal models, its `text_config`, unchecked."""
    levels = (_object(config), _object(_object(config).get("text_config")))
    stated = (level.get(key) for level in levels for key in ("quantization_config", "compression_config"))
    return [settings for settings in stated if settings is not None]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _settings(quantisation: Quantisation) -> Mapping[str, Any] | None:
    """`quantization_config`; None where only msmodelslim's description lists schemes.

    Refuses methods and keys that are not supported, and different ones.
    """
    config, description, place = quantisation.config, quantisation.description, quantisation.place
    if description is not None and description.get("optional"):
        raise CheckpointError(
            "quant_model_description.json: has optional, such as rotations, which reshard does not support",
            hint="if the codes mean the same without it, remove the key",
        )
    stated = _stated_settings(config)
    if not stated:
        return None
    settings = stated[0]
    if any(other != settings for other in stated):
        raise CheckpointError(
            f"{place}: has several quantization_config, also in text_config, and they differ",
            file=place,
            hint=f"keep the right one {_COPY}",
        )
    if description is not None and isinstance(settings, dict) and _KNOWN_BESIDE_DESCRIPTION.issuperset(settings):
        return None
    if not isinstance(settings, dict) or settings.get("quant_method") not in METHODS:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise CheckpointError(
            f"{place}: quantization_config has quant_method {method!r}, which reshard cannot dequantise",
            file=place,
            hint=f"it dequantises {', '.join(METHODS)}, and W8A8_DYNAMIC of msmodelslim",
        )
    unknown = _unknown_keys(settings, _KNOWN, "")
    for name, group in _object(settings.get("config_groups")).items():
        unknown += _unknown_keys(_object(group), _KNOWN_OF_GROUPS, f"config_groups.{name}.")
        weights = _object(_object(group).get("weights"))
        unknown += _unknown_keys(weights, _KNOWN_OF_WEIGHTS, f"config_groups.{name}.weights.")
    if unknown:
        raise CheckpointError(
            f"{place}: quantization_config has keys that reshard does not support: " + listing(unknown),
            file=place,
            hint=f"if a key does not change the meaning of the codes, remove it {_COPY}",
        )
    return settings


def _unknown_keys(settings: Mapping[str, Any], known: Collection[str], prefix: str) -> list[str]:
    """The keys that may change the meaning of codes."""
    return [prefix + key for key, value in settings.items() if key not in known and not _is_harmless(key, value)]


def _is_harmless(key: str, value: object) -> bool:
    """Whether codes with this setting are stored as without it."""
    if key == "actorder":
        # Only groups in the order of activations need an index.
        return value in (None, False, "static", "weight")
    if key == "sparsity_config" and _object(value).get("format") == "dense":
        return True
    return value in (None, {}, [])


def _scale_of(name: str, stored: Mapping[str, TypedShape]) -> tuple[str, str] | None:
    """The scales of a tensor of codes, and the name of the dequantised tensor."""
    for scale, weight in _SCALES:
        if not name.endswith(weight):
            continue
        stem = name[: len(name) - len(weight)]
        if stem + scale in stored:
            return stem + scale, {"_blocks": stem, _WORDS: stem + ".weight"}.get(weight, name)
    return None


def _offsets_of(new_name: str, stored: Mapping[str, TypedShape]) -> str | None:
    stem = new_name[: -len(".weight")]
    return next((stem + end for end in _OFFSETS if new_name.endswith(".weight") and stem + end in stored), None)


def _quantised(
    name: str,
    tensor: TypedShape,
    scales: str,
    offsets: str | None,
    sizes: str | None,
    new_name: str,
    stored: Mapping[str, TypedShape],
    settings: Mapping[str, Any],
    description: Mapping[str, Any] | None,
) -> Quantised:
    """The quantised tensor of some codes and scales; refuses an unknown scheme, and scales that do not fit."""
    scale = stored[scales]
    if scale.dtype not in SCALE_TYPES:
        raise _unknown(name, scales, f"scales of type {scale.dtype}")
    if offsets is not None and (sizes is not None or stored[offsets].dtype not in OFFSET_TYPES):
        raise _unknown(name, offsets, f"zero points of type {stored[offsets].dtype}")
    code, shape = tensor.dtype, tensor.shape
    candidates: list[Quantised] = []
    schemes: list[tuple[str, Shape, bool]] = []
    if sizes is not None:
        if code != "Int32" or len(shape) != 2 or scale.dtype not in FLOATS:
            raise _unknown(name, scales, f"{code} of shape {list(shape)} with scales of type {scale.dtype}")
        if sizes not in stored:
            raise _without(name, sizes)
        if stored[sizes].dtype not in ("Int32", "Int64") or stored[sizes].shape != (2,):
            raise _unknown(name, sizes, f"sizes of type {stored[sizes].dtype} and shape {list(stored[sizes].shape)}")
        candidates = [
            Quantised(new_name, name, in_words, scales, None, elements, block, scheme, sizes=sizes)
            for scheme, in_words, elements, block in _in_words(name, shape, settings)
        ]
    elif scales.endswith("_scales"):
        if code != "UInt8" or len(shape) < 2 or shape[-1] * 2 != _MX or scale.dtype != "UInt8":
            raise _unknown(name, scales, f"blocks of type {code} and shape {list(shape)}")
        code, shape = E2M1, (*shape[:-2], shape[-2] * _MX)
        schemes = [("MXFP4", (*(1,) * (len(shape) - 1), _MX), False)]
    elif code in _PACKED and scale.dtype == "Float8E8M0":
        code, shape = E2M1, (*shape[:-1], shape[-1] * 2)
        schemes = [("MXFP4", (*(1,) * (len(shape) - 1), _MX), False)]
    elif code == "Int8" or code in FP8:
        title = "Int8" if code == "Int8" else f"FP8 ({'E4M3' if code == FP8[0] else 'E5M2'})"
        schemes = [
            (f"{title} {how}", block, shifted) for how, block, shifted in _blocks(name, shape, settings, description)
        ]
    else:
        raise _unknown(name, scales, f"elements of type {code}")
    # gpt-oss stores [experts, out, in] in blocks, and its unquantised weights are [experts, in, out].
    swapped = scales.endswith("_scales") and len(shape) > 2
    candidates += [
        Quantised(new_name, name, code, scales, offsets, shape, block, scheme, swapped) for scheme, block, _ in schemes
    ]
    fitting = [each for each in candidates if _fits(scale.shape, each)]
    if not fitting:
        needed = " or ".join(f"{list(each.scale_shape)} ({each.scheme})" for each in candidates) or "no scales"
        raise CheckpointError(
            f"{quoted(scales)} has the shape {list(scale.shape)}; {quoted(name)} of shape {list(shape)} needs {needed}",
            parameter=name,
            hint="the scales or quantization_config of config.json belong to another checkpoint",
        )
    # Blocks of 100 and of 128 both cut 200 columns in two.
    if len({(each.shape, *map(min, each.block, each.shape)) for each in fitting}) > 1:
        schemes_text = " and ".join(each.scheme for each in fitting)
        raise CheckpointError(
            f"{quoted(name)}: its scales fit two schemes of config.json: {schemes_text}", parameter=name
        )
    if offsets is None and any(shifted and each in fitting for each, (_, _, shifted) in zip(candidates, schemes)):
        raise CheckpointError(
            f"{quoted(name)} is quantised with zero points, and no tensor holds them",
            parameter=name,
            hint=f"the checkpoint lacks {' or '.join(quoted(name.removesuffix('.weight') + end) for end in _OFFSETS)}",
        )
    if offsets is not None and stored[offsets].shape != scale.shape:
        raise CheckpointError(
            f"{quoted(offsets)} has the shape {list(stored[offsets].shape)}, but the scales {quoted(scales)} of the "
            f"same weight have {list(scale.shape)}",
            parameter=name,
        )
    return fitting[0]


def _fits(shape: Shape, candidate: Quantised) -> bool:
    """Whether stored scales have the shape of a scheme; only dimensions of one scale may be absent."""
    needed = candidate.scale_shape
    if candidate.sizes is not None and candidate.shape[-1] % candidate.block[-1]:
        return False
    if math.prod(needed) == 1:
        return math.prod(shape) == 1
    return shape == needed or (candidate.scheme.endswith("per channel") and needed[-1] == 1 and shape == needed[:-1])


def _blocks(
    name: str, shape: Shape, settings: Mapping[str, Any], description: Mapping[str, Any] | None
) -> Iterator[tuple[str, Shape, bool]]:
    """The possible blocks of a weight of FP8 or Int8 by its configuration: name, sizes, whether it has zero points."""
    rank = len(shape)
    per_tensor, per_channel = ("per tensor", shape), ("per channel", (*(1,) * (rank - 1), *shape[-1:]))
    if description is not None and settings == {}:
        kind = description.get(name)
        if kind != "W8A8_DYNAMIC":
            raise CheckpointError(
                f"{quoted(name)} is quantised as {kind}, which reshard cannot dequantise",
                parameter=name,
                hint="of msmodelslim's schemes it dequantises W8A8_DYNAMIC",
            )
        yield *per_channel, any(name.removesuffix(".weight") + end in description for end in _OFFSETS)
    elif settings["quant_method"] == "fp8":
        sizes = settings.get("weight_block_size")
        if sizes is None:
            yield *per_tensor, False
            yield *per_channel, False
        else:
            yield *_in_blocks(name, sizes, rank, "weight_block_size"), False
    else:
        for weights in _weights_of(settings, packed=False):
            for block in _blocks_by(name, shape, weights):
                yield *block, weights.get("symmetric", True) is not True


def _weights_of(settings: Mapping[str, Any], packed: bool) -> list[Mapping[str, Any]]:
    """What `config_groups` list of weights that are packed into words, or of all others."""
    groups = [_object(group) for group in _object(settings.get("config_groups")).values()]
    return [
        group["weights"]
        for group in groups
        if isinstance(group.get("weights"), dict)
        and ((group.get("format") or settings.get("format")) == _PACK_QUANTIZED) == packed
    ]


def _blocks_by(name: str, shape: Shape, weights: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """The blocks of a weight by its group of compressed-tensors, if the strategy is known."""
    strategy, size, rank = weights.get("strategy"), weights.get("group_size"), len(shape)
    if strategy == "tensor":
        yield "per tensor", shape
    elif strategy == "channel":
        yield "per channel", (*(1,) * (rank - 1), *shape[-1:])
    elif strategy == "group" and isinstance(size, int) and size > 0:
        yield f"in groups of {size}", (*(1,) * (rank - 1), size)
    elif strategy == "block":
        yield _in_blocks(name, weights.get("block_structure"), rank, "block_structure")


def _in_words(name: str, words: Shape, settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Shape, Shape]]:
    """The possible schemes of a weight in words by its configuration: name, code, shape in elements, block."""
    groups = _weights_of(settings, packed=True)
    if not groups:
        raise _unknown(name, name, f"config_groups of quantization_config list no weights of format {_PACK_QUANTIZED}")
    for weights in groups:
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        code = _CODE_OF_BITS.get(bits) if kind == "int" and type(bits) is int else None
        if code is None:
            raise _unknown(name, name, f"{_PACK_QUANTIZED} with num_bits {bits} and type {kind}, not 4 or 8 and int")
        if weights.get("symmetric", True) is not True:
            raise _unknown(name, name, f"{_PACK_QUANTIZED} with zero points (symmetric: false)")
        per_word = _WORD_BITS // bits
        shape = (*words[:-1], words[-1] * per_word)
        for how, block in _blocks_by(name, shape, weights):
            # Otherwise the padding of a row would be a part of its last group.
            if block[-1] % per_word:
                raise _unknown(name, name, f"{how}, which fill no whole words of {per_word} codes")
            yield f"packed Int{bits} {how}", code, shape, block


def _in_blocks(name: str, sizes: object, rank: int, key: str) -> tuple[str, Shape]:
    """Blocks of the last two dimensions."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"config.json: quantization_config: {key} is {sizes!r}, not two sizes", parameter=name)
    if rank < 2:
        raise CheckpointError(
            f"{quoted(name)} has {rank} dimensions, and blocks of {sizes[0]} x {sizes[1]} need two", parameter=name
        )
    return f"in blocks of {sizes[0]} x {sizes[1]}", (*(1,) * (rank - 2), *sizes)


def _check_unused(
    stored: Mapping[str, TypedShape],
    used: set[str],
    quantised: Mapping[str, Quantised],
    settings: Mapping[str, Any] | None,
    description: Mapping[str, Any] | None,
) -> None:
    """Refuse tensors that look quantised and were not recognised."""
    for name, tensor in stored.items():
        if name in used:
            continue
        scheme = next((scheme for end, scheme in _OTHER_SCHEMES.items() if name.endswith(end)), None)
        if scheme is not None:
            raise _unknown(name, name, scheme)
        if name.endswith(_ONLY_QUANTISED) or (name.endswith(".scale") and tensor.dtype == "Float8E8M0"):
            raise CheckpointError(
                f"{quoted(name)} belongs to a quantised weight that is not in the checkpoint",
                parameter=name,
                hint=f"if nothing is missing, convert the checkpoint without it first: {_first(name)}",
            )
        beside = next((name + end for end in _OF_WHOLE_NAMES if name + end in stored), None)
        if tensor.dtype in _OF_CODES and (name.endswith(_IN_WORDS) or beside is not None):
            raise _unknown(name, beside or name, f"codes of type {tensor.dtype} and shape {list(tensor.shape)}")
        # Beside quantised weights, larger integers may be those of a buffer.
        coded = tensor.dtype in _OF_CODES and is_weight(name, stored)
        if coded and (ITEM_SIZES[tensor.dtype] == 1 if quantised else settings is not None):
            raise CheckpointError(
                f"{quoted(name)} is {tensor.dtype}, but no tensor holds its scales",
                parameter=name,
                hint="the checkpoint is incomplete, or the weight was saved without its scales",
            )
        kind = None if description is None else description.get(name)
        if isinstance(kind, str) and kind != "FLOAT":
            raise CheckpointError(
                f"{quoted(name)} is quantised as {kind}, but no tensor holds its scales", parameter=name
            )


def _first(name: str) -> str:
    """--dequantize looks at all tensors, also at those that --exclude leaves out."""
    return f"reshard convert SRC COPY --exclude {as_pattern(name)}"


def _without(name: str, missing: str) -> CheckpointError:
    return CheckpointError(
        f"{quoted(name)} needs {quoted(missing)}, which is not in the checkpoint",
        parameter=name,
        hint="the checkpoint is incomplete, or the weight was saved without its scales",
    )


def _unknown(name: str, scales: str, problem: str) -> CheckpointError:
    beside = "" if scales == name else f" beside {quoted(scales)}"
    return CheckpointError(
        f"{quoted(name)}{beside}: {problem}: reshard cannot dequantise this scheme",
        parameter=name,
        hint="without --dequantize, codes and scales are copied as they are",
    )
