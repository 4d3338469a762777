"""Ranks that a program starts by itself join its run, and nothing else that it starts does."""

import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.launch import Launch, Outcome, run_checked, run_command

pytestmark = pytest.mark.timeout(300)

STARTS = """
import multiprocessing as mp
import os, subprocess, sys
import torch
import torch.distributed as dist

def begin(rank, folder, world_size=2):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )

"""


def program(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(STARTS + textwrap.dedent(text))
    return script


def line_of(script: Path, text: str) -> int:
    lines = script.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def assert_all_ranks_were_observed(outcome: Outcome) -> None:
    assert outcome.report is not None, outcome.describe()
    run = outcome.report["run"]
    assert (run["world_size"], run["attempts"]) == (2, 1), outcome.describe()
    assert len(run["ranks"]) == 2
    assert outcome.report["silent_ranks"] == []
    assert "COL005" in outcome.report["checked"]
    assert outcome.leftovers == (), outcome.describe()


def test_a_mismatch_of_ranks_that_torch_spawns_is_found_and_their_parent_sees_nothing_of_it(
    tmp_path: Path,
) -> None:
    script = program(
        tmp_path,
        """
        def work(rank, folder):
            begin(rank, folder)
            x = torch.ones(2)
            dist.all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # here
            dist.destroy_process_group()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
            print("trained", "DISTDIAG_JOIN" in os.environ)
        """,
    )
    outcome = run_checked(script, [str(tmp_path)], nproc=0)
    assert_all_ranks_were_observed(outcome)
    found = outcome.reported()
    assert found.keys() == {"COL005"}, outcome.describe()
    assert found["COL005"]["location"]["line"] == line_of(script, "# here")
    assert (outcome.exit_status, outcome.stdout) == (1, "trained False\n"), outcome.describe()


def test_the_exception_of_a_forked_rank_is_reported_with_its_rank(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        def work(rank, folder):
            begin(rank, folder)
            dist.barrier()
            if rank == 1:
                raise ValueError("the second one")
            dist.barrier()

        if __name__ == "__main__":
            context = mp.get_context("fork")
            ranks = [context.Process(target=work, args=(r, sys.argv[1])) for r in range(2)]
            [rank.start() for rank in ranks]
            ranks[1].join()
            ranks[0].terminate()
            ranks[0].join()
            print([rank.exitcode for rank in ranks])
        """,
    )
    outcome = run_checked(script, [str(tmp_path)], nproc=0)
    assert_all_ranks_were_observed(outcome)
    assert outcome.stdout == "[-15, 1]\n", outcome.describe()
    found = outcome.reported()
    assert found.keys() == {"HNG001"}, outcome.describe()
    assert found["HNG001"]["ranks"] == [1]
    assert found["HNG001"]["location"]["line"] == line_of(script, "raise ValueError")
    assert "the second one" in found["HNG001"]["message"]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        def work(rank, folder):
            begin(rank, folder)

        if __name__ == "__main__":
            rank = mp.get_context("fork").Process(target=work, args=(0, sys.argv[1]))
            rank.start()
            rank.join()
        """,
    )
    options = ["--hang-timeout", "1", "--on-hang", "abort"]
    outcome = run_checked(script, [str(tmp_path)], options=options, nproc=0)
    assert outcome.report is not None
    assert outcome.report["silent_ranks"] == [1], outcome.describe()
    errors = [each for each in outcome.alarms if each["severity"] == "error"]
    assert errors, outcome.describe()
    assert all(1 in each["ranks"] for each in errors), outcome.describe()


def test_a_process_that_starts_the_other_ranks_and_is_one_itself_is_observed_as_one(
    tmp_path: Path,
) -> None:
    script = program(
        tmp_path,
        """
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if rank == 0:  # as Lightning does
            command = [sys.executable, *sys.argv]
            other = subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": "1"})
        begin(rank, sys.argv[1])
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        dist.destroy_process_group()
        if rank == 0:
            sys.exit(other.wait() or 5)
        """,
    )
    outcome = run_checked(script, [str(tmp_path)], nproc=0)
    assert_all_ranks_were_observed(outcome)
    assert outcome.reported().keys() == {"COL005"}, outcome.describe()
    assert outcome.exit_status == 5, outcome.describe()


def test_jobs_one_after_the_other_and_their_helpers_are_told_apart(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        def help(folder):
            begin(0, folder, 1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()

        def work(rank, folder, name):
            mine = f"{folder}/{name}/{rank}"
            helper = mp.get_context("fork").Process(target=help, args=(mine,))
            helper.start()
            helper.join()
            begin(rank, f"{folder}/{name}")
            code = "import os, sys; sys.exit('DISTDIAG_JOIN' in os.environ)"
            subprocess.run([sys.executable, "-c", code], check=True)
            list(torch.utils.data.DataLoader(range(4), num_workers=1))
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            for name in ("first", "second"):
                for inner in ("0", "1"):
                    os.makedirs(f"{sys.argv[1]}/{name}/{inner}")
                torch.multiprocessing.start_processes(
                    work, args=(sys.argv[1], name), nprocs=2, start_method="fork"
                )
            print("trained twice")
        """,
    )
    outcome = run_checked(script, [str(tmp_path)], nproc=0)
    assert (outcome.exit_status, outcome.stdout) == (0, "trained twice\n"), outcome.describe()
    assert outcome.alarms == [], outcome.describe()
    assert outcome.report is not None
    assert outcome.report["run"]["attempts"] == 2
    assert [rank["fate"] for rank in outcome.report["run"]["ranks"]] == ["finished"] * 2
    assert "distdiag" not in outcome.stderr, outcome.describe()


LAUNCHED = """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones(2)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    told = os.environ.get("DISTDIAG_JOIN")
    sys.stdout.write(f"trained {sys.argv[1:]} {told}\\n")  # at once: both ranks write there
    sys.stdout.flush()
    dist.destroy_process_group()
"""


def console_script(folder: Path) -> Path:
    """Write what pip makes of an entry point."""
    script = program(folder, LAUNCHED)
    entry = folder / "bin" / "train-it"
    entry.parent.mkdir()
    entry.write_text(f"#!{sys.executable}\n{script.read_text()}")
    entry.chmod(0o755)
    return entry


def test_the_ranks_that_a_command_starts_join(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        def work(rank, folder):
            begin(rank, folder)
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
            dist.destroy_process_group()

        if __name__ == "__main__":
            context = mp.get_context("fork")
            ranks = [context.Process(target=work, args=(r, sys.argv[1])) for r in range(2)]
            [rank.start() for rank in ranks]
            [rank.join() for rank in ranks]
            print("trained", [rank.exitcode for rank in ranks])
        """,
    )
    shell = ["bash", "-c", 'python "$@"', "bash", str(script), str(tmp_path)]
    command = [sys.executable, "-m", "distdiag.cli", "check", "--", *shell]
    outcome = run_command(
        command, tmp_path, {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    )
    assert_all_ranks_were_observed(outcome)
    assert outcome.reported().keys() == {"COL005"}, outcome.describe()
    assert (outcome.exit_status, outcome.stdout) == (1, "trained [0, 0]\n"), outcome.describe()


@pytest.mark.slow
def test_the_ranks_of_a_launcher_that_is_the_command_join(tmp_path: Path) -> None:
    script = program(tmp_path, LAUNCHED)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    launcher = [torchrun, "--standalone", "--nproc-per-node", "2", str(script), "--lr", "1"]
    command = [sys.executable, "-m", "distdiag.cli", "check", "--", *launcher]
    outcome = run_command(command, tmp_path)
    assert_all_ranks_were_observed(outcome)
    assert outcome.reported().keys() == {"COL005"}, outcome.describe()
    assert outcome.exit_status == 1
    assert sorted(outcome.stdout.splitlines()) == ["trained ['--lr', '1'] None"] * 2


def test_a_console_script_is_run_as_a_script_on_every_rank(tmp_path: Path) -> None:
    entry = console_script(tmp_path)
    launch = Launch(folder=tmp_path, environ={"PATH": f"{entry.parent}:/usr/bin:/bin"})
    outcome = launch.checked(Path(entry.name), ["--lr", "1"])
    assert_all_ranks_were_observed(outcome)
    assert outcome.reported().keys() == {"COL005"}, outcome.describe()
    assert sorted(outcome.stdout.splitlines()) == ["trained ['--lr', '1'] None"] * 2


def test_a_command_that_starts_no_rank_is_said_to_be_unobserved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distdiag.check", "--", "bash", "-c", "echo ran; exit 3"]
    outcome = run_command(command, tmp_path)
    assert (outcome.exit_status, outcome.stdout) == (3, "ran\n"), outcome.describe()
    assert "NOTHING WAS OBSERVED: no process of bash called init_process_group" in outcome.stderr


@pytest.mark.slow
def test_the_ranks_of_a_lightning_script_under_plain_python_are_observed(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = program(
        tmp_path,
        """
        import lightning

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch, index):
                if index == 1:
                    largest = dist.ReduceOp.MAX if self.global_rank else dist.ReduceOp.SUM
                    dist.all_reduce(torch.ones(2), op=largest)  # here
                return self.layer(batch).pow(2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        if __name__ == "__main__":
            names = ("logger", "enable_checkpointing", "enable_progress_bar")
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_steps=3,
                **dict.fromkeys(names, False),
            )
            trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(32, 4), 4))
        """,
    )
    outcome = Launch(launcher="torchrun").checked(script, nproc=0)
    # Lightning does not wait for the process of the other rank.
    assert outcome.report is not None, outcome.describe()
    assert outcome.report["silent_ranks"] == [], outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "COL005" in found, outcome.describe()
    assert found["COL005"]["ranks"] == [0, 1]
    assert found["COL005"]["location"]["line"] == line_of(script, "# here")
