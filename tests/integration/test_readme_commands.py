"""The commands of README.md run as they stand there, but for 2 ranks in the place of 8."""

import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.integration.catalogue import PROGRAM_FOLDER
from tests.integration.launch import REPOSITORY, Outcome, run_command

LAUNCHED = PROGRAM_FOLDER / "launched"
README = (REPOSITORY / "README.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+?) \| `([^`]*train\.py[^`]*)` \|$", README, re.M))

# SLURM is not here; its command is torchrun's behind srun.
PROGRAMS = {
    "torchrun": "plain",
    "accelerate": "accelerated",
    "DeepSpeed": "deepspeed_engine",
    "torchrun, started for you": "plain",
}
NUMBER = re.compile(r"(--nproc-per-node|--num_processes|--num_gpus) 8\b")

# What `accelerate config` leaves: without GPUs accelerate has to be told to start several ranks.
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 8
main_process_port: 0
"""


def run(folder: Path, command: str, text: str) -> Outcome:
    """Run a command of the README on two ranks; train.py is this text."""
    (folder / "train.py").write_text(text)
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "default_config.yaml").write_text(ACCELERATE)
    if command.startswith("deepspeed "):
        command = command.replace("deepspeed ", f"deepspeed --master_port {free_port()} ", 1)
    environ = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HF_HOME": str(folder),
        "PET_STANDALONE": "1",  # torchrun: the port is any that is free
    }
    return run_command(shlex.split(NUMBER.sub(r"\1 2", command)), folder, environ)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def assert_all_observed(outcome: Outcome) -> None:
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("trained") == 2, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    assert outcome.alarms == [], outcome.describe()
    report = outcome.report
    assert report is not None
    assert (report["run"]["outcome"], report["run"]["world_size"]) == ("finished", 2)
    assert report["silent_ranks"] == []
    assert [(rank["rank"], rank["fate"]) for rank in report["run"]["ranks"]] == [
        (0, "finished"),
        (1, "finished"),
    ]
    assert "COL001" in report["checked"]
    assert "DIA002" not in {finding["code"] for finding in report["findings"]}


def test_the_readme_has_a_program_here_for_each_of_its_launchers() -> None:
    assert ROWS.keys() == {*PROGRAMS, "SLURM", "none"}
    assert ROWS["SLURM"] == f"srun {ROWS['torchrun']}"
    assert f"\n    {ROWS['torchrun']}\n" in README.partition("##")[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "launcher",
    # The others take ten seconds of a core and more to be imported by all who do so here.
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each in ("accelerate", "DeepSpeed")))
        for each in PROGRAMS
    ],
)
def test_a_launcher_of_the_readme_has_all_its_ranks_observed(launcher: str, tmp_path: Path) -> None:
    text = (LAUNCHED / f"{PROGRAMS[launcher]}.py").read_text()
    assert_all_observed(run(tmp_path, ROWS[launcher], text))


@pytest.mark.timeout(300)
def test_a_script_attaches_with_the_lines_of_the_readme(tmp_path: Path) -> None:
    (lines,) = re.findall(r"^    import distdiag\n\n    distdiag\.attach\(\)$", README, re.M)
    text = f"{lines.replace('    ', '')}\n{(LAUNCHED / 'plain.py').read_text()}"
    command = ROWS["torchrun"].replace("-m distdiag.check ", "")
    assert_all_observed(run(tmp_path, command, text))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_ranks_of_lightning_are_observed_under_torchrun(tmp_path: Path) -> None:
    assert_all_observed(run(tmp_path, ROWS["torchrun"], (LAUNCHED / "lit.py").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_ranks_are_observed_that_lightning_starts_by_itself(tmp_path: Path) -> None:
    assert_all_observed(run(tmp_path, ROWS["none"], (LAUNCHED / "lit.py").read_text()))


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_the_example_of_a_launcher_is_the_command_of_the_readme(name: str) -> None:
    text = (REPOSITORY / "launchers" / f"{name}.sh").read_text()
    (command,) = re.findall(r"^exec (.+)$", text, re.M)
    command = command.replace('"${NPROC:-2}"', "8").replace('"$@"', "train.py --my-args")
    assert command.replace("--standalone ", "") in ROWS.values()
