"""The report as a person sees it: snapshots at 80 columns, a large job, hostile strings."""

import re

import pytest
from rich.cells import cell_len

from distdiag.config.ignores import IgnoreRule
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Grade,
    IgnoredFinding,
    Location,
    Outcome,
    RankInfo,
    ReadFile,
    Report,
    Run,
    Severity,
)
from distdiag.findings.fingerprint import fingerprint_of
from distdiag.findings.ignores import Ignores
from distdiag.reports import terminal_run
from distdiag.reports.formats import terminal
from distdiag.reports.formats.terminal import (
    MOST_SHORT_OF_DETAILS,
    MOST_WHOLE_OF_DETAILS,
    TerminalReporter,
)
from distdiag.reports.gate import Gate
from tests.effort import lines_run


def make_run(num_ranks=2, outcome=Outcome.FINISHED, **changes):
    fields = {
        "id": "20260101-120000-1",
        "command": ("train.py", "--epochs", "3"),
        "world_size": num_ranks,
        "ranks": tuple(
            RankInfo(
                rank=rank,
                local_rank=rank % 8,
                world_size=num_ranks,
                hostname="node",
                pid=1000 + rank,
                fate="finished",
            )
            for rank in range(num_ranks)
        ),
        "torch": "2.13.0",
        "started": "2026-01-01T12:00:00Z",
        "ended": "2026-01-01T12:00:07Z",
        "outcome": outcome,
    }
    return Run(**(fields | changes))


def shape_mismatch(**changes):
    gather = Location("train.py", 41, "train_step", "dist.all_gather(parts, batch)")
    fields = {
        "code": "COL003",
        "name": "collective-shape-mismatch",
        "severity": Severity.ERROR,
        "grade": Grade.PROVEN,
        "confidence": 0.97,
        "message": "all_gather #12 of group default_pg has shape [4, 8] on ranks 0-2 and [3, 8] on "
        "rank 3, whose last batch is smaller",
        "ranks": RankSet({3}),
        "step": 12,
        "location": gather,
        "subjects": ("default_pg",),
        "evidence": (
            Evidence(
                ranks=RankSet(range(3)),
                summary="called all_gather with shape [4, 8]",
                location=gather,
                values={"shape": "[4, 8]", "collective_seq_id": 12},
            ),
            Evidence(
                ranks=RankSet({3}),
                summary="called all_gather with shape [3, 8]",
                location=gather,
                values={"shape": "[3, 8]", "collective_seq_id": 12},
            ),
        ),
        "why": "Every rank must pass a tensor of the same shape to all_gather; a backend that does "
        "not compare them aborts, hangs or mixes up memory.",
        "fix": "Drop the last incomplete batch (drop_last=True) or pad it before gathering.",
        "fix_changes": "drop_last leaves out up to batch_size - 1 samples of each epoch.",
        "disproof": "Rank 3 passed [4, 8] to all_gather #12.",
    }
    return Finding(**(fields | changes))


def warning():
    return shape_mismatch(
        code="COL010",
        name="unwaited-work",
        severity=Severity.WARNING,
        grade=Grade.LIKELY,
        message="the Work of all_reduce #3 was never waited for",
        step=None,
        location=None,
        subjects=(),
        evidence=(),
        ranks=RankSet(),
    )


def render(report, **surface):
    return TerminalReporter(**surface).render(report)


def test_a_clean_run(snapshot):
    report = Report(complete=True, run=make_run(), checked=("COL001", "COL002", "HNG001"))
    assert render(report) == snapshot


def test_a_clean_run_says_in_one_sentence_what_was_not_there(snapshot):
    report = Report(
        complete=True,
        run=make_run(),
        checked=("COL001", "COL002", "HNG001"),
        not_checked={
            "MOE001": "no choice of experts was seen",
            "MOE005": "no parameter was recognised as one of an expert",
            "SEQ005": "no exchange between ranks was seen around attention",
            "DAT001": "no pass over a data set was seen",
            "BAR001": "probe files of rank 1 is off: PermissionError: /proc",
            "COL010": "left out by --select or --ignore",
            "functional collectives": "probe hooks of ranks 0-1 does not observe it: no hook",
        },
    )
    assert render(report) == snapshot
    assert render(report, verbose=True) == snapshot(name="verbose")


def test_of_many_causes_only_the_first_are_shown():
    report = Report(run=make_run(), not_checked={f"COL{n:03}": f"cause {n}" for n in range(1, 10)})
    text = " ".join(render(report).split())
    assert "0 checks looked; not observed: cause 1, cause 2, cause 3," in text
    assert "cause 6 and 3 more (-v says why)." in text
    assert "cause 7" in render(report, verbose=True)


def sick_report():
    return Report(
        complete=True,
        run=make_run(4, Outcome.HUNG, ended=None),
        findings=(warning(), shape_mismatch()),
        checked=("COL003", "COL010"),
        not_checked={"MOE001": "no router was called", "MOE002": "no router was called"},
    )


@pytest.mark.parametrize("color", [False, True], ids=["plain", "coloured"])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_worst_finding_comes_first_with_all_it_rests_on(snapshot, width, color):
    assert render(sick_report(), width=width, color=color) == snapshot


def test_details_are_for_those_who_ask(snapshot):
    assert render(sick_report(), verbose=True) == snapshot


def test_a_quiet_report_holds_errors_only(snapshot):
    text = render(sick_report(), quiet=True)
    assert text == snapshot
    assert "COL010" not in text
    clean = Report(complete=True, run=make_run(), findings=(warning(),), checked=("COL001",))
    assert render(clean, quiet=True) == ""


def test_a_healthy_run_takes_few_lines():
    gaps = {f"MOE{n:03}": "no choice of experts was seen" for n in range(1, 40)}
    checked = tuple(f"COL{n:03}" for n in range(1, 80))
    report = Report(complete=True, run=make_run(8), checked=checked, not_checked=gaps)
    lines = render(report).splitlines()
    assert lines[0] == "distdiag: OK: 79 checks looked, nothing found; the run finished"
    assert len(lines) <= 5


def test_one_finding_takes_one_screen_at_most():
    report = Report(
        complete=True, run=make_run(4, Outcome.HUNG), findings=(shape_mismatch(),), checked=("C1",)
    )
    assert len(render(report).splitlines()) <= 24


def disabled(rank):
    return shape_mismatch(
        code="DIA003",
        name="disabled-probe",
        severity=Severity.INFO,
        grade=Grade.NOTE,
        message=f"probe files of rank {rank} was switched off: PermissionError: /proc",
        ranks=RankSet({rank}),
        step=rank,
        location=None,
        subjects=("files",),
        evidence=(Evidence(ranks=RankSet({rank}), summary="PermissionError: /proc"),),
    )


def test_the_same_of_several_ranks_is_one_finding():
    ranks = (1, 2, 3, 12)
    report = Report(run=make_run(16), findings=tuple(map(disabled, ranks)), checked=("COL001",))
    text = render(report, width=100)
    assert "1 note: probe files of ranks 1-3,12 was switched off" in text
    assert text.count("INFO DIA003") == text.count("PermissionError: /proc\n") - 1 == 1
    assert "culprit    ranks 1-3,12" in text


def test_what_another_check_saw_of_the_same_is_folded_under_the_first():
    drift = shape_mismatch(code="REP003", name="replica-drift", message="they differ from step 1")
    report = Report(run=make_run(4), findings=(shape_mismatch(), drift))
    text = render(report, width=100)
    assert "  also       error REP003 replica-drift: they differ from step 1\n" in text
    assert text.count("  fix  ") == 1
    elsewhere = shape_mismatch(location=Location("train.py", 50, "f", "x"), ranks=RankSet({1}))
    text = render(Report(run=make_run(4), findings=(shape_mismatch(), elsewhere)))
    assert "  fix        as for COL003 above\n" in text


def test_notes_beside_an_error_take_a_line_each():
    report = Report(run=make_run(4), findings=(disabled(1), shape_mismatch()))
    text = render(report, width=120)
    assert "note DIA003: probe files of rank 1 was switched off: PermissionError" in text
    assert "INFO DIA003" not in text
    assert "INFO DIA003" in render(report, verbose=True)


def test_of_very_many_findings_the_worst_are_whole_and_the_rest_is_counted():
    findings = tuple(
        shape_mismatch(message=f"number {n}", subjects=(f"layer{n}",)) for n in range(100)
    )
    text = render(Report(run=make_run(4), findings=findings), width=100)
    assert text.count("ERROR COL003") == 8
    assert "error COL003: train.py:41: number 47" in text
    assert "and 52 more findings (52 COL003): see report.json" in text


def test_of_very_many_findings_details_are_bounded_too():
    """20,000 findings are 50 MB when all of them are written whole."""
    findings = tuple(
        shape_mismatch(
            message=f"number {n}",
            subjects=tuple(f"layer{n}.{m}" for m in range(100)),
            code=("COL003", "COL004")[n % 3 == 0],
        )
        for n in range(2000)
    )
    text = render(Report(run=make_run(4), findings=findings), width=100, verbose=True)
    assert text.count("ERROR COL00") == MOST_WHOLE_OF_DETAILS
    assert text.count("error COL00") == MOST_SHORT_OF_DETAILS
    assert "and 36 more" in text  # subjects
    assert "and 900 more findings (600 COL003, 300 COL004): see report.json" in text


def test_of_very_many_that_do_not_count_the_first_are_listed(monkeypatch):
    monkeypatch.setattr(terminal_run, "MOST_IGNORED", 3)
    ignored = tuple(IgnoredFinding(finding=each, by="baseline") for each in many(5))
    text = render(Report(run=make_run(4), ignored=ignored), verbose=True)
    assert text.count("ignored by baseline") == 3
    assert "and 2 more findings: see report.json" in text


def test_a_report_takes_as_long_as_what_it_shows(monkeypatch):
    """What is not shown is counted, and that takes a few lines of Python for each."""
    monkeypatch.setattr(terminal, "MOST_WHOLE_OF_DETAILS", 10)
    monkeypatch.setattr(terminal, "MOST_SHORT_OF_DETAILS", 20)
    render(Report(run=make_run(4), findings=many(1)))
    first, second = (
        lines_run(lambda n=n: render(Report(run=make_run(4), findings=many(n)), verbose=True))
        for n in (30, 60)
    )
    assert second < 1.5 * first


def many(number):
    return tuple(shape_mismatch(message=f"{n}", subjects=(f"layer{n}",)) for n in range(number))


def traceback_of(num_frames, message="ValueError: no"):
    frames = [f'  File "lib{n}.py", line {n}, in f\n    call_{n}()' for n in range(num_frames)]
    return "Traceback (most recent call last):\n" + "\n".join(frames) + f"\n{message}"


@pytest.mark.parametrize(
    "message", ["ValueError: no", "RuntimeError: C++\n" + "frame #1: x\n" * 300]
)
def test_a_traceback_is_never_cut_before_its_last_frame(message):
    evidence = Evidence(
        ranks=RankSet({3}), summary="raised", values={"traceback": traceback_of(60, message)}
    )
    report = Report(run=make_run(4), findings=(shape_mismatch(evidence=(evidence,)),))
    text = render(report, verbose=True)
    assert 'File "lib59.py", line 59, in f\n' in text
    assert "    call_59()\n" in text
    assert message.split("\n")[0] in text
    assert len(text.splitlines()) < 120
    assert "lib59" not in render(report)  # the place of the finding says it


def test_raw_values_are_for_those_who_ask():
    report = Report(run=make_run(4), findings=(shape_mismatch(),))
    assert "collective_seq_id = 12" not in render(report)
    assert "collective_seq_id = 12" in render(report, verbose=True)


def test_the_lines_around_a_place_are_shown_as_long_as_they_are_what_they_were(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def f(x):\n    if x:\n        gather(x)\n    return x\n")
    place = Location(str(script), 3, "f", "gather(x)")
    report = Report(run=make_run(), findings=(shape_mismatch(location=place, evidence=()),))
    assert "      2 | if x:\n    > 3 |     gather(x)\n      4 | return x\n" in render(report)
    (tmp_path / "other.py").write_text("\n\nother(x)\n")
    place = Location(str(tmp_path / "other.py"), 3, "f", "gather(x)")
    report = Report(run=make_run(), findings=(shape_mismatch(location=place, evidence=()),))
    assert "      3 | gather(x)\n" in render(report)


def test_paths_are_shown_as_a_reader_knows_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    library = "/usr/lib/python3/site-packages/torch/nn/modules/linear.py"
    place = Location(f"{tmp_path}/src/train.py", 3, "f", "gather(x)")
    finding = shape_mismatch(
        location=place,
        message=f"rank 1 is at {tmp_path}/src/train.py:3, in {library}:9",
        evidence=(
            Evidence(ranks=RankSet({1}), summary="there", location=Location(library, 9, "g")),
        ),
    )
    text = render(Report(run=make_run(), findings=(finding,)), width=100)
    assert "--> src/train.py:3 in f" in text
    assert "rank 1 is at src/train.py:3, in …/site-packages/torch/nn/modules/linear.py:9" in text
    assert str(tmp_path) not in text


def test_what_was_not_looked_at_is_not_called_clean(snapshot):
    report = Report(
        run=make_run(2, Outcome.KILLED, attempts=2, active_modes=("--strict",), torch=""),
        not_checked={"COL": "the tap was disabled: its self-test failed"},
        silent_ranks=RankSet({1}),
    )
    assert render(report) == snapshot


def test_512_ranks_fit_on_a_page(snapshot):
    ranks = range(512)
    infos = tuple(
        RankInfo(
            rank=rank,
            local_rank=rank % 8,
            world_size=512,
            hostname=f"node{rank // 8}",
            pid=rank,
            fate="died" if rank == 77 else "running",
            last=f"all_reduce #9 at train.py:{30 + (rank == 77)}",
        )
        for rank in ranks
    )
    evidence = tuple(
        Evidence(ranks=RankSet({rank}), summary=f"waits in all_reduce #{9 + rank % 2}")
        for rank in ranks
        if rank != 77
    )
    odd_ones = tuple(
        Evidence(ranks=RankSet({rank}), summary=f"pid {rank} is in another place")
        for rank in range(100, 140)
    )
    finding = shape_mismatch(evidence=evidence + odd_ones, ranks=RankSet({77}))
    report = Report(
        complete=True,
        run=make_run(512, Outcome.ABORTED, ranks=infos),
        findings=(finding,),
        checked=("COL001",),
        silent_ranks=RankSet(range(1, 512, 3)),
    )
    text = render(report)
    assert text == snapshot
    assert len(text.splitlines()) < 100


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_line_fits_the_width_unless_it_is_a_place_in_the_code(width):
    report = Report(run=make_run(4), findings=(shape_mismatch(), warning()), checked=("COL003",))
    places = ("--> train.py:41 in train_step",)
    for line in render(report, width=width).splitlines():
        assert cell_len(line) <= max(width, 34) or line.strip() in places, line
        assert line == line.rstrip()


def test_a_long_path_stays_in_one_piece():
    path = "/very" * 60 + "/train.py"
    report = Report(
        run=make_run(), findings=(shape_mismatch(location=Location(path, 1, "f", "x = 1")),)
    )
    assert f"  --> {path}:1 in f\n" in render(report)


HOSTILE = "[bold red]x[/] [/nope] :smile: \x1b]0;owned\x07 \u202e \x9b2J a\rb \ud800"


def test_hostile_strings_are_shown_and_not_obeyed():
    finding = shape_mismatch(
        message=HOSTILE,
        name=HOSTILE,
        subjects=(HOSTILE,),
        location=Location(HOSTILE, 1, HOSTILE, HOSTILE),
        evidence=(Evidence(ranks=RankSet({0}), summary=HOSTILE, values={HOSTILE: HOSTILE}),),
        why=HOSTILE,
        disproof=HOSTILE,
    )
    report = Report(
        run=make_run(command=(HOSTILE,), torch=HOSTILE, started=HOSTILE),
        findings=(finding,),
        checked=(HOSTILE,),
        not_checked={HOSTILE: HOSTILE},
    )
    text = render(report, width=200, verbose=True)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("[bold red]x[/] [/nope] :smile: \\x1b]0;owned\\x07") >= 12
    text.encode()


def test_what_was_read_and_what_to_collect(snapshot):
    folder = "/runs/47"
    dumps = [
        ReadFile(
            path=f"{folder}/nccl_trace_rank_{rank}",
            kinds=("flight recorder",),
            ranks=RankSet({rank}),
            num_understood=2000,
        )
        for rank in range(64)
    ]
    files = (
        *dumps,
        ReadFile(
            path=f"{folder}/train.log",
            kinds=("log", "stacks"),
            ranks=RankSet({0, 1, 2}),
            num_lines=51_234,
            num_understood=17,
        ),
        ReadFile(path="stdin", num_lines=3, problem="nothing in it is of a kind that is known"),
    )
    report = Report(
        run=make_run(outcome=Outcome.HUNG),
        checked=("COL003",),
        files=files,
        next_time=("set NCCL_DEBUG=WARN, so that NCCL says what failed",),
    )
    assert render(report) == snapshot


def test_colours_change_nothing_but_the_colours():
    report = Report(run=make_run(), findings=(shape_mismatch(),), checked=("COL003",))
    coloured = render(report, color=True)
    assert "\x1b[1;31mERROR COL003" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert plain == render(report)


def test_the_surroundings_do_not_change_the_lines(monkeypatch):
    report = Report(run=make_run(), findings=(shape_mismatch(),))
    before = render(report)
    for name, value in {"COLUMNS": "30", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert render(report) == before


def test_processes_without_a_rank_have_their_names():
    named = RankInfo(
        rank=3, local_rank=-1, world_size=4, hostname="", pid=0, label="worker pid=7", last="x"
    )
    run = make_run()
    report = Report(run=make_run(ranks=(*run.ranks, named)), findings=(shape_mismatch(),))
    text = TerminalReporter(width=100, verbose=True).render(report)
    assert "culprit    worker pid=7" in text
    assert "worker pid=7: running" in text


def test_findings_that_do_not_count_are_counted_and_listed_when_asked_for():
    rule = IgnoreRule(codes=("COL010",), reason="the optimizer waits")
    gate = Gate(ignores=Ignores([rule], {fingerprint_of(shape_mismatch()): ""}))
    report = gate.judged(
        Report(
            complete=True, run=make_run(), findings=(shape_mismatch(), warning()), checked=("A",)
        )
    )
    text = render(report)
    assert "1 finding ignored, 1 finding known by the baseline. --verbose lists them." in text
    assert "COL003" not in text
    whole = " ".join(render(report, verbose=True).split())
    assert "warning COL010 unwaited-work: the Work" in whole
    assert "ignored by configuration: the optimizer waits" in whole
    assert "error COL003 collective-shape-mismatch train.py:41" in whole
