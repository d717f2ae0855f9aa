"""The scripts of docs/many-machines.md, run as by their launchers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.pages import blocks
from reshard import errors
from reshard.cli.output import DIFFERENT
from tests.corpus import FIXTURES, ROOT
from tests.running import done

PAGE = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")
FILES = {block.value: block.text for block in blocks(PAGE) if block.mark == "file"}
SCRIPTS = [name for name in FILES if not name.endswith(".yaml")]


class Machine:
    """A directory with the page's scripts, the fixtures, and substitutes for absent programs."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.place = place
        self.environment = environment
        (place / "fixtures").symlink_to(FIXTURES)
        for name, text in FILES.items():
            (place / name).write_text(text)

    def stand_in(self, name: str, script: str) -> None:
        path = self.place / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in self.environment.items() if not name.startswith("SLURM_")}
        return subprocess.run(
            words,
            cwd=self.place,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def complete(self) -> bool:
        return bool(done("status", self.place / "out", "--json").json["complete"])


@pytest.fixture
def machine(tmp_path: Path, environment: dict[str, str]) -> Machine:
    return Machine(tmp_path, environment)


@pytest.mark.deep
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_valid_bash(name: str, machine: Machine) -> None:
    checked = machine.run("bash", "-n", name)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_loop_over_ssh_converts_everything(machine: Machine) -> None:
    machine.stand_in("ssh", 'echo "$1" >>hosts; shift; exec sh -c "$*"')
    ran = machine.run("bash", "everywhere.sh", "one", "two", "three")
    assert ran.returncode == 0, ran.stderr
    assert sorted((machine.place / "hosts").read_text().split()) == ["one", "three", "two"]
    assert machine.complete


@pytest.mark.deep
def test_the_tasks_of_a_slurm_array_convert_everything(machine: Machine) -> None:
    for task in range(4):
        ran = machine.run("bash", "convert.sbatch", **slurm(task))
        assert ran.returncode == 0, ran.stderr
    assert machine.complete


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"), [(1, 0, True), (1, 3, False), (3, 0, False), (0, 0, False)]
)
def test_a_slurm_task_is_requeued_where_a_retry_may_help(
    status: int, restarts: int, requeued: bool, machine: Machine
) -> None:
    machine.stand_in("reshard", f"exit {status}")
    machine.stand_in("scontrol", 'echo "$*" >requeued')
    ran = machine.run("bash", "convert.sbatch", SLURM_RESTART_COUNT=str(restarts), **slurm(2))
    assert ran.returncode == status
    assert (machine.place / "requeued").exists() == requeued
    if requeued:
        assert (machine.place / "requeued").read_text() == "requeue 4711_2\n"


def slurm(task: int) -> Mapping[str, str]:
    return {
        "SLURM_ARRAY_JOB_ID": "4711",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "3",
        "SLURM_ARRAY_TASK_COUNT": "4",
    }


def test_the_processes_of_an_mpi_launcher_convert_everything(machine: Machine) -> None:
    for process in range(2):
        variables = {"OMPI_COMM_WORLD_RANK": str(process), "OMPI_COMM_WORLD_SIZE": "2"}
        ran = machine.run("bash", "convert-mpi.sh", **variables)
        assert ran.returncode == 0, ran.stderr
    assert machine.complete


def test_the_pods_of_a_kubernetes_job_convert_everything(machine: Machine) -> None:
    job = kubernetes_job()
    container = job["template"]["spec"]["containers"][0]
    output = {entry["name"]: entry["value"] for entry in container["env"]}
    assert output == {"JOB_COMPLETIONS": str(job["completions"])}
    assert job["completionMode"] == "Indexed"
    # Of eight pods with four ranks, those with an odd index find one to do.
    for index in range(1, job["completions"], 2):
        ran = machine.run(*container["command"], *container["args"], **output, JOB_COMPLETION_INDEX=str(index))
        assert ran.returncode == 0, ran.stderr
    assert machine.complete


def test_the_kubernetes_job_treats_exit_statuses_as_documented() -> None:
    job = kubernetes_job()
    # A failure policy is allowed with this one only.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
            assert rule["onExitCodes"]["operator"] == "In"
            actions.update(dict.fromkeys(rule["onExitCodes"]["values"], rule["action"]))
    final = {errors.UsageError.status, errors.InputError.status, DIFFERENT}
    assert {status for status, action in actions.items() if action == "FailJob"} == final
    assert {status for status, action in actions.items() if action == "Ignore"} == {130, 143}
    assert errors.RetryableError.status not in actions


def kubernetes_job() -> Any:
    return yaml.safe_load(FILES["convert.yaml"])["spec"]


@pytest.mark.deep
def test_ranks_written_without_a_shared_disk_can_be_gathered(machine: Machine) -> None:
    machine.stand_in("scp", 'exec cp -rp "${2#store:}" "$3"')
    store = f"store:{FIXTURES / 'demo' / 'src_checkpoints'}"
    for rank in range(4):
        ran = machine.run("bash", "make-rank.sh", str(rank), STORE=store)
        assert ran.returncode == 0, ran.stderr
        assert not (machine.place / f"need{rank}").exists()
        # As on a machine of its own.
        os.rename(machine.place / "out", machine.place / f"out{rank}")
    for rank in range(4):
        machine.run("cp", "-a", f"out{rank}/.", "out")
    demo = FIXTURES / "demo"
    strategies = ("--src-strategy", demo / "src_strategy.ckpt", "--dst-strategy", demo / "dst_strategy.ckpt")
    assert not machine.complete
    done("by-rank", 0, demo / "src_checkpoints", machine.place / "out", *strategies)
    assert machine.complete
    done("verify", machine.place / "out")
    manifest = json.loads((machine.place / "out" / "reshard-manifest.json").read_text())
    assert all(file["crc32"] for file in manifest["files"])
