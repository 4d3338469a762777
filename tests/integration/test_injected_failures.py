"""Whatever part of the tool fails, the script ends as it would, and the report says what failed."""

from pathlib import Path

import pytest

from distdiag.probes.catalogue import PROBES as SPECS
from tests.integration.launch import run_checked, run_plain

SCRIPT = Path(__file__).with_name("injected.py")
PROBES = (
    "backward",
    "collective-fronts",
    "collectives",
    "dataloader",
    "functional-collectives",
    "gradient-sums",
    "loads",
    "losses",
    "models",
    "process-groups",
    "random-states",
    "routing",
    "samplers",
    "save",
    "schedules",
    "sequence",
    "step-draws",
    "step-feeds",
    "steps",
    "store-calls",
    "work",
)
RECORDING = (
    "recorder.access",
    "recorder.call",
    "recorder.state",
    "recorder.set_phase",
    "recorder.push_progress",
)

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def losses():
    return run_plain(SCRIPT, ["nothing"], nproc=0).stdout


@pytest.mark.parametrize("what", [*PROBES, *RECORDING])
def test_a_failure_inside_the_tool_changes_nothing_and_is_reported(what, losses):
    run = run_checked(SCRIPT, [what], nproc=0)
    assert run.exit_status == 0, run.describe()
    assert losses.startswith("losses 0x")
    assert run.stdout == losses, run.describe()
    assert run.report is not None, run.describe()
    assert run.report["complete"], run.describe()
    disabled = [f for f in run.report["findings"] if f["code"] == "DIA003"]
    assert disabled, run.describe()
    assert any("injected" in f["message"] for f in disabled), run.describe()
    if what in PROBES:
        assert any(what in f["subjects"] or what in f["message"] for f in disabled)


def test_every_spec_has_a_probe_that_is_made_to_fail_here_or_needs_more_than_one_rank():
    # The files probe is there before any script is; tests/probes/files/test_files.py makes it fail.
    alone = {"sharding-context", "checkpoint", "compile", "files"}
    alone |= {"sharding-moments", "parallel-moments", "partial-reads", "poison-empty"}
    alone |= {"verify-sequence"}
    alone |= {"parallelize-plans", "veomni-plans", "transformers-plans"}
    alone |= {"parity"}  # distdiag parity asks for it
    alone |= {"random-draws"}
    alone |= {"sequence-buffers"}
    alone |= {"rank-states"}
    alone |= {"evaluation-gathers"}  # only where Accelerate fills batches up for several ranks
    alone |= {"sharded-forwards"}
    alone |= {"spawned-processes"}  # of a process that starts the ranks by itself
    alone |= {"data"}  # of which each probe is made to fail
    alone |= {"parity"}  # an active mode: what goes wrong there ends the comparison
    alone |= {"routing-recorder"}  # the same
    assert {spec.name for spec in SPECS} <= {*PROBES, *alone}
