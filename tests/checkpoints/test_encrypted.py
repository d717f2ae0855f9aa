"""Encrypted sources: every mode and block size is decrypted correctly or refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Optional

import pytest

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.decryption import Decryption
from reshard.errors import CheckpointError, DamagedCheckpointError, EncryptedCheckpointError
from tests.conftest import LONG
from tests.corpus import FIXTURES
from tests.encryption import KEY, MODES, encrypt_file, encrypt_tree, encrypted, with_key
from tests.running import Argument, done, fails, reshard, warns
from tests.small import World, tensors
from tests.trees import ckpt_bytes, layout, read_checkpoint, scalar, single, tree_bytes, value

ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")

FULL = tensors()
FILES = FIXTURES / "ckpt_files"
OTHER_KEY = b"fedcba9876543210"
# The small files have some hundred bytes: one block, a few, many that end anywhere, and one for every unit.
BLOCKS = [1 << 20, 160, 37, 16]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path


def contents(path: Path, decryption: Optional[Decryption] = None) -> dict[str, bytes]:
    """Every tensor's bytes, through the reader of files."""
    with FileHandles(decryption=decryption) as handles:
        index = read_index(handles, str(path))
        with handles.borrow(str(path)) as file:
            return {
                name: b"".join(file.read(*extent) for extent in tensor.extents)
                for name, tensor in index.tensors.items()
            }


def save_twice(world: World, how: object, block: int) -> dict[str, bytes]:
    """What a conversion makes of the plain tree, which is encrypted then."""
    world.save(FULL)
    world.convert()
    files = tree_bytes(world.dst)
    shutil.rmtree(world.dst)
    encrypt_tree(world.src, how, block)  # type: ignore[arg-type]
    return files


# What MindSpore wrote.


@pytest.mark.parametrize("name", ["encrypted_gcm.ckpt", "encrypted_cbc.ckpt"])
def test_files_that_mindspore_encrypted_are_converted(name: str, key_file: Path, tmp_path: Path) -> None:
    expected = json.loads((FILES / "expected.json").read_text())["files"][name]
    assert expected["enc_key"].encode() == KEY
    words: list[Argument] = [FILES / name, tmp_path / "out", "--src-strategy", "none", "--dst-strategy", "none"]
    done("transform-dir", *words, "--decrypt-key-file", key_file)
    contents = read_checkpoint(tmp_path / "out" / "rank_0" / "checkpoint_0.ckpt")
    assert sorted(contents) == sorted(parameter["name"] for parameter in expected["params"])
    for parameter in expected["params"]:
        tensor = contents[parameter["name"]]
        assert (tensor.dtype, list(tensor.array.shape)) == (parameter["dtype"], parameter["shape"])
        assert hashlib.sha256(tensor.array.tobytes()).hexdigest() == parameter["sha256"]


# Conversions.


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mode", MODES)
def test_an_encrypted_tree_gives_the_same_bytes_as_the_plain_one(
    world: World, mode: str, block: int, key_file: Path
) -> None:
    target = save_twice(world, mode, block)
    world.convert("--decrypt-key-file", key_file)
    assert tree_bytes(world.dst) == target


@pytest.mark.parametrize("form", ["unified", "huggingface", "checkpoint2"])
def test_encrypted_ranks_become_any_form(world: World, form: str, key_file: Path) -> None:
    world.save(FULL)
    strategies: list[Argument] = ["--src-strategy", world.old]
    strategies += ["--dst-strategy", world.new] if form == "checkpoint2" else []
    done("convert", world.src, world.root / "plain", "--to", form, *strategies)
    encrypt_tree(world.src, {0: "AES-GCM", 1: "AES-CBC", 2: "SM4-CBC"}, 100)
    done("convert", world.src, world.dst, "--to", form, *strategies, "--decrypt-key-file", key_file)
    content, expected = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.safetensors")}
        for root in (world.dst, world.root / "plain")
    )
    assert content == expected and content


@pytest.mark.parametrize("io_", ["mmap", "pread"])
def test_plain_files_and_all_cipher_modes_may_be_mixed(world: World, io_: str, key_file: Path) -> None:
    target = save_twice(world, {0: "AES-GCM", 1: "AES-CBC", 3: "SM4-CBC"}, 100)
    world.convert("--decrypt-key-file", key_file, "--io", io_, "--verify")
    assert tree_bytes(world.dst) == target


@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_aes_accepts_keys_of_every_length(mode: str, size: int, tmp_path: Path) -> None:
    key = bytes(range(size))
    data = ckpt_bytes({"w": value("w", (5, 7))})
    (tmp_path / "net.ckpt").write_bytes(encrypted(data, mode, key, 40))
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "plain.ckpt").write_bytes(data)
    assert contents(tmp_path / "net.ckpt", Decryption(str(tmp_path / "key"))) == contents(tmp_path / "plain.ckpt")


@pytest.mark.parametrize("mode", MODES)
def test_a_crc_after_the_last_block_is_ignored(world: World, mode: str, key_file: Path) -> None:
    target = save_twice(world, mode, 64)
    for path in world.src.glob("*/*.ckpt"):
        path.write_bytes(path.read_bytes() + b"crc_num" + bytes(10))
    world.convert("--decrypt-key-file", key_file)
    assert tree_bytes(world.dst) == target


def test_commands_print_the_same_for_an_encrypted_and_a_plain_tree(plain: World, key_file: Path) -> None:
    plain.save(FULL)
    plain.convert()
    strategies: list[Argument] = ["--src-strategy", plain.old, "--dst-strategy", plain.new]
    commands: list[list[Argument]] = [
        ["plan", plain.src, plain.root / "nothing", *strategies, "--json"],
        ["fingerprint", plain.src, "--strategy", plain.old],
        ["verify", plain.dst, "--src", plain.src, *strategies],
        ["verify", plain.src, "--replicas", "--strategy", plain.old],
        ["strategy", "check", plain.old, plain.src, "--all"],
        ["by-rank", 1, plain.src, plain.root / "one", *strategies, "--dry-run", "--json"],
        ["recover", plain.src, plain.root / "all", "--strategy", plain.old, "--dry-run", "--json"],
    ]
    file = plain.src / "rank_1" / "net-1_10.ckpt"
    inspected = done("inspect", file, "--json").json
    before = [done(*words).out for words in commands]
    encrypt_tree(plain.src, {0: "AES-CBC", 1: "AES-GCM", 2: "SM4-CBC"}, 100)
    for words, message in zip(commands, before):
        assert timeless(done(*words, "--decrypt-key-file", key_file).out) == timeless(message)
        fails(3, *words, texts=["rank_0", "is encrypted with", "--decrypt-key-file FILE"])
    looked = done("inspect", file, "--json", "--decrypt-key-file", key_file).json
    assert looked == {**inspected, "cipher": "AES-GCM"}
    assert "ckpt encrypted with AES-GCM," in done("inspect", file, "--decrypt-key-file", key_file).out
    steps = done("inspect", plain.src, "--strategy", plain.old, "--decrypt-key-file", key_file, "--json").json["steps"]
    assert [step["complete"] for step in steps] == [True]
    assert "is encrypted with" in done("inspect", plain.src).out


def timeless(message: str) -> object:
    """The output without timings and memory."""
    try:
        document = json.loads(message)
    except ValueError:
        return message
    return {name: part for name, part in document.items() if name not in ("seconds", "phases", "memory", "space")}


def test_lost_ranks_are_recovered_from_encrypted_replicas(plain: World, key_file: Path) -> None:
    plain.save(FULL, ranks=[0, 1, 3])
    expected = read_checkpoint(plain.src / "rank_0" / "net-1_10.ckpt")
    encrypt_tree(plain.src, "AES-GCM", 50)
    words: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    done(*words, "--decrypt-key-file", key_file)
    # What is written is not encrypted.
    contents = read_checkpoint(plain.dst / "rank_2" / "net-1_10.ckpt")
    assert {name: tensor.array.tobytes() for name, tensor in contents.items()} == {
        name: tensor.array.tobytes() for name, tensor in expected.items()
    }


# Reading anywhere.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [16, 100, 70_000, 300_000, 600_000])
def test_any_range_of_an_encrypted_file_is_decrypted(mode: str, block: int, tmp_path: Path) -> None:
    data = ckpt_bytes({"w": value("w", (3, 57_000 if mode != "SM4-CBC" else 9_000))})
    data = data[:40_000] if block == 16 else data
    path = tmp_path / "net.ckpt"
    path.write_bytes(encrypted(data, mode, block=block))
    (tmp_path / "key").write_bytes(KEY)
    picked = random.Random(block)
    with FileHandles(decryption=Decryption(str(tmp_path / "key"))) as handles:
        with handles.borrow(str(path)) as file:
            assert (file.size(), file.cipher, file.descriptor) == (len(data), mode, None)
            assert file.read(0, len(data)) == data
            assert file.read(0, len(data) + 99) == data
            assert file.read(len(data), 1) == file.read(len(data) + 50, 1) == file.read(5, 0) == b""
        failures: list[tuple[int, int]] = []

        def read_some(ranges: list[tuple[int, int]]) -> None:
            for start, stop in ranges:
                out = bytearray(stop - start)
                with handles.borrow(str(path)) as file:
                    done = file.read_into(start, memoryview(out))
                if done != stop - start or bytes(out) != data[start:stop]:
                    failures.append((start, stop))

        threads = []
        for _ in range(3):
            ends = [sorted(picked.sample(range(len(data)), 2)) for _ in range(30 if LONG else 8)]
            near = [(start, min(start + picked.randint(0, 40), len(data))) for start, _ in ends]
            threads.append(threading.Thread(target=read_some, args=([*map(tuple, ends), *near],)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


# What is wrong.


def small_file(tmp_path: Path, mode: str, block: int = 50) -> tuple[Path, Decryption, dict[str, bytes]]:
    data = ckpt_bytes({"w": value("w", (3, 5)), "v": value("v", (4,)), "step": scalar(7)})
    plain = tmp_path / "plain.ckpt"
    plain.write_bytes(data)
    path = tmp_path / "net.ckpt"
    path.write_bytes(encrypted(data, mode, block=block))
    (tmp_path / "key").write_bytes(KEY)
    return path, Decryption(str(tmp_path / "key")), contents(plain)


@pytest.mark.parametrize("block", [50, 1000])
def test_aes_gcm_detects_a_change_of_any_byte(block: int, tmp_path: Path) -> None:
    path, decryption, expected = small_file(tmp_path, "AES-GCM", block)
    assert contents(path, decryption) == expected
    data = path.read_bytes()
    # The last bytes of the IV are not used, by MindSpore neither.
    size = len(encrypted(b"x" * block, "AES-GCM")) if block < 100 else len(data)
    unused = {start + 40 + byte for start in range(0, len(data), size) for byte in range(4)}
    for position in range(len(data)):
        for bit in (1, 0x80):
            path.write_bytes(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])
            if position in unused:
                assert contents(path, decryption) == expected
                continue
            with pytest.raises(CheckpointError) as caught:
                contents(path, decryption)
            assert str(path) in caught.value.message


@pytest.mark.parametrize("mode", MODES)
def test_an_encrypted_file_truncated_anywhere_is_an_error(mode: str, tmp_path: Path) -> None:
    path, decryption, _ = small_file(tmp_path, mode)
    data = path.read_bytes()
    # A file shorter than the mark cannot be recognised as encrypted.
    for size in range(4, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as caught:
            contents(path, decryption)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_damage_of_cbc_is_distinguished_from_a_wrong_key(mode: str, tmp_path: Path) -> None:
    path, decryption, _ = small_file(tmp_path, mode)
    data = path.read_bytes()
    # The padding of the last block.
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match="padding"):
        contents(path, decryption)
    # The first bytes: the key may be wrong, too.
    path.write_bytes(data[:32] + bytes(16) + data[48:])
    with pytest.raises(EncryptedCheckpointError, match="the key is wrong"):
        contents(path, decryption)


def test_the_error_for_damaged_cbc_names_the_missing_authentication(tmp_path: Path) -> None:
    path, decryption, _ = small_file(tmp_path, "AES-CBC", 1000)
    data = bytearray(path.read_bytes())
    data[32 + 16] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="AES-CBC"):
        contents(path, decryption)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [1 << 20, 50])
def test_a_wrong_key_error_names_the_file_and_hides_the_key(world: World, mode: str, block: int) -> None:
    world.save(FULL)
    encrypt_tree(world.src, mode, block)
    wrong = with_key(world.root / "key", OTHER_KEY)
    path = str(world.src / "rank_0" / "net-1_10.ckpt")
    result = world.refuses(3, path, mode, "the key is wrong", options=tuple(wrong))
    assert OTHER_KEY.decode() not in result.err


@pytest.mark.parametrize("mode", MODES)
def test_many_wrong_keys_are_all_refused(mode: str, tmp_path: Path) -> None:
    path, _, _ = small_file(tmp_path, mode)
    picked = random.Random(mode)
    for _ in range(300):
        (tmp_path / "key").write_bytes(bytes(picked.randrange(256) for _ in range(16)))
        with pytest.raises(EncryptedCheckpointError):
            contents(path, Decryption(str(tmp_path / "key")))


def test_a_file_of_another_cipher_mode_is_an_error(world: World, key_file: Path) -> None:
    world.save(FULL)
    encrypt_file(world.src / "rank_1" / "net-1_10.ckpt", "AES-CBC")
    options = ("--decrypt-key-file", key_file, "--decrypt-mode", "AES-GCM")
    world.refuses(3, "rank_1", "encrypted with AES-CBC, not with AES-GCM", options=options)
    world.convert(*options[:3], "AES-CBC")


def test_an_sm4_key_has_16_bytes(world: World) -> None:
    world.save(FULL)
    encrypt_tree(world.src, "SM4-CBC")
    world.refuses(3, "16 bytes", "has 24", options=tuple(with_key(world.root / "key", bytes(24))))


@pytest.mark.parametrize("mode", MODES)
def test_without_a_key_the_error_names_the_option(world: World, mode: str) -> None:
    world.save(FULL)
    encrypt_tree(world.src, {3: mode})
    world.refuses(3, "rank_3", f"encrypted with {mode}", "--decrypt-key-file FILE")


@pytest.fixture
def large(tmp_path: Path) -> World:
    """Replicas of a tensor of many blocks, in most of which there is nothing else."""
    world = World(tmp_path, single({"w": layout([2, 2], [0, -1])}), single({"w": layout([2], [0, -1])}))
    world.save({"w": value("w", (600, 400))})
    return world


def with_changed_byte(path: Path, place: float) -> Path:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("place", [0.21, 0.5, 1.0])
def test_replicas_replace_a_file_with_a_wrong_tag(large: World, place: float, key_file: Path) -> None:
    large.convert()
    files = tree_bytes(large.dst)
    shutil.rmtree(large.dst)
    encrypt_tree(large.src, "AES-GCM", 4000)
    path = with_changed_byte(large.src / "rank_0" / "net-1_10.ckpt", place)
    words: list[Argument] = ["--src-strategy", large.old, "--dst-strategy", large.new, "--decrypt-key-file", key_file]
    result = done("transform-dir", large.src, large.dst, *words, "--verify")
    warns(result, path, "tag of block", "rank 0 counts as absent")
    assert tree_bytes(large.dst) == files
    warns(done("verify", large.dst, "--src", large.src, *words), path, "tag of block")


@pytest.mark.parametrize("io_", ["mmap", "pread"])
def test_a_wrong_tag_ends_the_conversion_although_crc_is_never(large: World, io_: str, key_file: Path) -> None:
    encrypt_tree(large.src, "AES-GCM", 4000)
    path = with_changed_byte(large.src / "rank_0" / "net-1_10.ckpt", 0.5)
    options = ("--decrypt-key-file", key_file, "--crc", "never", "--check-replicas", "never", "--io", io_)
    fails(3, *large.words(*options), texts=[path, "is damaged", "tag of block"])
    assert not (large.dst / "rank_0").exists()


# The key.


def test_the_key_may_come_from_standard_input(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = save_twice(world, "AES-GCM", 100)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(KEY + b"\n")))
    world.convert("--decrypt-key-file", "-", "--verify")
    assert tree_bytes(world.dst) == target


def test_the_key_may_come_through_a_pipe(key_file: Path) -> None:
    receiver, sender = os.pipe()
    os.write(sender, KEY)
    os.close(sender)
    try:
        assert Decryption(f"/proc/self/fd/{receiver}").key == KEY
    finally:
        os.close(receiver)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("key", [KEY, KEY[:15] + b"\n", bytes(24), bytes(range(32))])
def test_a_trailing_newline_is_not_part_of_the_key(key: bytes, end: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(key + end)
    assert Decryption(str(tmp_path / "key")).key == key


@pytest.mark.parametrize("content", [b"", KEY[:15], KEY + b"0", KEY + b"\n\n", b"00" * 17, b"x" * 5000])
def test_an_invalid_key_is_an_error_that_hides_it(world: World, content: bytes) -> None:
    world.save(FULL)
    result = world.refuses(3, "--decrypt-key-file", "16, 24 or 32", options=tuple(with_key(world.root / "k", content)))
    assert not content.strip() or content.decode() not in result.err


def test_a_key_typed_as_its_file_is_not_repeated(world: World) -> None:
    world.save(FULL)
    result = world.refuses(3, "the file does not exist", options=("--decrypt-key-file", KEY.decode()))
    assert KEY.decode() not in result.err + result.out


def test_a_directory_as_key_file_is_an_error(world: World) -> None:
    world.save(FULL)
    world.refuses(3, "--decrypt-key-file", "directory", options=("--decrypt-key-file", world.src))


def test_a_mode_without_a_key_is_wrong_usage(world: World) -> None:
    world.save(FULL)
    world.refuses(2, "--decrypt-key-file FILE", options=("--decrypt-mode", "AES-GCM"))


def test_neither_the_key_nor_its_file_is_recorded_or_shown(world: World, tmp_path: Path) -> None:
    save_twice(world, "AES-GCM", 100)
    options = with_key(tmp_path / "a-telling-name")
    results = [world.convert("--ranks", "0", *options), done("resume", world.dst, *options)]
    results.append(reshard("status", world.dst))
    for path in world.dst.rglob("*"):
        for secret in ("a-telling-name", KEY.decode()):
            assert secret not in path.name
            assert not path.is_file() or secret.encode() not in path.read_bytes()
    for result in results:
        assert KEY.decode() not in result.err + result.out and "a-telling-name" not in result.err + result.out
    decryption = Decryption(str(tmp_path / "a-telling-name"))
    assert KEY.decode() not in repr(decryption) and KEY not in pickle.dumps(decryption)
    assert pickle.loads(pickle.dumps(decryption)).key == KEY


def test_resume_takes_the_key_again(world: World, key_file: Path) -> None:
    target = save_twice(world, "AES-CBC", 100)
    world.convert("--ranks", "0", "--decrypt-key-file", key_file)
    world.run("--decrypt-key-file", key_file, "--dry-run")
    started = world.run("--decrypt-key-file", key_file, "--jobs", "1", "--shard", "0/2")
    assert started.status == 0
    shutil.rmtree(world.dst / "rank_1", ignore_errors=True)
    fails(3, "resume", world.dst, texts=["is encrypted with AES-CBC", "--decrypt-key-file FILE"])
    done("resume", world.dst, "--decrypt-key-file", key_file)
    assert tree_bytes(world.dst) == target


def test_workers_do_not_get_a_key_from_standard_input(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(KEY)))
    options = ("--decrypt-key-file", "-", "--scheduler", "tcp://127.0.0.1:1")
    world.refuses(2, "--decrypt-key-file -", "--scheduler", options=options)


def test_openssl_without_sm4_is_reported(world: World, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm

    world.save(FULL)
    encrypt_tree(world.src, "SM4-CBC")

    def refuse(*_: object) -> None:
        raise UnsupportedAlgorithm("no SM4")

    monkeypatch.setattr(ciphers, "Cipher", refuse)
    world.refuses(3, "SM4-CBC", "OpenSSL", options=("--decrypt-key-file", key_file))
