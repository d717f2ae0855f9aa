"""Hints after common mistakes."""

from __future__ import annotations

from tests.running import Argument, done, fails
from tests.small import World, tensors

FULL = tensors()


def test_to_with_a_dtype_suggests_cast(world: World) -> None:
    fails(2, *world.words("--to", "bf16"), texts=["--cast bf16"])


def test_refusal_of_another_conversion_lists_the_options_that_differ_without_digests(world: World) -> None:
    world.save(FULL)
    world.convert("--cast", "w=BFloat16")
    result = fails(3, *world.words(), texts=["--cast (w=BFloat16 there, none here)"])
    assert "edits" not in result.err


def test_a_strategy_of_more_ranks_than_the_checkpoint_has_is_doubted(world: World) -> None:
    world.save(FULL, ranks=[0, 1])
    fails(3, *world.words(), texts=["no file of ranks 2-3", f"if the run had 2 ranks, {world.old} is not its strategy"])


def test_exchanged_source_and_target_are_recognised(world: World) -> None:
    world.save(FULL)
    words = world.words()
    words[1], words[2] = words[2], words[1]
    fails(3, *words, texts=[f"{world.dst}: does not exist", f"{world.src} exists: the source comes first"])


def test_another_maximum_shard_size_is_listed_once(world: World) -> None:
    world.save(FULL)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, "--to", "huggingface"]
    done(*words, "--max-shard-size", "100")
    result = fails(3, *words, "--max-shard-size", "1000", texts=["--max-shard-size (100 there, 1000 here)"])
    assert "names of the files" not in result.err


def test_merge_lora_with_swapped_arguments_suggests_their_order(world: World) -> None:
    world.save(FULL)
    adapter = world.root / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    fails(2, "merge-lora", adapter, world.src, world.dst, texts=[f"reshard merge-lora {world.src} {adapter}"])
