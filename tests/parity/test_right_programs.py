"""Right programs of many kinds agree with one rank, and each has a broken twin that does not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from distdiag.findings.finding import Finding, Severity
from distdiag.reports import read_report
from tests import forked

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.timeout(600)


class Told(NamedTuple):
    status: int
    findings: tuple[Finding, ...]

    def of(self, code: str) -> Finding:
        """Return the one finding with this code."""
        (finding,) = (each for each in self.findings if each.code == code)
        return finding

    @property
    def alarms(self) -> list[str]:
        return [each.code for each in self.findings if each.severity is not Severity.INFO]


@pytest.fixture
def told(tmp_path):
    def told(program, *arguments, options=()):
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        command = ["-m", "distdiag.cli", "parity", "--steps", "2", *options]
        command += ["--run-dir", str(run_dir), str(PROGRAMS / program), *arguments]
        done = forked.run(command, timeout=500)
        assert done.returncode in (0, 1), done.stderr
        return Told(done.returncode, read_report(run_dir / "report.json").findings)

    return told


KINDS = {
    "tuple": "PAR010",
    "dict": "PAR010",
    "dataclass": "PAR010",
    "named": "PAR010",
    "nested": "PAR010",
    "counted": "PAR010",
    "packed": "PAR010",
    "workers": "PAR010",
    "accumulated": "PAR010",
    "stream": "PAR010",
    "uneven": "PAR010",
    "hand-made": "PAR010",
    "by-hand": "PAR010",
    "sharded": "PAR010",
    "flat": "PAR010",
    "compiled": "PAR010",
    "weighted": "PAR010",
    "tasks": "PAR017",
    "normed": "PAR017",
    "contrastive": "PAR011",
    "capacity": "PAR017",
    "balanced": "PAR017",
}
"""What is found in the broken twin of each."""
LIBRARIES = ("accelerate", "trainer", "lightning", "deepspeed", "deepspeed0", "deepspeed2")
STYLES = (
    *("passes-without-sync", "epochs", "evaluated", "scheduled", "averaged", "taught"),
    *("clipped-by-hand", "dropping", "mixed", "adversaries", "sharpness", "closures", "prefetched"),
    *("threaded", "listed", "zipped", "two-backwards", "flattened", "hooked", "partly-frozen"),
    *("divided-states", "sharded-passes", "paired", "queued", "of-boxes", "by-class", "of-bags"),
    *("recurrent", "penalised", "frozen-statistics", "streamed", "ready-made", "one-by-one"),
    *("dealt", "without-loader", "handed-over"),
)
HIDING = ("clipped-by-hand",)
"""They scale gradients to one norm, which hides the factor that they had before."""
LAYOUTS = {
    "tp": ("PAR011", "place.weight"),
    "cp": ("PAR009", "middle.qkv"),
    "ep": ("PAR011", "middle.experts.3.bias"),
    "pp": ("PAR010", "loss of pass 1"),
}


def quick(kinds, default):
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(kind, marks=marks[kind in default]) for kind in kinds]


@pytest.mark.parametrize("kind", quick(KINDS, {"tuple"}))
def test_right_ones_agree(told, kind):
    found = told("right.py", "--kind", kind)
    assert (found.status, found.alarms) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_right_ones_agree_over_more_steps_of_adam(told, kind):
    found = told("right.py", "--kind", kind, "--adam", options=("--steps", "6"))
    assert (found.status, found.alarms) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_their_broken_twins_do_not(told, kind):
    found = told("right.py", "--kind", kind, "--broken")
    assert found.status == 1
    assert KINDS[kind] in found.alarms


@pytest.mark.slow
def test_batches_that_draw_random_numbers_are_joined_and_prove_nothing(told):
    found = told("right.py", "--kind", "masking")
    assert (found.status, found.alarms) == (0, [])
    assert "--pad 0=VALUE --pad 1=VALUE" in found.of("PAR010").message


@pytest.mark.slow
def test_what_depends_on_the_batch_is_reported_once_and_can_be_accepted(told):
    found = told("right.py", "--kind", "local-pairs")
    assert (found.status, found.alarms) == (1, ["PAR017"])
    assert "each rank is right for its own batch" in found.of("PAR017").message


@pytest.mark.slow
def test_ranks_that_replay_several_batches_as_one_are_reported_in_the_same_way(told):
    options = ("--world-sizes", "1,2,4")
    found = told("right.py", "--kind", "local-pairs", options=options)
    assert {*found.alarms} == {"PAR017"}
    assert told("right.py", "--kind", "tuple", options=options).alarms == []


@pytest.mark.slow
def test_batch_normalisation_of_each_rank_is_reported_once(told):
    assert told("right.py", "--kind", "normed-here").alarms == ["PAR017"]


@pytest.mark.slow
def test_a_gradient_of_one_rank_behind_batch_normalisation_is_named(told):
    found = told("right.py", "--kind", "normed-here", "--broken").of("PAR011")
    assert found.subjects == ("head.weight",)
    assert "the data of coordinate 1 does not enter" in found.message


@pytest.mark.slow
def test_what_is_accepted_is_a_note(told):
    found = told("right.py", "--kind", "local-pairs", options=("--accept", "PAR017"))
    assert (found.status, found.alarms) == (0, [])
    assert "accepted as meant" in found.of("PAR017").message


@pytest.mark.parametrize("style", quick(STYLES, {"adversaries"}))
def test_right_ones_agree_in_every_style(told, style):
    options = ("--dropout", "off") if style == "dropping" else ()
    found = told("loops.py", "--style", style, options=("--steps", "3", *options))
    assert (found.status, found.alarms) == (0, [])


@pytest.mark.parametrize("style", quick(STYLES, {"closures"}))
def test_a_loss_that_is_divided_by_the_ranks_is_found_in_every_style(told, style):
    options = ("--dropout", "off") if style == "dropping" else ()
    found = told("loops.py", "--style", style, "--broken", options=options)
    assert found.status == 1
    assert found.alarms == ["PAR011"]
    is_explained = "divided by the number of ranks (2)" in found.of("PAR011").message
    assert is_explained is (style not in HIDING)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_that_keep_the_loop_agree(told, library):
    found = told("libraries.py", "--library", library)
    assert (found.status, found.alarms) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_their_broken_twins_are_reported(told, library):
    found = told("libraries.py", "--library", library, "--broken")
    assert found.status == 1 and "PAR010" in found.alarms


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_models_agree_with_the_whole_one(told, layout):
    found = told("layouts.py", "--layout", layout)
    assert (found.status, found.alarms) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_broken_ones_the_first_that_differs_is_named(told, layout):
    code, subject = LAYOUTS[layout]
    found = told("layouts.py", "--layout", layout, "--broken")
    assert found.status == 1
    assert found.of(code).subjects[0] == subject
