"""Real dumps of gloo: the culprit is found where torch's own analyzer ends with an error."""

import os
import subprocess
import sys

import pytest

from distdiag.analysis import analyze
from distdiag.findings.finding import Severity
from tests.dumps.real_recorders import PROGRAM, dump_two_ranks


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = dump_two_ranks(tmp_path_factory.mktemp("gloo"))
    traces = folder / "traces"
    traces.mkdir()
    for rank in range(2):
        path = (folder / f"trace_{rank}").rename(traces / f"trace_rank_{rank}")
        written_s = path.stat().st_mtime + 600  # the job stands still for ten minutes
        os.utime(path, (written_s, written_s))
    return traces


def test_the_rank_that_did_not_come_and_the_line_where_the_other_waits(dumps):
    report = analyze([dumps])
    (finding,) = [f for f in report.findings if f.severity is not Severity.INFO]
    assert (finding.code, str(finding.ranks)) == ("COL001", "1")
    assert "all_reduce #5 in group default_pg" in finding.message
    line = next(n for n, text in enumerate(PROGRAM.splitlines(), 1) if "torch.ones(5)" in text)
    assert finding.evidence[0].location.line == line


def test_the_analyzer_of_torch_does_not_read_them(dumps):
    module = "torch.distributed.flight_recorder.fr_trace"
    done = subprocess.run(
        [sys.executable, "-m", module, dumps, "--prefix", "trace_rank_"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "KeyError: ('0', " in done.stderr
