"""The Dockerfile: linted, and its steps carried out in a directory, because there may be no builder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.corpus import FIXTURES, ROOT
from tests.packaging.test_distributions import run

DOCKERFILE = ROOT / "Dockerfile"
DEMO = FIXTURES / "demo"
# Directories of the image that become directories of the test.
PLACES = re.compile(r"(?<![\w.])/(?=(?:src|opt)\b)")
NOBODY = 65532

pytest.importorskip("pipx", reason="installs packages: run `make package`")


def instructions() -> list[tuple[str, str]]:
    """Instructions and the rest of their lines."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8")).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


class Image(NamedTuple):
    """The result of the steps.

    Attributes:
        root: what is / in the image.
        environment: of its programs.
        entry: the command of a container.
        user: user and group.
    """

    root: Path
    environment: dict[str, str]
    entry: list[str]
    user: str


def build(root: Path) -> Image:
    """Carry out all steps of all stages in one directory, whose places do not overlap."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    environment = {"PATH": f"{root / 'bin'}:{os.defpath}", "HOME": str(root)}
    entry: list[str] = []
    user, place = "0", root
    for word, rest in instructions():
        here = PLACES.sub(f"{root}/", rest)
        if word == "ARG":
            name, _, value = rest.partition("=")
            environment[name] = value
        elif word == "ENV":
            for name, value in (pair.split("=", 1) for pair in here.split()):
                environment[name] = value.replace("$PATH", environment["PATH"])
        elif word == "WORKDIR":
            place = root / rest.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
        elif word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, place / target)
        elif word == "RUN":
            run("sh", "-e", "-c", here, cwd=place, environment=environment)
        elif word == "USER":
            user = rest
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        else:
            assert word in ("FROM", "CMD", "COPY"), word
    return Image(root, environment, entry, user)


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        into = target if target.is_dir() or not target.suffix else target.parent
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, into)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that other users can enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
def image(place: Path) -> Image:
    return build(place / "image")


def test_hadolint_accepts_the_dockerfile() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("there is no hadolint here")
    run(linter, DOCKERFILE, cwd=ROOT)


def test_the_build_context_contains_only_copied_files() -> None:
    content = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {line[1:] for line in content if line.startswith("!")}
    copied = {
        word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    }
    assert "*" in content and admitted == copied


def test_a_container_does_not_run_as_root(image: Image) -> None:
    assert image.user == f"{NOBODY}:{NOBODY}"


def test_a_container_converts_with_a_read_only_root_in_a_mounted_directory(image: Image, place: Path) -> None:
    data = place / "data"
    shutil.copytree(DEMO, data / "demo")
    if os.geteuid() == 0:
        for path in (data, *data.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    strategies = ["--src-strategy", "demo/src_strategy.ckpt", "--dst-strategy", "demo/dst_strategy.ckpt"]
    ran = contained(image, data, "convert", "demo/src_checkpoints", "out", "--verify", *strategies)
    assert ran.returncode == 0 and "verified: no differences" in ran.stderr, ran.stderr
    ran = contained(image, data, "verify", "out", "--src", "demo/src_checkpoints", *strategies)
    assert ran.returncode == 0, ran.stderr
    assert not [*image.root.rglob("out")]


def contained(image: Image, data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the entry as a container's user; where this user may, with everything but the data read-only."""
    program = shutil.which(image.entry[0], path=image.environment["PATH"])
    assert program is not None
    command = [program, *image.entry[1:], *words]
    environment: Mapping[str, str] = {**image.environment, "HOME": "/nonexistent"}
    if os.geteuid() == 0:
        seal = (
            'mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,ro,bind / && cd "$0" && '
            f'exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "$@"'
        )
        probe = subprocess.run(["unshare", "-m", "sh", "-c", seal, data, "true"], capture_output=True, text=True)
        if probe.returncode != 0:
            pytest.skip(f"no read-only root here: {probe.stderr.strip()}")
        command = ["unshare", "-m", "sh", "-c", seal, str(data), *command]
    return subprocess.run(command, cwd=data, env=environment, capture_output=True, text=True, timeout=300)
