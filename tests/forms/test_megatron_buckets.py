"""Megatron's flat buckets: which parameter lies where, against a layout that is made here element by element."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import archived_tensor
from reshard.checkpoints.formats.pickles import pickled, read_pickle
from reshard.checkpoints.placed import Run
from reshard.errors import CheckpointError
from reshard.forms.megatron.bucket_state import BucketMap, Buffer, Flat, Groups, read_buckets
from reshard.forms.megatron.buckets import places_by_edges
from reshard.forms.pytorch.dcp import DescribedChunk, DescribedTensor, Record, read_metadata
from tests.asking import open_checkpoint
from tests.corpus_mcore import mcore_case
from tests.layouts import examples
from tests.running import Argument, done, fails

Numbers = npt.NDArray[np.int64]
_PADDING = -1


class Sizes(NamedTuple):
    """A model, how it is cut, and how its optimizer lies in buckets."""

    layers: tuple[tuple[int, ...], ...]  # per number of a chunk, layers of each pipeline rank
    hidden: int
    ffn: int
    tp: int
    dp: int
    bucket: int | None
    local: bool
    tied: bool
    experts: int
    ep: int
    grouped: str
    mtp: int

    @property
    def stages(self) -> int:
        return len(self.layers[0])


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    stages = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 2)) if stages > 1 else 1
    counts = st.tuples(*[st.integers(0, 2)] * stages)
    # The first chunk has the embedding, the last one the output layer.
    layers = draw(
        st.tuples(*[counts] * chunks).filter(lambda each: sum(map(sum, each)) > 0 and all(sum(each, ())[1:-1]))
    )
    experts = draw(st.sampled_from([0, 2, 4]))
    local = draw(st.booleans())
    return Sizes(
        layers,
        draw(st.sampled_from([4, 8, 20])),
        draw(st.sampled_from([4, 12])),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from([None, None, 100, 700])),
        local,
        draw(st.booleans()),
        experts,
        draw(st.integers(1, 2)) if experts else 1,
        draw(st.sampled_from(["sequential", "fused"] if local else ["sequential", "grouped", "fused"])),
        draw(st.sampled_from([0, 0, 1, 2])),
    )


class Written:
    """A model whose elements are numbers, each another one, and its buckets."""

    def __init__(self, of: Sizes) -> None:
        self.of = of
        self._next = 0
        self.weights: dict[str, Numbers] = {}
        self.chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        count = sum(map(sum, of.layers))
        hidden, ffn, tp = of.hidden, of.ffn, of.tp
        self._weight("embedding.word_embeddings.weight", (8 * tp, hidden), rows=tp)
        if not of.tied:
            self._weight("output_layer.weight", (8 * tp, hidden), rows=tp)
        self._weight("decoder.final_layernorm.weight", (hidden,))
        names: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
            "self_attention.linear_qkv.layer_norm_weight": ((hidden,), {}),
            "self_attention.linear_proj.weight": ((hidden, 2 * hidden), {"columns": tp}),
            "self_attention.linear_qkv.weight": ((6 * tp, hidden), {"rows": tp}),
            "self_attention.linear_qkv.bias": ((6 * tp,), {"rows": tp}),
            "self_attention.q_layernorm.weight": ((2,), {}),
            "mlp.linear_fc1.layer_norm_weight" if not of.experts or of.local else "pre_mlp_layernorm.weight": (
                (hidden,),
                {},
            ),
        }
        if of.experts:
            names["mlp.router.weight"] = ((of.experts, hidden), {})
            names["mlp.experts.experts.linear_fc1.weight"] = ((of.experts, 2 * ffn, hidden), {"rows": 2})
            names["mlp.experts.experts.linear_fc2.weight"] = ((of.experts, hidden, ffn), {})
        else:
            names["mlp.linear_fc1.weight"] = ((2 * ffn, hidden), {"rows": 2 * tp})
            names["mlp.linear_fc2.weight"] = ((hidden, ffn), {"columns": tp})
        for tail, (shape, cut) in names.items():
            self._weight(f"decoder.layers.{tail}", (count, *shape), **cut)
        for number in range(of.mtp):
            before = f"mtp.layers.{number}."
            for tail in ("hnorm.weight", "enorm.weight", "final_layernorm.weight"):
                self._weight(before + tail, (hidden,))
            self._weight(before + "eh_proj.weight", (2 * tp, 2 * hidden), rows=tp)
            for tail, (shape, cut) in names.items():
                self._weight(f"{before}transformer_layer.{tail}", shape, **cut)

    def _weight(self, key: str, shape: tuple[int, ...], rows: int = 1, columns: int = 1) -> None:
        self.weights[key] = np.arange(self._next, self._next + math.prod(shape)).reshape(shape)
        self._next += math.prod(shape)
        stacked = (".experts." in key) + key.startswith("decoder.layers.")
        parts = [*shape[:stacked], rows, columns][: len(shape)]
        parts += [1] * (len(shape) - len(parts))
        steps = [size // part for size, part in zip(shape, parts)]
        self.chunks[key] = [
            (tuple(at * step for at, step in zip(index, steps)), tuple(steps)) for index in np.ndindex(*parts)
        ]

    def named_parameters(self, tensor: int, layers: range, first: bool, last: bool) -> list[tuple[str, Numbers]]:
        """A rank's parameters that are not those of experts, as Megatron's modules list them."""
        of, found = self.of, []

        def add(key: str, values: Numbers) -> None:
            found.append((key, values))

        def rows(values: Numbers) -> Numbers:
            return np.split(values, of.tp, 0)[tensor]

        def columns(values: Numbers) -> Numbers:
            return np.split(values, of.tp, 1)[tensor]

        def a_layer(values: dict[str, Numbers]) -> None:
            norm = values["self_attention.linear_qkv.layer_norm_weight"]
            if of.local:
                add("norm", norm)
            add("proj", columns(values["self_attention.linear_proj.weight"]))
            if not of.local:
                add("norm", norm)
            add("qkv", rows(values["self_attention.linear_qkv.weight"]))
            add("qkv bias", rows(values["self_attention.linear_qkv.bias"]))
            add("q norm", values["self_attention.q_layernorm.weight"])
            norms = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            add("mlp norm", next(values[name] for name in norms if name in values))
            if of.experts:
                add("router", values["mlp.router.weight"])
                found.extend(self.experts(0, values) if of.ep == 1 and of.tp == 1 else [])
            else:
                gate, up = np.split(values["mlp.linear_fc1.weight"], 2, 0)
                add("fc1", np.concatenate([rows(gate), rows(up)]))
                add("fc2", columns(values["mlp.linear_fc2.weight"]))

        if first or (last and of.mtp):
            add("embedding", rows(self.weights["embedding.word_embeddings.weight"]))
        for layer in layers:
            a_layer(self.layer(layer))
        if last:
            add("final norm", self.weights["decoder.final_layernorm.weight"])
            for number in range(of.mtp):
                values = self.layer(number, "mtp.layers.")
                add("enorm", values["enorm.weight"])
                add("hnorm", values["hnorm.weight"])
                add("eh_proj", rows(values["eh_proj.weight"]))
                a_layer({key[18:]: each for key, each in values.items() if key.startswith("transformer_layer.")})
                add("last norm", values["final_layernorm.weight"])
            if not of.tied:
                add("output", rows(self.weights["output_layer.weight"]))
            elif not first:
                add("copy" if of.mtp else "embedding", rows(self.weights["embedding.word_embeddings.weight"]))
        return found

    def layer(self, number: int, before: str = "decoder.layers.") -> dict[str, Numbers]:
        """The weights of a layer, by the ends of their keys."""
        if before == "decoder.layers.":
            return {key[15:]: each[number] for key, each in self.weights.items() if key.startswith(before)}
        before += f"{number}."
        return {key[len(before) :]: each for key, each in self.weights.items() if key.startswith(before)}

    def layers_with_experts(self, layers: range, last: bool) -> list[dict[str, Numbers]]:
        of_mtp = [self.layer(number, "mtp.layers.") for number in range(self.of.mtp if last else 0)]
        inner = [{key[18:]: each for key, each in values.items() if key.startswith("trans")} for values in of_mtp]
        return [*map(self.layer, layers), *inner]

    def experts(self, rank: int, layer: dict[str, Numbers]) -> list[tuple[str, Numbers]]:
        count = self.of.experts // self.of.ep
        first, second = (
            layer[f"mlp.experts.experts.linear_fc{n}.weight"][rank * count : (rank + 1) * count] for n in (1, 2)
        )
        if self.of.grouped == "fused":
            return [("weight1", first.transpose(0, 2, 1)), ("weight2", second.transpose(0, 2, 1))]
        if self.of.grouped == "grouped":
            return [("fc1", each) for each in first] + [("fc2", each) for each in second]
        return [pair for each in zip(first, second) for pair in zip(("fc1", "fc2"), each)]

    def groups(self) -> list[list[list[list[Numbers]]]]:
        """Per optimizer and group, per chunk of the model, its buckets."""
        of, stages = self.of, self.of.stages
        dense: list[list[list[Numbers]]] = [[] for _ in range(stages * of.tp)]
        experts: list[list[list[Numbers]]] = [[] for _ in range(stages * of.ep)]
        begin = 0
        for number, counts in enumerate(of.layers):
            for stage, count in enumerate(counts):
                layers = range(begin, begin + count)
                begin += count
                last = number + 1 == len(of.layers) and stage + 1 == stages
                for tensor in range(of.tp):
                    parameters = self.named_parameters(tensor, layers, number == stage == 0, last)
                    dense[stage * of.tp + tensor].append(self.buckets(parameters))
                for rank in range(of.ep if of.experts else 0):
                    parameters = [
                        each for layer in self.layers_with_experts(layers, last) for each in self.experts(rank, layer)
                    ]
                    if parameters:
                        experts[stage * of.ep + rank].append(self.buckets(parameters))
        return [dense, experts] if of.experts and (of.ep > 1 or of.tp > 1) else [dense]

    def buckets(self, parameters: list[tuple[str, Numbers]]) -> list[Numbers]:
        """The buckets of some parameters, without the padding at their ends."""
        buckets: list[list[int]] = [[]]
        for name, values in reversed(parameters):
            alone = name == "embedding" and (self.of.tied or self.of.mtp > 0) and self.of.stages > 1
            while len(buckets[-1]) % 64:
                buckets[-1].append(_PADDING)
            if alone and buckets[-1]:
                buckets.append([])
            buckets[-1] += values.reshape(-1).tolist()
            if alone or (self.of.bucket is not None and len(buckets[-1]) >= self.of.bucket):
                buckets.append([])
        return [np.array(bucket) for bucket in buckets if bucket]

    def described(self) -> dict[str, DescribedTensor]:
        record = Record("w", 0, 0, "")
        return {
            key: DescribedTensor(
                "BFloat16", values.shape, [DescribedChunk(*chunk, record) for chunk in self.chunks[key]]
            )
            for key, values in self.weights.items()
        }

    @property
    def args(self) -> dict[str, Any]:
        fused = self.of.grouped == "fused"
        return {
            "transformer_impl": "local" if self.of.local else "transformer_engine",
            "moe_grouped_gemm": self.of.grouped != "sequential",
            "moe_use_legacy_grouped_gemm": fused,
            "expert_model_parallel_size": self.of.ep,
        }


def edges_of(bucket: Numbers, dp: int) -> list[int]:
    """Where Megatron cuts a bucket: at parameters, padding, and the ends of ranks."""
    whole = -(-len(bucket) // math.lcm(dp, 128)) * math.lcm(dp, 128)
    edges = {0, len(bucket), *range(0, len(bucket), whole // dp)}
    owner = [*(bucket != _PADDING)]
    edges |= {at for at in range(1, len(bucket)) if owner[at] != owner[at - 1]}
    return sorted(edges)


def described_buckets(written: Written) -> tuple[dict[str, DescribedTensor], dict[str, Numbers]]:
    """Buckets as metadata describes them, and the contents of each file."""
    tensors: dict[str, DescribedTensor] = {}
    contents: dict[str, Numbers] = {}
    optimizers = written.groups()
    for number, groups in enumerate(optimizers):
        before = f"chained_{number}." if len(optimizers) > 1 else ""
        for group, chunks in enumerate(groups):
            for buffer, buckets in enumerate(chunks):
                for at, bucket in enumerate(buckets):
                    name = (
                        f"{before}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{buffer}"
                        f".dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_{at}.param"
                    )
                    starts = parameter_starts(written, bucket)
                    edges = sorted({*edges_of(bucket, written.of.dp), *starts})
                    chunks_of = []
                    for start, stop in itertools.pairwise(edges):
                        file = f"f{len(contents)}"
                        contents["d/" + file] = bucket[start:stop]
                        chunks_of.append(DescribedChunk((start,), (stop - start,), Record(file, 0, 0, "")))
                    tensors[name] = DescribedTensor("Float32", bucket.shape, chunks_of)
    return tensors, contents


def parameter_starts(written: Written, bucket: Numbers) -> list[int]:
    """Starts of parameters: multiples of 64 with the first element of one."""
    return [at for at in range(0, len(bucket), 64) if bucket[at] in written_starts(written)]


def written_starts(written: Written) -> frozenset[int]:
    starts = getattr(written, "starts", None)
    if starts is None:
        of = written.of
        found = set()
        begin = 0
        for counts in of.layers:
            for count in counts:
                layers = range(begin, begin + count)
                begin += count
                for tensor in range(of.tp):
                    for _, values in written.named_parameters(tensor, layers, True, True):
                        found.add(int(values.reshape(-1)[0]))
                for rank in range(of.ep if of.experts else 0):
                    for layer in written.layers_with_experts(layers, True):
                        found |= {int(values.reshape(-1)[0]) for _, values in written.experts(rank, layer)}
        starts = frozenset(found)
        written.starts = starts  # type: ignore[attr-defined]
    return starts


def read_back(tensors: dict[str, DescribedTensor], contents: dict[str, Numbers]) -> dict[str, Numbers]:
    """What tensors joined from runs hold; every element once."""
    found: dict[str, Numbers] = {}
    for name, tensor in tensors.items():
        values = np.full(tensor.shape, _PADDING)
        for chunk in tensor.chunks:
            flat = np.concatenate([contents[run.path][run.first : run.first + run.elements] for run in chunk.runs])
            assert chunk.strides is not None
            strides = tuple(stride * flat.itemsize for stride in chunk.strides)
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            assert (values[box] == _PADDING).all()
            values[box] = np.lib.stride_tricks.as_strided(flat, chunk.sizes, strides)
        found[name] = values
    return found


@examples(60)
@given(sizes())
def test_every_parameter_is_found_in_buckets_with_edges(of: Sizes) -> None:
    written = Written(of)
    buckets, contents = described_buckets(written)
    state = BucketMap("d", written.described(), read_buckets("d", buckets), written.args).tensors()
    found = read_back(state, contents)
    assert found.keys() == {f"optimizer.state.param.{key}" for key in written.weights}
    for key, values in written.weights.items():
        assert (found[f"optimizer.state.param.{key}"] == values).all(), key


@examples(60)
@given(sizes())
def test_every_parameter_is_found_in_joined_buckets(of: Sizes) -> None:
    written = Written(of)
    contents: dict[str, Numbers] = {}
    optimizers: dict[int, Groups] = {}
    for number, groups in enumerate(written.groups()):
        by_group: dict[int, list[Buffer]] = {}
        for group, chunks in enumerate(groups):
            for buckets in chunks:
                path = f"d/f{len(contents)}"
                contents[path] = np.concatenate(buckets)
                size = len(contents[path])
                flat = Flat("Float32", (0, size), (Run(path, 0, 0, 0, size),))
                by_group.setdefault(group, []).append(Buffer("BFloat16", [{"param": flat}], True))
        optimizers[number] = by_group
    args = {**written.args, "ddp_bucket_size": of.bucket}
    state = BucketMap("d", written.described(), optimizers, args).tensors()
    found = read_back(state, contents)
    for key, values in written.weights.items():
        assert (found[f"optimizer.state.param.{key}"] == values).all(), key


@examples(300)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_an_edge_of_nothing_or_a_missing_one_leaves_no_map(lengths: list[int], dp: int, data: st.DataObject) -> None:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(-(-(starts[-1] + length) // 64) * 64)
    size = starts[-1] + lengths[-1]
    whole = -(-size // math.lcm(dp, 128)) * math.lcm(dp, 128)
    cuts = {*range(0, size, whole // dp)} if dp > 1 else set()
    required = {*starts, *(start + length for start, length in zip(starts, lengths))}
    edges = required | cuts
    assert places_by_edges(lengths, [sorted(edges)]) == [(0, start) for start in starts]
    # Before core 0.15, a bucket has its padding at the end.
    to_end = sorted({*required, *range(0, whole, whole // dp), whole})
    assert places_by_edges(lengths, [to_end], padded=True) == [(0, start) for start in starts]
    inner = sorted(required - {0, size} - cuts)
    if inner:
        assert places_by_edges(lengths, [sorted(edges - {data.draw(st.sampled_from(inner))})]) is None
    # A cut at a place that no equal parts have.
    odd = [at for at in range(1, size) if at not in edges and size % at and at * 2 > size and at % 64]
    if odd and cuts - required - {0}:
        assert places_by_edges(lengths, [sorted(edges | {data.draw(st.sampled_from(odd))})]) is None


def copied(tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint with buckets, and the directory of its iteration."""
    case = mcore_case("td_dense_buckets")
    shutil.copytree(case.root, tmp_path / "checkpoint")
    return tmp_path / "checkpoint", tmp_path / "checkpoint" / case.directory.name


def elements_at(directory: Path, name: str, *start: int) -> tuple[Path, int]:
    """The file with the chunk of a tensor that begins at an element, and where its elements are."""
    tensor = read_metadata([str(directory / ".metadata")]).tensors[name]
    record = next(chunk.record for chunk in tensor.chunks if chunk.offsets == start)
    with FileHandles() as handles, handles.borrow(str(directory / record.file)) as file:
        return directory / record.file, archived_tensor(file, record.offset, record.length).offset


def exchange(directory: Path, name: str, first: int, second: int, count: int) -> None:
    places = [elements_at(directory, name, start) for start in (first, second)]
    before = [path.read_bytes()[offset : offset + 4 * count] for path, offset in places]
    assert before[0] != before[1]
    for (path, offset), data in zip(places, reversed(before)):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.param"


def is_refused(root: Path, tmp_path: Path, *texts: str) -> None:
    """State is refused by name, with what to save instead, and nothing is written; weights alone are converted."""
    words = ("--names", "llama", "--to", "huggingface", "--crc", "never")
    fails(
        3,
        "convert",
        root,
        tmp_path / "dst",
        *words,
        "--optimizer",
        "keep",
        texts=[*texts, "--dist-ckpt-optim-fully-reshardable"],
    )
    assert not list(tmp_path.glob("dst/**/*.safetensors"))
    done("convert", root, tmp_path / "dst", *words, "--verify")
    words = ("--to", "dcp", "--shards", "2", "--exclude", "optimizer.*")
    done("convert", root, tmp_path / "other", *words, "--crc", "never", "--verify")


def test_exchanged_masters_of_equal_length_are_refused(tmp_path: Path) -> None:
    root, directory = copied(tmp_path)
    # The norms of a layer.
    exchange(directory, BUCKET, 192, 448, 8)
    with open_checkpoint(root) as tensors:
        assert tensors["decoder.layers.mlp.linear_fc1.layer_norm_weight"][0].size
        with pytest.raises(CheckpointError, match="layer_norm_weight"):
            tensors["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight"][0]
    is_refused(root, tmp_path, "layer_norm_weight")


def test_verification_proves_masters_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, directory = copied(tmp_path)
    exchange(directory, BUCKET, 192, 448, 8)
    monkeypatch.setattr("reshard.source_replicas.sources.check_equal", lambda *arguments: None)
    words = ("--names", "llama", "--to", "huggingface", "--crc", "never", "--verify")
    done("convert", root, tmp_path / "weights", *words)
    fails(4, "convert", root, tmp_path / "dst", *words, "--optimizer", "keep", texts=["layer_norm_weight", "master"])


def test_a_flipped_bit_of_a_master_is_refused(tmp_path: Path) -> None:
    root, directory = copied(tmp_path)
    path, offset = elements_at(directory, BUCKET, 512)
    data = bytearray(path.read_bytes())
    data[offset + 4 * 127 + 2] ^= 0x80
    path.write_bytes(data)
    # Its record has a checksum, which is compared wherever the tensor is joined from it.
    words = ("--names", "llama", "--to", "huggingface", "--optimizer", "keep")
    fails(3, "convert", root, tmp_path / "dst", *words, texts=["CRC", path.name, "word_embeddings"])
    is_refused(root, tmp_path, "word_embeddings")


def test_all_nan_of_a_master_and_its_weight_are_equal(tmp_path: Path) -> None:
    root, directory = copied(tmp_path)
    key = "embedding.word_embeddings.weight"
    for (path, offset), data in (
        (elements_at(directory, key, 0, 0), b"\xc1\xff"),
        (elements_at(directory, BUCKET, 512), b"\x01\0\x80\x7f"),
    ):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
    words = ("--names", "llama", "--to", "huggingface", "--optimizer", "keep", "--crc", "never", "--verify")
    done("convert", root, tmp_path / "dst", *words)


def test_a_moved_edge_is_refused(tmp_path: Path) -> None:
    root, directory = copied(tmp_path)
    path = directory / ".metadata"
    metadata = read_pickle(path.read_bytes(), lambda name: True)
    stored = metadata.fields["storage_data"]
    for state in ("param", "exp_avg", "exp_avg_sq"):
        name = BUCKET[: -len("param")] + state
        chunks = metadata.fields["state_dict_metadata"][name].fields["chunks"]
        at = {chunk.fields["offsets"][0]: chunk for chunk in chunks}
        # A parameter of 64 elements and one of 128 take each other's places.
        at[0].fields["sizes"], at[64].fields["sizes"] = (128,), (64,)
        at[64].fields["offsets"] = (128,)
        records = {key.fields["offset"]: key for key in stored if key.fields["fqn"] == name}
        records[0,].fields["offset"], records[64,].fields["offset"] = (128,), (0,)
    path.write_bytes(pickled(metadata))
    is_refused(root, tmp_path, "optimizer.distributed", "rank 0 of the pipeline")


@pytest.mark.parametrize("to", ["megatron", "unified", "ranks"])
def test_state_without_a_map_is_left_out_only_where_it_is_excluded(to: str, tmp_path: Path) -> None:
    """As of a directory of buckets that was rewritten: the edges of its chunks are gone."""
    root, _ = copied(tmp_path)
    done("convert", root, tmp_path / "rewritten", "--to", "dcp", "--shards", 4)
    words: list[Argument] = ["convert", tmp_path / "rewritten", tmp_path / "out", "--to", to]
    words += ["--dst-strategy", "none"] if to == "ranks" else []
    fails(3, *words, texts=["optimizer.distributed", "--exclude"])
    done(*words, "--exclude", "optimizer.*")
