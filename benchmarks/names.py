"""Rules of names and casts at two sizes, each kind of rule alone; and MindFormers' own converter."""

from __future__ import annotations

import json
import statistics
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.against_mindformers import ENVIRONMENT, MINDFORMERS, WITH_JOB
from benchmarks.against_mindspore import contest
from benchmarks.measure import Cell, Run, Section, memory_backed, remove, reshard, run
from reshard.strategies.files import protobuf_bytes
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

# Runs of each size, after one that warms up.
RUNS = 3
RANKS = 4
FILES = 3
WORDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class Kind:
    """A kind of rule, and tensors that it is for.

    Attributes:
        name: what it is called in the table.
        rules: the table of rules.
        layer: names and shapes of a layer's tensors, without the number of the layer.
        make: what NumPy makes of them whole.
        layers: how many there are.
        config: the sizes that rules need.
        dtype: the type of the source.
        cut: the dimension along which ranks cut what is made.
        back: whether it is measured from right to left, to a Hugging Face directory.
        cast: whether it is cast to BFloat16.
    """

    name: str
    rules: str
    layer: Mapping[str, tuple[int, ...]]
    make: Callable[[Arrays], Arrays]
    layers: int
    config: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "F32"
    cut: int = 0
    back: bool = False
    cast: bool = False

    def source(self, number: int) -> Arrays:
        """The tensors of a layer as Hugging Face has them."""
        return {
            f"model.{number}.{name}": elements(name, number, shape, self.dtype) for name, shape in self.layer.items()
        }

    def target(self, number: int) -> Arrays:
        """What is made of a layer, whole."""
        plain = {name.split(".", 2)[2]: array for name, array in self.source(number).items()}
        return {f"net.{number}.{name}": array for name, array in self.make(plain).items()}


def elements(name: str, number: int, shape: tuple[int, ...], dtype: str) -> Array:
    """The elements of a tensor, as words; those of Float32 are from a half to one."""
    words = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(2654435761)
    words += np.uint32(sum(name.encode()) * 40503 + number)
    arrays = (words & np.uint32(0x007FFFFF)) | np.uint32(0x3F000000)
    return (arrays if dtype == "F32" else (arrays >> np.uint32(7)).astype("<u2")).reshape(shape)


def _rule(sources: str, target: str, operation: str) -> str:
    names = [f'"model.{{layer}}.{name}"' for name in sources.split()]
    return f'[[rule]]\nfrom = [{", ".join(names)}]\nto = "net.{{layer}}.{target}"\ndo = {operation}\n'


def _qkv(arrays: Arrays) -> Arrays:
    groups = zip(*(np.split(arrays[name], 8) for name in ("q", "k", "v")))
    return {"qkv": np.concatenate([part for parts in groups for part in parts])}


def _interleaved(arrays: Arrays) -> Arrays:
    return {"fc1": np.stack([arrays["gate"], arrays["up"]], 1).reshape(-1, arrays["up"].shape[1])}


def _halves(arrays: Arrays) -> Arrays:
    return {"fc1": np.concatenate([arrays["gate"], arrays["up"]])}


def _experts(arrays: Arrays) -> Arrays:
    gate, up, down = ([arrays[f"{number}.{name}"].T for number in range(EXPERTS)] for name in ("gate", "up", "down"))
    return {
        "weight1": np.concatenate([np.concatenate(pair, 1) for pair in zip(gate, up)]),
        "weight2": np.concatenate(down),
    }


EXPERTS = 16
_STACKED = '{ stack = "expert" }, { reshape = ["experts", "h", "w"], to = ["experts*h", "w"] }]'
_SIZES = (
    '[sizes]\nheads = "heads"\ngroups = "groups"\nhead_dim = "head_dim"\nexperts = "experts"\n'
    '[numbers]\nexpert = "experts"\n'
)
_EXPERT_RULES = (
    _SIZES
    + _rule("{expert}.gate {expert}.up", "weight1", '["transpose", { concat = 1 }, ' + _STACKED)
    + _rule("{expert}.down", "weight2", '["transpose", ' + _STACKED)
)
_EXPERT_LAYER = {
    f"{number}.{name}": (2048, 1024) if name == "down" else (1024, 2048)
    for number in range(EXPERTS)
    for name in ("gate", "up", "down")
}
_EXPERT_CONFIG = {"experts": EXPERTS}
_MATRICES = {f"{number}.w": (4096, 4096) for number in range(3)}
_QKV = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096)}
_MLP = {"gate": (8192, 4096), "up": (8192, 4096)}
_RENAME = '[[rule]]\nfrom = "model.{layer}.{number}.w"\nto = "net.{layer}.{number}.weight"\n'


def _renamed(arrays: Arrays) -> Arrays:
    return {name + "eight": array for name, array in arrays.items()}


def _grouped(dtype: str, layers: int, back: bool = False) -> Kind:
    name = f"q, k and v grouped, {dtype}" + (", taken apart" if back else "")
    config = {"heads": 32, "groups": 8, "head_dim": 128}
    return Kind(name, _SIZES + _rule("q k v", "qkv", '"group_qkv"'), _QKV, _qkv, layers, config, dtype, back=back)


def _rows(dtype: str, layers: int, back: bool = False) -> Kind:
    name = f"gate and up row by row, {dtype}" + (", taken apart" if back else "")
    return Kind(name, _rule("gate up", "fc1", '"interleave"'), _MLP, _interleaved, layers, {}, dtype, back=back)


def _transposed(dtype: str, layers: int, back: bool = False) -> Kind:
    name = f"experts transposed and stacked, {dtype}" + (", taken apart" if back else "")
    return Kind(name, _EXPERT_RULES, _EXPERT_LAYER, _experts, layers, _EXPERT_CONFIG, dtype, back=back)


# Each with as many layers as make 0.8 to 1.2 GB.
KINDS = [
    Kind("other names, F32", _RENAME, _MATRICES, _renamed, 5),
    _grouped("BF16", 20),
    _grouped("BF16", 20, back=True),
    Kind("gate and up in halves, F32", _rule("gate up", "fc1", '"concat"'), _MLP, _halves, 4),
    _rows("BF16", 8),
    _rows("BF16", 8, back=True),
    _transposed("F32", 3),
    _transposed("BF16", 5),
    _transposed("BF16", 5, back=True),
    Kind("other names, F32 cast to BF16", _RENAME, _MATRICES, _renamed, 5, cast=True),
]


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterator[Array]) -> None:
    """Write a file, one array at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = int(np.prod(shape)) * WORDS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)


def read_safetensors(path: Path) -> Arrays:
    """The tensors of a file, mapped."""
    data = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + size].tobytes())
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            arrays[name] = data[start:stop].view(WORDS[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def write_whole(root: Path, kind: Kind, arrays: Callable[[int], Arrays], files: int) -> None:
    """Write a Hugging Face directory of whole tensors."""
    root.mkdir()
    weight_map = {}
    share = -(-kind.layers // files)
    files = -(-kind.layers // share)
    for number in range(files):
        layers = range(number * share, min((number + 1) * share, kind.layers))
        shapes = {name: (kind.dtype, array.shape) for layer in layers for name, array in arrays(layer).items()}
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_safetensors(root / file, shapes, (array for layer in layers for array in arrays(layer).values()))
        weight_map.update(dict.fromkeys(shapes, file))
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def prepare(place: Path, kind: Kind) -> list[object]:
    """Write a source, rules and a strategy; the command line that converts it into `made`."""
    write_whole(place / "src", kind, kind.target if kind.back else kind.source, min(FILES, kind.layers))
    (place / "rules.toml").write_text(kind.rules)
    (place / "sizes.json").write_text(json.dumps(kind.config))
    words: list[object] = [
        place / "src",
        place / "made",
        "--names",
        place / "rules.toml",
        "--config",
        place / "sizes.json",
    ]
    words += ["--cast", "BFloat16"] if kind.cast else []
    if kind.back:
        return reshard("convert", *words, "--to", "huggingface", "--max-shard-size", "300MB", "--quiet")
    names = [name for number in range(kind.layers) for name in kind.target(number)]
    tensor_map = (0, -1) if kind.cut == 0 else (-1, 0)
    layout = RecordedLayout(device_matrix=(RANKS,), tensor_maps=(tensor_map,), shard_step=0, shard_size=0)
    item = StrategyItem("MatMul-0", 0, ())
    strategy = protobuf_bytes(StrategyFile("", "protobuf", (item,), dict.fromkeys(names, layout)))
    (place / "new.ckpt").write_bytes(strategy)
    return reshard("convert", *words, "--dst-strategy", place / "new.ckpt", "--quiet")


def wrong(target: Path, kind: Kind) -> int:
    """The number of wrong or missing tensors of a target."""
    if kind.back:
        stored = {
            name: array for path in target.glob("*.safetensors") for name, array in read_safetensors(path).items()
        }
        arrays = [
            name not in stored or not np.array_equal(stored[name], array)
            for number in range(kind.layers)
            for name, array in kind.source(number).items()
        ]
        return sum(arrays) + abs(len(stored) - len(arrays))
    ranks = [read_safetensors(target / f"rank_{rank}" / f"checkpoint_{rank}.safetensors") for rank in range(RANKS)]
    arrays = []
    for number in range(kind.layers):
        for name, array in kind.target(number).items():
            # Of what is from a half to one, the upper half of the bits, rounded, is BFloat16.
            expected = _rounded(array) if kind.cast else array
            parts = zip(ranks, np.split(expected, RANKS, kind.cut))
            arrays += [name not in stored or not np.array_equal(stored[name], part) for stored, part in parts]
    return sum(arrays) + abs(sum(map(len, ranks)) - len(arrays))


def _rounded(words: Array) -> Array:
    rounded: Array = ((words + (np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)).astype(
        "<u2"
    )
    return rounded


def convert(place: Path, kind: Kind) -> dict[str, Cell]:
    """Measure a kind at two sizes and `cp -r` of the smaller output, as a part of a row."""
    places = [place / "small", place / "large"]
    kinds = [replace(kind, layers=max(1, kind.layers // 5)), kind]
    for each in places:
        each.mkdir()
    commands = [prepare(each, sized) for each, sized in zip(places, kinds)]
    runs: list[list[Run]] = [[], []]
    copies: list[float] = []
    sizes = [0, 0]
    for _ in range(RUNS + 1):
        for number, (each, words) in enumerate(zip(places, commands)):
            # One output at a time: all of them take too much memory.
            remove(*(other / "made" for other in places), place / "copied")
            runs[number].append(run(words))
            sizes[number] = sum(path.stat().st_size for path in (each / "made").rglob("*.safetensors"))
            if not number:
                copies.append(run(["cp", "-r", each / "made", place / "copied"]).seconds)
    assert wrong(places[1] / "made", kind) == 0
    small, large = (statistics.median(each.seconds for each in of_size[1:]) for of_size in runs)
    cpu_small, cpu_large = (statistics.median(each.cpu for each in of_size[1:]) for of_size in runs)
    more = (sizes[1] - sizes[0]) / 1e9
    return {
        "smaller, GB": round(sizes[0] / 1e9, 1),
        "larger, GB": round(sizes[1] / 1e9, 1),
        "smaller, s": round(small, 2),
        "larger, s": round(large, 2),
        "whole, GB/s": round(sizes[1] / large / 1e9, 1),
        "marginal, GB/s": round(more / (large - small), 1),
        "CPU, s per GB": round((cpu_large - cpu_small) / more, 2),
        "cp, GB/s": round(sizes[0] / statistics.median(copies[1:]) / 1e9, 1),
    }


def measure() -> Section:
    """Measure every kind, and MindFormers' converter beside."""
    section = Section("What do names, packing and casts cost?")
    section.say(
        f"`convert --names`, one kind of rule alone, from Hugging Face to {RANKS} ranks or back (taken "
        "apart). *Marginal* leaves out the start."
    )
    for kind in KINDS:
        with memory_backed() as place:
            section.row({"kind": kind.name, **convert(place, kind)})
    against_mindformers(section)
    return section


def against_mindformers(section: Section) -> None:
    """A Qwen3 by MindFormers' `weight_converters`, in both directions."""
    python, wheel = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "mindformers" / MINDFORMERS
    if not wheel.is_dir():
        section.say("MindFormers is left out: there is no environment with it; `make conformance` makes one.")
        return
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
    config.update(num_hidden_layers=LAYERS, vocab_size=8192, intermediate_size=8192)
    summary: dict[str, object] = {
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "hidden_size": 4096,
    }
    summary["use_interleaved_weight_layout_mlp"] = True
    section.say(
        f"The same Qwen3, {_qwen3_size() / 1e9:.1f} GB, by the `weight_converters` of MindFormers {MINDFORMERS}, once."
    )
    with memory_backed() as place:
        hf, target, job = place / "hf", place / "named", place / "job.json"
        hf.mkdir()
        shapes = qwen3()
        arrays = (elements(name, 0, shape, "F32") for name, shape in shapes.items())
        write_safetensors(hf / "model.safetensors", {name: ("F32", shape) for name, shape in shapes.items()}, arrays)
        (hf / "config.json").write_text(json.dumps(config))
        start_up = run([python, "-c", "import mindspore"]).seconds
        for kind, way, src, dst in (
            ("Qwen3 to MindFormers' names", "to_mindformers", hf, target),
            ("and back", "to_huggingface", target, place / "back"),
        ):
            words: list[object] = [src, dst, "--to", "huggingface", "--config", hf / "config.json", "--quiet"]
            words += ["--names", "qwen3,gate_up=interleaved,qkv=grouped,output=own", "--max-shard-size", "50GB"]
            theirs = {"do": way, "model": "qwen3", "file": str(src / "model.safetensors"), "config": summary}
            job.write_text(json.dumps([{**theirs, "out": str(place / "theirs")}]))
            logs = ["env", f"LOG_MF_PATH={place}", f"LOCAL_DEFAULT_PATH={place}"]
            module = [python, "-m", "tests.conformance.workers.mindformers_names", wheel]
            command = [*WITH_JOB, job, *logs, *module]
            section.row({"kind": kind, **contest(reshard("convert", *words), dst, command, start_up)})
            ours, other = (read_safetensors(path) for path in (dst / "model.safetensors", place / "theirs"))
            assert ours.keys() == other.keys()
            assert all(np.array_equal(array, other[name]) for name, array in ours.items())
            # Both directions together take too much memory.
            del ours, other
            (src / "model.safetensors").unlink()
            (place / "theirs").unlink()


LAYERS = 1


def qwen3(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3 of few layers."""
    arrays: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8192, 4096)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        arrays.update({f"{layer}.{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")})
        arrays.update({f"{layer}.self_attn.{name}_norm.weight": (128,) for name in "qk"})
        arrays.update({f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in _QKV.items()})
        arrays[f"{layer}.self_attn.o_proj.weight"] = (4096, 4096)
        arrays.update({f"{layer}.mlp.{name}_proj.weight": shape for name, shape in _MLP.items()})
        arrays[f"{layer}.mlp.down_proj.weight"] = (4096, 8192)
    arrays.update({"model.norm.weight": (4096,), "lm_head.weight": (8192, 4096)})
    return arrays


def _qwen3_size() -> int:
    return sum(int(np.prod(shape)) * 4 for shape in qwen3().values())
