"""Wheel and source distribution, built from the repository and used in an empty environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from reshard import __version__
from tests.corpus import FIXTURES, ROOT

pytest.importorskip("pipx", reason="needs build, pipx and twine: run `make package`")

if not (ROOT / ".git").exists():
    pytest.skip("what belongs into a distribution is what git knows, and this is no clone", allow_module_level=True)

NAME = f"reshard-{__version__}"
DEMO = FIXTURES / "demo"


def run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command away from this repository's modules, and see that it ends with `status`."""
    base = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**base, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def repository_files() -> list[str]:
    output = run("git", "ls-files", "-z", cwd=ROOT).stdout
    return sorted(name for name in output.split("\0") if name and (ROOT / name).is_file())


class Built(NamedTuple):
    """The two distributions, and the output of the build."""

    wheel: Path
    sdist: Path
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both distributions of a clean copy, the wheel made from the source distribution."""
    clone, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in repository_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    done = run(sys.executable, "-m", "build", "--outdir", dist, clone, cwd=dist)
    return Built(dist / f"{NAME}-py3-none-any.whl", dist / f"{NAME}.tar.gz", done.stdout + done.stderr)


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built.sdist) as archive:
        archive.extractall(place)
    return place / NAME


class Bare(NamedTuple):
    """An environment that pipx made of the wheel alone."""

    python: Path
    commands: dict[str, str]


@pytest.fixture(scope="module")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    home = tmp_path_factory.mktemp("pipx")
    tools = home / "tools"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    places = {"PIPX_HOME": str(home / "home"), "PIPX_BIN_DIR": str(home / "bin"), "PIPX_MAN_DIR": str(home / "man")}
    run(sys.executable, "-m", "pipx", "install", "--python", sys.executable, built.wheel, cwd=home, environment=places)
    path = os.pathsep.join([str(home / "bin"), str(tools), os.defpath])
    return Bare(home / "home" / "venvs" / "reshard" / "bin" / "python", {"PATH": path})


def test_the_wheel_contains_only_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    package = [name for name in names if not name.startswith(f"{NAME}.dist-info/")]
    assert sorted(package) == [name for name in repository_files() if name.startswith("reshard/")]
    assert "reshard/py.typed" in package


def test_the_source_distribution_contains_the_repository(unpacked: Path) -> None:
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    created = {name for name in files if name == "PKG-INFO" or name.startswith("reshard.egg-info/")}
    assert sorted(files - created) == [name for name in repository_files() if name != ".gitignore"]
    assert os.access(unpacked / ".ci" / "venv", os.X_OK)


def test_tests_run_from_the_source_distribution(unpacked: Path) -> None:
    pytest_ = [sys.executable, "-m", "pytest", "-q"]
    run(*pytest_, "--collect-only", cwd=unpacked)
    some = ["tests/docs/test_documentation.py", "tests/convert/test_shards.py"]
    run(*pytest_, *some, "-k", "README or shards", cwd=unpacked)


def test_the_build_gives_no_warning_and_complete_metadata(built: Built) -> None:
    assert "deprecat" not in built.said.lower(), built.said
    run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist, cwd=built.wheel.parent)
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        head, _, text = archive.read(f"{NAME}.dist-info/METADATA").decode().partition("\n\n")
    assert [name for name in names if name.endswith("/LICENSE")]
    for line in (
        "License: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.10",
        "Classifier: Typing :: Typed",
    ):
        assert line in head.splitlines()
    assert text.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_the_command_works_installed_by_pipx(bare: Bare, tmp_path: Path) -> None:
    def reshard(*words: str) -> str:
        return run("reshard", *words, cwd=tmp_path, environment=bare.commands).stdout

    assert Path(shutil.which("reshard", path=bare.commands["PATH"]) or "").resolve().parent == bare.python.parent
    assert __version__ in reshard("--version")
    assert "convert" in reshard("--help")


def test_a_conversion_works_with_runtime_dependencies_only(bare: Bare, tmp_path: Path) -> None:
    listing = "import importlib.metadata as m; print(*(d.metadata['Name'].lower() for d in m.distributions()))"
    present = run(bare.python, "-I", "-c", listing, cwd=tmp_path).stdout.split()
    assert "numpy" in present
    assert not {"pytest", "hypothesis", "mypy", "ruff", "setuptools", "mindspore"}.intersection(present)
    demo = run("sh", FIXTURES / "demo.sh", tmp_path / "demo", cwd=tmp_path, environment=bare.commands).stdout
    expected = json.loads((DEMO / "expected.json").read_text())
    right = f"{sum(map(len, expected.values()))} slices on {len(expected)} ranks are right, 0 things are wrong"
    assert demo.count(right) == 2, demo


def test_the_python_api_works_with_runtime_dependencies_only(bare: Bare, tmp_path: Path) -> None:
    strategies = [str(DEMO / "src_strategy.ckpt"), str(DEMO / "dst_strategy.ckpt")]
    arguments = [str(DEMO / "src_checkpoints"), str(tmp_path / "out"), "checkpoint_", *strategies]
    run(bare.python, "-I", "-c", f"import reshard; reshard.transform_checkpoints(*{arguments!r})", cwd=tmp_path)
    run(sys.executable, FIXTURES / "check_demo.py", tmp_path / "out", DEMO / "expected.json", cwd=tmp_path)


def test_mypy_reads_the_installed_types(bare: Bare, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    mypy: list[str | Path] = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--python-executable",
        bare.python,
        script,
    ]
    right = "import reshard\n\nranks: list[int] = reshard.rank_list_for_transform(0, 'src.ckpt', None)\n"
    script.write_text(right)
    run(*mypy, cwd=tmp_path)
    script.write_text(right.replace("0", "'zero'").replace("list[int]", "str"))
    output = run(*mypy, cwd=tmp_path, status=1).stdout
    assert "[arg-type]" in output and "[assignment]" in output, output
