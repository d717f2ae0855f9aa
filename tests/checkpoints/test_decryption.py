"""Decryption: every mode and block size gives the bytes that were encrypted, or an error and no file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest

from reshard import decryption
from reshard.decryption import decrypt, read_key
from reshard.errors import CheckpointError, DamagedCheckpointError, EncryptedCheckpointError
from reshard.text.messages import Report
from tests.corpus import FIXTURES
from tests.encryption import KEY, MODES, encrypt_file, encrypt_tree, encrypted
from tests.running import Argument, Result, done, fails, warns
from tests.small import World, tensors
from tests.trees import ckpt_bytes, read_checkpoint, scalar, tree_bytes, value, version

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


def files_in(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def decrypted(path: Path, key: bytes = KEY) -> bytes | None:
    """The plain file of a file, in a directory of its own."""
    plain = path.parent / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    try:
        decrypt(str(path), str(plain), key, Report())
        return (plain / path.name).read_bytes()
    except CheckpointError:
        assert not plain.exists()
        raise


# What is right.


@pytest.mark.parametrize("name", ["encrypted_gcm.ckpt", "encrypted_cbc.ckpt"])
def test_files_that_mindspore_encrypted_are_decrypted(name: str, key_file: Path, tmp_path: Path) -> None:
    expected = json.loads((FILES / "expected.json").read_text())["files"][name]
    assert expected["enc_key"].encode() == KEY
    done("decrypt", FILES / name, tmp_path / "plain", "--key-file", key_file)
    contents = read_checkpoint(tmp_path / "plain" / name)
    assert sorted(contents) == sorted(parameter["name"] for parameter in expected["params"])
    for parameter in expected["params"]:
        tensor = contents[parameter["name"]]
        assert (tensor.dtype, list(tensor.array.shape)) == (parameter["dtype"], parameter["shape"])
        assert hashlib.sha256(tensor.array.tobytes()).hexdigest() == parameter["sha256"]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mode", MODES)
def test_a_decrypted_tree_has_the_bytes_of_the_plain_one(world: World, mode: str, block: int, key_file: Path) -> None:
    world.save(FULL)
    plain = files_in(world.src)
    encrypt_tree(world.src, mode, block)
    done("decrypt", world.src, world.root / "plain", "--key-file", key_file)
    assert files_in(world.root / "plain") == plain


def test_plain_files_and_all_cipher_modes_may_be_mixed(world: World, key_file: Path) -> None:
    world.save(FULL)
    plain = files_in(world.src)
    world.convert()
    target = tree_bytes(world.dst)
    shutil.rmtree(world.dst)
    encrypt_tree(world.src, {0: "AES-GCM", 1: "AES-CBC", 3: "SM4-CBC"}, 100)
    done("decrypt", world.src, world.root / "plain", "--key-file", key_file)
    assert files_in(world.root / "plain") == plain
    shutil.rmtree(world.src)
    (world.root / "plain").rename(world.src)
    world.convert("--verify")
    assert tree_bytes(world.dst) == target


@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_aes_accepts_keys_of_every_length(mode: str, size: int, tmp_path: Path) -> None:
    key, data = bytes(range(size)), ckpt_bytes({"w": value("w", (5, 7))})
    (tmp_path / "net.ckpt").write_bytes(encrypted(data, mode, key, 40))
    assert decrypted(tmp_path / "net.ckpt", key) == data


@pytest.mark.parametrize("mode", MODES)
def test_a_crc_after_the_last_block_is_ignored(mode: str, tmp_path: Path) -> None:
    path, data = small_file(tmp_path, mode)
    path.write_bytes(path.read_bytes() + b"crc_num" + bytes(10))
    assert decrypted(path) == data


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_memory_does_not_grow_with_blocks(mode: str, tmp_path: Path) -> None:
    data = ckpt_bytes({"w": value("w", (5000, 2000))})
    assert len(data) > 32 << 20
    (tmp_path / "net.ckpt").write_bytes(encrypted(data, mode))
    tracemalloc.start()
    try:
        decrypt(str(tmp_path / "net.ckpt"), str(tmp_path / "plain"), KEY, Report())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "plain" / "net.ckpt").read_bytes() == data


def test_only_the_user_may_read_decrypted_files(world: World, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, {0: "AES-GCM"})
    done("decrypt", world.src, world.root / "plain", "--key-file", key_file)
    assert {path.stat().st_mode & 0o777 for path in (world.root / "plain").rglob("*.ckpt")} == {0o600}


# Runs again.


def test_a_second_run_keeps_finished_files(world: World, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, {0: "AES-GCM", 1: "AES-CBC"}, 50)
    words: list[Argument] = ["decrypt", world.src, world.root / "plain", "--key-file", key_file]
    done(*words)
    plain, before = files_in(world.root / "plain"), versions(world.root / "plain")
    removed = world.root / "plain" / "rank_1" / "net-1_10.ckpt"
    removed.unlink()
    done(*words)
    assert files_in(world.root / "plain") == plain
    after = versions(world.root / "plain")
    assert {path for path in after if after[path] == before[path]} == set(before) - {str(removed)}


def versions(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): version(path) for path in root.rglob("*.ckpt")}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_was_not_made_of_its_source_is_not_replaced(world: World, rank: int, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, {0: "AES-GCM"})
    words: list[Argument] = ["decrypt", world.src, world.root / "plain", "--key-file", key_file]
    done(*words)
    source = world.src / f"rank_{rank}" / "net-1_10.ckpt"
    os.utime(source, (1, 1))
    before = files_in(world.root / "plain")
    fails(3, *words, texts=[world.root / "plain" / f"rank_{rank}" / "net-1_10.ckpt"])
    assert files_in(world.root / "plain") == before


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = small_file(tmp_path, "AES-GCM")
    (tmp_path / "key").write_bytes(KEY)
    check = decryption._check_index

    def change(*arguments: object) -> None:
        with open(path, "ab") as file:
            file.write(b"0")
        check(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decryption, "_check_index", change)
    fails(1, "decrypt", path, tmp_path / "plain", "--key-file", tmp_path / "key", texts=[path])
    assert not (tmp_path / "plain").exists()


# What is wrong.


def small_file(tmp_path: Path, mode: str, block: int = 50) -> tuple[Path, bytes]:
    data = ckpt_bytes({"w": value("w", (3, 5)), "v": value("v", (4,)), "step": scalar(7)})
    path = tmp_path / "net.ckpt"
    path.write_bytes(encrypted(data, mode, block=block))
    return path, data


@pytest.mark.parametrize("block", [50, 1000])
def test_aes_gcm_detects_a_change_of_any_byte(block: int, tmp_path: Path) -> None:
    path, expected = small_file(tmp_path, "AES-GCM", block)
    data = path.read_bytes()
    # The last bytes of the IV are not used, by MindSpore neither.
    size = len(encrypted(b"x" * block, "AES-GCM")) if block < 100 else len(data)
    unused = {start + 40 + byte for start in range(0, len(data), size) for byte in range(4)}
    for position in range(4, len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        if position in unused:
            assert decrypted(path) == expected
            continue
        with pytest.raises(CheckpointError) as caught:
            decrypted(path)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("mode", MODES)
def test_an_encrypted_file_truncated_anywhere_is_an_error(mode: str, tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, mode)
    data = path.read_bytes()
    # A file shorter than the mark cannot be recognised as encrypted.
    for size in range(4, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as caught:
            decrypted(path)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_damage_of_cbc_is_distinguished_from_a_wrong_key(mode: str, tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, mode)
    data = path.read_bytes()
    # The padding of the last block.
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError):
        decrypted(path)
    # The first bytes: the key may be wrong, too.
    path.write_bytes(data[:32] + bytes(16) + data[48:])
    with pytest.raises(EncryptedCheckpointError):
        decrypted(path)


def test_records_of_cbc_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, "AES-CBC", 1000)
    data = bytearray(path.read_bytes())
    data[32 + 16] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="AES-CBC"):
        decrypted(path)


def test_a_damaged_file_does_not_stop_the_others(world: World, key_file: Path) -> None:
    world.save(FULL)
    plain = files_in(world.src)
    encrypt_tree(world.src, "AES-GCM", 100)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:-1])
    fails(3, "decrypt", world.src, world.root / "plain", "--key-file", key_file, texts=[path])
    assert files_in(world.root / "plain") == {name: data for name, data in plain.items() if "rank_1" not in name}


def refused(status: int, world: World, key_file: Argument, *texts: Argument) -> Result:
    """A decryption that writes nothing."""
    result = fails(status, "decrypt", world.src, world.dst, "--key-file", key_file, texts=texts)
    assert not files_in(world.dst)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [1 << 20, 50])
def test_a_wrong_key_error_names_the_file_and_hides_the_key(
    world: World, mode: str, block: int, key_file: Path
) -> None:
    world.save(FULL)
    encrypt_tree(world.src, mode, block)
    key_file.write_bytes(OTHER_KEY)
    result = refused(3, world, key_file, world.src / "rank_0" / "net-1_10.ckpt", mode)
    assert OTHER_KEY.decode() not in result.err + result.out


@pytest.mark.parametrize("mode", MODES)
def test_many_wrong_keys_are_all_refused(mode: str, tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, mode)
    picked = random.Random(mode)
    for _ in range(300):
        with pytest.raises(CheckpointError):
            decrypted(path, bytes(picked.randrange(256) for _ in range(16)))


def test_an_sm4_key_has_16_bytes(world: World, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, "SM4-CBC")
    key_file.write_bytes(bytes(24))
    refused(3, world, key_file, "16 bytes", "has 24")


def test_openssl_without_sm4_is_reported(world: World, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm

    world.save(FULL)
    encrypt_tree(world.src, "SM4-CBC")

    def refuse(*_: object) -> None:
        raise UnsupportedAlgorithm("no SM4")

    monkeypatch.setattr(ciphers, "Cipher", refuse)
    refused(3, world, key_file, "SM4-CBC", "OpenSSL")


def test_a_tree_of_plain_files_is_not_copied(world: World, key_file: Path) -> None:
    world.save(FULL)
    refused(3, world, key_file, world.src)


def test_a_missing_source_is_an_error(world: World, key_file: Path) -> None:
    refused(3, world, key_file, world.src)


@pytest.mark.parametrize("dst", ["src", "src/plain", ".", "plain.ckpt", "s3://bucket/plain"])
def test_decrypted_files_go_to_a_directory_apart_from_the_source(world: World, dst: str, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, "AES-GCM")
    before = files_in(world.root)
    fails(2, "decrypt", world.src, dst if "://" in dst else world.root / dst, "--key-file", key_file, texts=["DST"])
    assert files_in(world.root) == before


# Other commands.


@pytest.mark.parametrize("mode", MODES)
def test_other_commands_name_the_command_that_decrypts(plain: World, mode: str) -> None:
    plain.save(FULL)
    encrypt_file(plain.src / "rank_3" / "net-1_10.ckpt", mode)
    plain.refuses(3, "rank_3", f"encrypted with {mode}", "reshard decrypt")
    fails(3, "inspect", plain.src / "rank_3" / "net-1_10.ckpt", texts=["reshard decrypt"])
    fails(3, "recover", plain.src, plain.dst, "--strategy", plain.old, texts=["rank_3", "reshard decrypt"])


# The key.


def test_the_key_may_come_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = small_file(tmp_path, "AES-GCM")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(KEY + b"\n")))
    done("decrypt", path, tmp_path / "plain", "--key-file", "-")
    assert (tmp_path / "plain" / "net.ckpt").read_bytes() == data


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("key", [KEY, KEY[:15] + b"\n", bytes(24), bytes(range(32))])
def test_a_trailing_newline_is_not_part_of_the_key(key: bytes, end: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(key + end)
    assert read_key(str(tmp_path / "key")) == key


@pytest.mark.parametrize("content", [b"", KEY[:15], KEY + b"0", KEY + b"\n\n", b"00" * 17, b"x" * 5000])
def test_an_invalid_key_is_an_error_that_hides_it(world: World, content: bytes, key_file: Path) -> None:
    world.save(FULL)
    key_file.write_bytes(content)
    result = refused(3, world, key_file, "--key-file", "16, 24 or 32")
    assert not content.strip() or content.decode() not in result.err


def test_a_key_typed_as_its_file_is_not_repeated(world: World) -> None:
    world.save(FULL)
    result = refused(3, world, KEY.decode(), "the file does not exist")
    assert KEY.decode() not in result.err + result.out


def test_a_directory_as_key_file_is_an_error(world: World) -> None:
    world.save(FULL)
    refused(3, world, world.src, "--key-file", "directory")


def test_neither_the_key_nor_its_file_is_shown(world: World, key_file: Path) -> None:
    world.save(FULL)
    encrypt_tree(world.src, "AES-GCM", 100)
    telling = key_file.rename(key_file.parent / "a-telling-name")
    result = done("decrypt", world.src, world.root / "plain", "--key-file", telling)
    warns(result, "wrote")
    for secret in ("a-telling-name", KEY.decode()):
        assert secret not in result.err + result.out
        assert not any(secret in name for name in files_in(world.root / "plain"))
