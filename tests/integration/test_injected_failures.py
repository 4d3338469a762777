"""Whatever part of the tool fails, the script ends as it would, and the report says what failed."""

from pathlib import Path

import pytest

from distdiag.probes.catalogue import PROBES as SPECS
from tests.integration.launch import Launch, Outcome, run_plain, with_report

SCRIPT = Path(__file__).with_name("injected.py")
PROBES = (
    "backward",
    "broken-passes",
    "clipping",
    "collective-wrappers",
    "collectives",
    "combined-shards",
    "dataloader",
    "fetches",
    "functional-collectives",
    "gradient-sums",
    "live-saves",
    "loads",
    "loss-numbers",
    "losses",
    "models",
    "numerics",
    "process-groups",
    "random-states",
    "routing",
    "samplers",
    "save",
    "schedules",
    "sequence",
    "step-draws",
    "step-feeds",
    "step-memory",
    "steps",
    "store-calls",
    "summed-parts",
    "surroundings",
    "updates",
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


def attached(what: str, folder: Path) -> Outcome:
    run_dir = folder / "run"
    return with_report(run_plain(SCRIPT, [what, "--attach", str(run_dir)], nproc=0), run_dir)


def checked(what: str, _: Path) -> Outcome:
    return Launch(launcher="torchrun").checked(SCRIPT, [what], nproc=0)


@pytest.mark.parametrize("start", [attached, pytest.param(checked, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", [*PROBES, *RECORDING])
def test_a_failure_inside_the_tool_changes_nothing_and_is_reported(what, start, losses, tmp_path):
    run = start(what, tmp_path)
    assert run.exit_status == 0, run.describe()
    assert losses.startswith("losses 0x")
    assert run.stdout == losses, run.describe()
    assert run.report is not None, run.describe()
    assert run.report["complete"], run.describe()
    disabled = [f for f in run.report["findings"] if f["code"] == "DIA003"]
    assert disabled, run.describe()
    said = [*(f["message"] for f in disabled), run.stderr]  # there, where no agent could start
    assert any("injected" in text for text in said), run.describe()
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
    alone |= {"host-waits"}  # of a GPU
    alone |= {"ignore-lists"}  # of DDP
    alone |= {"device-meshes"}  # tests/probes/test_creations.py makes it fail
    alone |= {"resumed-loaders"}  # of torchdata, where it is installed
    alone |= {"child-processes"}  # of a script that starts some
    alone |= {"data"}  # of which each probe is made to fail
    alone |= {"parity"}  # an active mode: what goes wrong there ends the comparison
    alone |= {"routing-recorder"}  # the same
    assert {spec.name for spec in SPECS} <= {*PROBES, *alone}
