"""Rank files of verl: what torch wrote comes out right, and what does not fit together is refused."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints.formats.archives import ArchiveEntry, Elements
from reshard.checkpoints.formats.pickles import PickledInstance, inert, inert_class, pickled, read_pickle
from reshard.forms.pytorch.verl import part_of
from reshard.forms.recorded import ProblemError
from reshard.forms.registry import form_of
from tests.corpus import FIXTURES
from tests.corpus_dcp import fixtures, held_in
from tests.forms import FORMS
from tests.running import Argument, done, fails, reshard

(CASE,) = fixtures("verl")
WHOLE = ("--to", "hf-sharded", "--shards", "1")
#: Every dimension of their mesh is there, so that files with replicas can be lost.
REPLICATED = ("w.rows", "second.name", "w.whole", "w.few", "w.none")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASE.path, tmp_path / "src"))


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"model_world_size_4_rank_{rank}.pt"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], crcs: bool = True) -> None:
    """Change the state dictionary of a file."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in entries if name.endswith("/data.pkl")]
    state = read_pickle(entries[name], lambda name: True, persistent=True)
    change(state)
    entries[name] = pickled(state)
    path.write_bytes(zipped(entries))


def flip_storages(path: Path) -> None:
    """Change a bit of every storage."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if "/data/" in entry.filename and entry.file_size:
                lengths = data[entry.header_offset + 26 : entry.header_offset + 30]
                start = entry.header_offset + 30 + sum(struct.unpack("<2H", lengths))
                data[start + entry.file_size - 1] ^= 1
    path.write_bytes(data)


def zipped(entries: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return data.getvalue()


def rewrite_all(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for rank in range(4):
        rewrite(file_of(directory, rank), change)


def fields_of(value: PickledInstance) -> dict[str, Any]:
    """The fields of an instance, which change with it."""
    fields: dict[str, Any] = value.state
    return fields


def spec(state: dict[str, Any], name: str) -> dict[str, Any]:
    """The placement of a DTensor."""
    return fields_of(attributes(state, name)["_spec"])


def attributes(state: dict[str, Any], name: str) -> dict[str, Any]:
    _, fields = state[name].args[3]
    assert isinstance(fields, dict)
    return fields


def mesh(state: dict[str, Any], name: str) -> dict[str, Any]:
    return fields_of(spec(state, name)["mesh"])


def refused(directory: Path, *words: str) -> None:
    result = reshard("convert", directory, directory.with_name("out"), *WHOLE)
    assert result.status == 3, result.err
    assert all(word in result.err for word in words), result.err
    assert not held_in(directory.with_name("out"))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("ranks", "checkpoint2")])
def test_what_torch_wrote_comes_out_right_through_every_form(form: str, tmp_path: Path) -> None:
    assert form_of(str(CASE.path)).name == "verl"
    shards: list[Argument] = ["--shards", 3] if form not in ("unified", "huggingface") else []
    done("convert", CASE.path, tmp_path / "there", "--to", form, *shards, "--rename", "*=*", "--verify")
    done("convert", tmp_path / "there", tmp_path / "back", *WHOLE, "--verify")
    assert held_in(tmp_path / "back") == CASE.tensors


def test_commands_read_it(tmp_path: Path) -> None:
    left_out = ["--exclude", "w.few"]
    done("convert", CASE.path, tmp_path / "ranks", "--dst-strategy", "same", "--format", "safetensors", *left_out)
    strategy = next((tmp_path / "ranks").glob("*strategy*"))
    done("convert", tmp_path / "ranks", tmp_path / "back", *WHOLE, "--src-strategy", strategy)
    assert held_in(tmp_path / "back") == {name: each for name, each in CASE.tensors.items() if name != "w.few"}
    assert "all equal" in done("diff", CASE.path, tmp_path / "back", *left_out).out
    fingerprints = [done("fingerprint", path, *left_out).out for path in (CASE.path, tmp_path / "back")]
    assert fingerprints[0] == fingerprints[1]
    assert done("get", CASE.path, "w.rows", "--slice", "2:5,1").out


@pytest.mark.parametrize("command", ["inspect", "stats", "suggest", "diff"])
def test_json_names_the_form(command: str) -> None:
    paths = [CASE.path, CASE.path] if command == "diff" else [CASE.path]
    result = done(command, *paths, "--json").json
    assert '"verl"' in json.dumps(result)


def test_inspect_counts_what_is_there(saved: Path) -> None:
    for name in ("optim", "extra_state"):
        (saved / f"{name}_world_size_4_rank_0.pt").write_bytes(b"not read")
    result = done("inspect", saved)
    assert "verl: 4 files" in result.out and "not complete" not in result.out
    unread = "optimizer and other state is not read: extra_state_world_size_4_rank_0.pt, optim_world_size_4_rank_0.pt"
    assert unread in reshard("convert", saved, saved.with_name("out"), *WHOLE).err


def test_a_file_or_the_name_of_the_form_as_a_target_is_wrong_usage(saved: Path, tmp_path: Path) -> None:
    refused(file_of(saved, 0), "is one rank's file", f"SRC: {saved}")
    result = reshard("convert", saved, tmp_path / "out", "--to", "verl")
    assert result.status == 2 and "--to huggingface" in result.err


def test_the_configuration_beside_the_files_goes_along(saved: Path, tmp_path: Path) -> None:
    (saved / "huggingface").mkdir()
    (saved / "huggingface" / "config.json").write_text("{}")
    done("convert", saved, tmp_path / "out", "--to", "huggingface", "--verify")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    (tmp_path / "out" / "config.json").unlink()
    assert reshard("verify", tmp_path / "out", "--src", saved).status == 4


def test_a_flipped_bit_is_found(saved: Path, tmp_path: Path) -> None:
    flip_storages(file_of(saved, 1))
    fails(3, "convert", saved, tmp_path / "out", *WHOLE, texts=["rank_1.pt", "CRC-32"])
    done("convert", saved, tmp_path / "out", *WHOLE, "--crc", "never", "--check-replicas", "never")


# Other versions of torch.


def test_the_mesh_of_older_torch_is_read(saved: Path, tmp_path: Path) -> None:
    """Up to torch 2.8 a mesh has a tensor of ranks, up to 2.11 a layout of one shape."""

    def older(state: dict[str, Any]) -> None:
        ranks = state["w.plain"]
        for fields in (mesh(state, "w.rows"), mesh(state, "layer.1.weight"), mesh(state, "layer.0.weight")):
            shape = tuple(int(np.prod(axis.state["shape"])) for axis in fields.pop("_layout").state["axes"])
            args = (*ranks.args[:2], shape, *ranks.args[3:])
            fields["mesh"] = inert(ranks.name, *args)
            fields["_coordinate_on_dim"] = [*fields["_coordinate_on_dim"]]

    def between(state: dict[str, Any]) -> None:
        for fields in (mesh(state, "w.rows"), mesh(state, "layer.1.weight"), mesh(state, "layer.0.weight")):
            shape = fields.pop("mesh").args[2]
            nested: Any = ((shape[0], 1), *shape[1:]) if len(shape) > 1 else shape[0]
            fields["_layout"] = inert("torch.distributed._mesh_layout._MeshLayout", state={"shape": nested})

    for change in (older, between):
        rewrite_all(saved, change)
        done("convert", saved, tmp_path / change.__name__, *WHOLE, "--verify")
        assert held_in(tmp_path / change.__name__) == CASE.tensors


# Files that are missing, damaged, or not of one save.


def test_a_missing_file_is_named(saved: Path) -> None:
    file_of(saved, 2).unlink()
    refused(saved, "1 file of 4 missing", "model_world_size_4_rank_2.pt")
    assert "not complete" in done("inspect", saved).out


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lost", ["missing", "cut short", "flipped"])
def test_replicas_stand_in_for_a_lost_file(lost: str, rank: int, saved: Path, tmp_path: Path) -> None:
    path = file_of(saved, rank)
    if lost == "missing":
        path.unlink()
    elif lost == "flipped":
        flip_storages(path)
    else:
        path.write_bytes(path.read_bytes()[:-100])
    include = [word for name in REPLICATED for word in ("--include", name)]
    result = reshard("convert", saved, tmp_path / "out", *WHOLE, *include, "--verify")
    assert result.status == 0 and path.name in result.err and "replicas" in result.err
    assert held_in(tmp_path / "out") == {name: CASE.tensors[name] for name in REPLICATED}
    result = reshard("convert", saved, tmp_path / "all", *WHOLE)
    assert result.status == 3 and path.name in result.err


def test_files_of_two_saves_are_refused(saved: Path) -> None:
    shutil.copy(file_of(saved, 0), saved / "model_world_size_2_rank_0.pt")
    refused(saved, "saves of 2 and 4 ranks")
    (saved / "model_world_size_2_rank_0.pt").unlink()
    shutil.copy(file_of(saved, 0), saved / "model_world_size_4_rank_7.pt")
    refused(saved, "a file of rank 7 in a save of 4 ranks")


def test_a_file_under_the_name_of_another_rank_leaves_a_hole(saved: Path) -> None:
    shutil.copy(file_of(saved, 0), file_of(saved, 3))
    refused(saved, "'w.both'")


def test_a_tensor_that_one_file_lacks_is_refused(saved: Path) -> None:
    rewrite(file_of(saved, 2), lambda state: state.pop("w.rows"))
    refused(saved, "'w.rows'", "is missing", "model_world_size_4_rank_2.pt", "--exclude 'w.rows'")


def test_a_tensor_of_another_shape_in_one_file_is_refused(saved: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        wrapper = state["w.rows"].args[2]
        larger = (*wrapper[:2], (8, 3), *wrapper[3:])
        state["w.rows"].args = (*state["w.rows"].args[:2], larger, state["w.rows"].args[3])

    rewrite(file_of(saved, 0), change)
    refused(saved, "'w.rows'", "Float32 [8, 3]", "Float32 [7, 3]")


def test_a_part_of_another_size_than_its_placement_is_refused(saved: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        attributes(state, "w.rows")["_local_tensor"] = attributes(state, "layer.1.weight")["_local_tensor"]

    rewrite_all(saved, change)
    refused(saved, "'w.rows'", "[2, 7]", "[4, 3] by its placement")


def placement(kind: str, **fields: Any) -> PickledInstance:
    return inert(f"torch.distributed.tensor.placement_types.{kind}", state=fields)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ((placement("Replicate"), placement("Partial"), placement("Replicate")), "the placement Partial"),
        ((placement("Shard", dim=2), placement("Replicate"), placement("Replicate")), "the placement Shard"),
        ((placement("Shard", dim=-1), placement("Replicate"), placement("Replicate")), "the placement Shard"),
        ((placement("_StridedShard", dim=0, split_factor=3), *[placement("Shard", dim=0)] * 2), "strided"),
        ((placement("Shard", dim=0),), "a mesh or placements"),
        ("Shard", "a mesh or placements"),
    ],
    ids=["partial", "no_such_dimension", "negative_dimension", "strided", "too_few", "no_tuple"],
)
def test_other_placements_are_refused(placements: Any, words: str, saved: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        spec(state, "w.rows").update(placements=placements, shard_order=())

    rewrite_all(saved, change)
    refused(saved, "'w.rows'", words)
    done("convert", saved, saved.with_name("out"), *WHOLE, "--exclude", "w.rows", "--exclude", "second.name")


def test_an_order_of_cuts_that_contradicts_the_placements_is_refused(saved: Path) -> None:
    entry = inert("torch.distributed.tensor._dtensor_spec.ShardOrderEntry", 1, (1,))
    rewrite_all(saved, lambda state: spec(state, "w.rows").update(shard_order=(entry,)))
    refused(saved, "'w.rows'", "order")


@pytest.mark.parametrize("place", [(0, 9, 0), (0,), "x", (0, True, 0)], ids=str)
def test_a_place_outside_of_the_mesh_is_refused(place: Any, saved: Path) -> None:
    rewrite_all(saved, lambda state: mesh(state, "w.rows").update(_coordinate_on_dim=place))
    refused(saved, "the place of its rank")


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_sharded_tensors_of_fsdp1_are_refused_by_name(command: str, tmp_path: Path) -> None:
    words: list[Argument] = [tmp_path / "out", "--to", "hf"] if command == "convert" else []
    fails(3, command, FIXTURES / "fsdp1", *words, texts=["tensors of FSDP1", "torch.distributed.checkpoint"])


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize("tracked", [False, True])
def test_a_directory_of_saves_points_to_the_last_one(command: str, tracked: bool, tmp_path: Path) -> None:
    """verl has files beside the directory of a model, and a tracker under the name of Checkpoint 2.0's."""
    for name in ("global_step_9/actor", "global_step_10/critic", "global_step_10/actor"):
        shutil.copytree(CASE.path, tmp_path / "run" / name)
    (tmp_path / "run" / "global_step_10" / "data.pt").write_bytes(b"PK")
    if tracked:
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    last = tmp_path / "run" / "global_step_10"
    for place in (last.parent, last):
        words: list[Argument] = [tmp_path / "out", "--to", "hf"] if command == "convert" else []
        fails(3, command, place, *words, texts=[f"did you mean {last}/actor or {last}/critic"])


def test_tensors_of_ranks_outside_their_mesh_must_be_equal(saved: Path) -> None:
    """Experts of other ranks have the same names, meshes and shapes; so have plain tensors that were cut by hand."""

    def swap(state: dict[str, Any]) -> None:
        local, other = (attributes(state, name)["_local_tensor"] for name in ("layer.1.weight", "w.rows"))
        local.args = (other.args[0], 0, (2, 7), (0, 1), *local.args[4:])

    rewrite(file_of(saved, 1), swap)
    refused(saved, "'layer.1.weight'", "over 2 ranks of 4", "different values")


@pytest.mark.parametrize("name", ["layer.1.weight", "w.plain"])
def test_lost_files_may_hold_other_values_of_tensors_without_a_full_mesh(
    name: str, saved: Path, tmp_path: Path
) -> None:
    """Ranks 0 and 2 have all parts of the layer's weight."""
    for rank in (1, 3):
        file_of(saved, rank).unlink()
    result = reshard("convert", saved, tmp_path / "out", *WHOLE, "--include", name)
    assert result.status == 3 and "2 files of 4 missing" in result.err


def test_plain_tensors_of_different_values_are_refused(saved: Path) -> None:
    with zipfile.ZipFile(file_of(saved, 3)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    state = read_pickle(next(iter(entries.values())), lambda name: True, persistent=True)
    key = state["w.plain"].args[0].args[0][2]
    entries[f"model_world_size_4_rank_3/data/{key}"] = bytes(24)
    file_of(saved, 3).write_bytes(zipped(entries))
    refused(saved, "'w.plain'", "over 1 rank of 4", "model_world_size_4_rank_3.pt")


def test_values_other_than_tensors_are_named(saved: Path, tmp_path: Path) -> None:
    rewrite_all(saved, lambda state: state.update({"layer._extra_state": None, "step": 3}))
    result = reshard("convert", saved, tmp_path / "out", *WHOLE)
    assert result.status == 0 and "2 values other than tensors skipped: " in result.err
    assert held_in(tmp_path / "out") == CASE.tensors


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch.distributed.tensor.Other"])
def test_nothing_else_may_be_named(name: str, saved: Path) -> None:
    rewrite_all(saved, lambda state: state.update(x=inert(name, "touch EXECUTED")))
    refused(saved, name, "nothing of the file is run")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", bytes(300), zipped({"a/data.pkl": b"\x80\x02]."})], ids=len)
def test_other_files_are_refused(content: bytes, saved: Path) -> None:
    for rank in range(4):
        file_of(saved, rank).write_bytes(content)
    refused(saved, "model_world_size_4_rank_0.pt")


# Parts of tensors.


class _Archive:
    """An archive in which every tensor has this shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def tensor(self, value: object) -> Elements:
        return Elements("Float32", self.shape, (1,) * len(self.shape), 0, ArchiveEntry(0, 0, 0))


def chunks(indexes: list[int], count: int) -> list[list[int]]:
    """As torch.chunk cuts, with empty ones at the end."""
    size = -(-len(indexes) // count)
    return [indexes[number * size : (number + 1) * size] for number in range(count)]


def naive(
    shape: Sequence[int], mesh_shape: Sequence[int], place: Sequence[int], placements: Sequence[Any]
) -> list[list[int]]:
    """The indexes per dimension that a rank has, as torch describes placements: from the first on, one by one."""
    held = [[*range(size)] for size in shape]
    for count, at, each in zip(mesh_shape, place, placements):
        dimension = each.state.get("dim")
        if dimension is None:
            continue
        blocks = chunks(held[dimension], each.state.get("split_factor", 1))
        held[dimension] = [index for block in blocks for index in chunks(block, count)[at]]
    return held


def dtensor(shape: Sequence[int], mesh_shape: Sequence[int], place: Sequence[int], placements: Sequence[Any]) -> Any:
    axes = tuple(inert("_FlatLayout", state={"shape": (size,)}) for size in mesh_shape)
    layout = inert("_MeshLayout", state={"axes": axes})
    fields = {"_layout": layout, "_coordinate_on_dim": tuple(place)}
    state = {"mesh": inert("DeviceMesh", state=fields), "placements": tuple(placements)}
    wrapper = (inert_class("torch.distributed.tensor.DTensor"), inert_class("torch.float32"), tuple(shape))
    args = (inert_class("torch._utils._rebuild_wrapper_subclass"), wrapper[0], wrapper)
    attributes = {"_local_tensor": None, "_spec": inert("DTensorSpec", state=state)}
    return inert("torch._tensor._rebuild_from_type_v2", *args, (None, attributes))


def cases(seed: int) -> Iterator[tuple[list[int], list[int], list[Any]]]:
    random = np.random.default_rng(seed)
    for _ in range(40):
        shape = random.integers(0, 12, random.integers(1, 4)).tolist()
        mesh_shape = random.integers(1, 5, random.integers(1, 4)).tolist()
        dims = [int(random.integers(-1, len(shape))) for _ in mesh_shape]
        placements = [placement("Replicate") if dim < 0 else placement("Shard", dim=dim) for dim in dims]
        # FSDP over tensor parallelism: the first cut comes after all others of its dimension.
        right = [size for size, dim in zip(mesh_shape[1:], dims[1:]) if dim == dims[0]]
        if dims[0] >= 0 and right and random.random() < 0.6:
            placements[0] = placement("_StridedShard", dim=dims[0], split_factor=int(np.prod(right)))
        yield shape, mesh_shape, placements


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_those_of_a_naive_cut(seed: int) -> None:
    for shape, mesh_shape, placements in cases(seed):
        covered = np.zeros(shape, int)
        refused_any = False
        for place in np.ndindex(*mesh_shape):
            held = naive(shape, mesh_shape, place, placements)
            sizes = [len(indexes) for indexes in held]
            try:
                part: Any | None = part_of(_Archive(sizes), dtensor(shape, mesh_shape, place, placements))  # type: ignore[arg-type]
            except ProblemError:
                # Uneven strided parts may be no boxes.
                assert any("Strided" in each.name for each in placements)
                refused_any = True
                continue
            assert part is not None and part.mesh_size == np.prod(mesh_shape)
            if np.prod(sizes):
                boxes = [[*range(start, start + size)] for start, size in zip(part.offsets, part.sizes)]
                assert boxes == held
            covered[np.ix_(*held)] += 1
        replicas = np.prod([size for size, each in zip(mesh_shape, placements) if "dim" not in each.state])
        assert refused_any or (covered == replicas).all()
