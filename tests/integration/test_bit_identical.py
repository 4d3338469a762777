"""Losses, weights and generator states are the same to the last bit with and without distdiag.

So are the operations and functions of torch that modes of the programs see, in their order.
"""

from pathlib import Path

import pytest

from tests.integration.catalogue import Program, program_parameters
from tests.integration.conftest import CheckedRuns
from tests.integration.launch import Launch, Launcher
from tests.integration.records import read_records

# One of each way to train and to share files; with --all every program.
QUICK = (
    "async_overlap",
    "ddp",
    "ddp_compile",
    "fsdp2",
    "hf_trainer",
    "locked_cache",
    "own_modes",
    "pipeline",
    "subgroups",
    "tensor_parallel",
)


@pytest.mark.timeout(800)
@pytest.mark.parametrize(("program", "launcher"), program_parameters(QUICK))
def test_results_are_bit_identical_with_and_without_distdiag(
    program: Program, launcher: Launcher, checked_runs: CheckedRuns, tmp_path: Path
) -> None:
    out = tmp_path / program.label
    args = [*program.watch, *program.args, "--out", str(out)]
    plain = Launch(launcher=launcher).plain(program.script, args, nproc=program.nproc)
    plain_records = read_records(out)
    assert sorted(plain_records) == program.records, plain.describe()

    checked = checked_runs.of(program, launcher)
    assert checked.records == plain_records, checked.outcome.describe()
