"""Converting between the forms of checkpoints against copying the result: time over that of `cp -r` of the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Compared, Section, against_copy, memory_backed, reshard
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices
from benchmarks.synthetic_forms import (
    UNIFIED_MAP,
    write_checkpoint2,
    write_huggingface,
    write_unified,
    wrong_in_checkpoint2,
    wrong_in_full_weights,
)
from benchmarks.throughput import MODEL

PAIRS = 4
FILES = 3
WHOLE = Scheme()


class Form(NamedTuple):
    """How a synthetic checkpoint of a form is written and looked through."""

    write: Callable[[Path, Model, Scheme], None]
    wrong: Callable[[Path, Model, Scheme], int]


FORMS = {
    "ranks": Form(
        lambda place, model, scheme: write_checkpoint(place, model, scheme, "safetensors"),
        lambda place, model, scheme: wrong_slices(place, model, scheme, "safetensors"),
    ),
    "checkpoint2": Form(write_checkpoint2, lambda place, model, scheme: wrong_in_checkpoint2(place, model)),
    "unified": Form(
        lambda place, model, scheme: write_unified(place, model, FILES),
        lambda place, model, scheme: wrong_in_full_weights(place, model, UNIFIED_MAP),
    ),
    "huggingface": Form(
        lambda place, model, scheme: write_huggingface(place, model, FILES),
        lambda place, model, scheme: wrong_in_full_weights(place, model),
    ),
}


class Claim(NamedTuple):
    """A kind of conversion and the ratio that it must not exceed."""

    name: str
    most: float
    source: str
    old: Scheme
    target: str
    new: Scheme


COLUMNS, SHARDS = Scheme(model=8, cut=1), Scheme(data=2, model=4, sharded=True)
CLAIMS = [
    Claim("2.0 to ranks: mp8 to mp4", 0.8, "checkpoint2", Scheme(model=8), "ranks", Scheme(model=4)),
    Claim("2.0 to ranks: 8 column slices to 2", 1.0, "checkpoint2", COLUMNS, "ranks", Scheme(model=2, cut=1)),
    Claim("ranks to 2.0: mp8 to mp4", 0.8, "ranks", Scheme(model=8), "checkpoint2", Scheme(model=4)),
    Claim("ranks to 2.0: full to 8 column slices", 1.0, "ranks", WHOLE, "checkpoint2", COLUMNS),
    Claim("ranks to Hugging Face: optimizer shards", 0.8, "ranks", SHARDS, "huggingface", WHOLE),
    Claim("ranks to Hugging Face: 8 column slices", 1.0, "ranks", COLUMNS, "huggingface", WHOLE),
    Claim("Hugging Face to ranks: mp4", 0.8, "huggingface", WHOLE, "ranks", Scheme(model=4)),
    Claim("Hugging Face to ranks: 8 column slices", 1.0, "huggingface", WHOLE, "ranks", COLUMNS),
]  # fmt: skip


def prepare(place: Path, model: Model, claim: Claim) -> list[object]:
    """Write a source and the strategies; the command line that converts it into `made`."""
    FORMS[claim.source].write(place / "src", model, claim.old)
    words: list[object] = [place / "src", place / "made", "--to", claim.target, "--quiet"]
    if claim.source == "ranks":
        write_strategy(place / "old", model, claim.old)
        words += ["--src-strategy", place / "old"]
    if claim.target in ("unified", "huggingface"):
        words += ["--max-shard-size", f"{model.nbytes // FILES}B"]
    else:
        write_strategy(place / "new", model, claim.new)
        words += ["--dst-strategy", place / "new"]
    return reshard("convert", *words)


def convert(place: Path, model: Model, claim: Claim, count: int = PAIRS) -> Compared:
    """Measure `convert` against `cp -r` of its output."""
    words = prepare(place, model, claim)
    target = place / "made"
    measured = against_copy(words, target, count)
    assert FORMS[claim.target].wrong(target, model, claim.new) == 0
    return measured


def measure() -> Section:
    """Measure every kind."""
    section = Section("Between forms, too?")
    section.say(
        f"`convert` of {MODEL.nbytes / 1e9:.1f} GB of `.safetensors` against `cp -r` of its own output, {PAIRS} pairs."
    )
    for claim in CLAIMS:
        with memory_backed() as place:
            section.row({"kind": claim.name, "aim": claim.most, **convert(place, MODEL, claim).row()})
    return section
