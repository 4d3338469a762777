"""How torchrun says that ranks failed."""

import pytest

from distdiag.dumps.launchers.torchelastic_text import TorchelasticText
from distdiag.events.lifecycle import Exited
from distdiag.events.stacks import Observed
from tests.dumps.reading import events, read, sample, text


def ends(dump):
    return {
        rank: next(e.reason for e in found if isinstance(e, Exited))
        for rank, found in events(TorchelasticText(), dump).items()
    }


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("killed", {1: "killed by SIGKILL", 0: "killed by SIGTERM from its launcher"}),
        ("raised", {1: "exit code 1", 0: "killed by SIGTERM from its launcher"}),
        ("timed_out", {0: "exit code 1", 1: "killed by SIGTERM from its launcher"}),
        ("recorded", {1: "exit code 1", 0: "killed by SIGTERM from its launcher"}),
    ],
)
def test_how_each_rank_ended(log, expected):
    assert ends(sample(f"torchrun_{log}.log")) == expected


def test_the_first_failure_is_the_earliest():
    found = events(TorchelasticText(), sample("torchrun_killed.log"))
    first, later = (next(e for e in found[r] if isinstance(e, Exited)) for r in (1, 0))
    assert 0 < first.time_ns < later.time_ns
    (observed,) = (e for e in found[1] if isinstance(e, Observed))
    assert observed.values == {
        "exitcode": -9,
        "pid": 6332,
        "local_rank": 1,
        "host": "node-0",
        "is_first_failure": True,
    }
    assert observed.summary == "the first failure that torchrun observed: killed by SIGKILL"


def test_local_ranks_and_pids_are_reported():
    found = read(TorchelasticText(), sample("torchrun_killed.log"))
    assert {(d.rank, d.local_rank, d.pid) for d in found} == {(0, 0, 6331), (1, 1, 6332)}


def test_where_the_summary_is_cut_off_the_line_at_once_tells_the_local_rank():
    log = sample("torchrun_killed.log").data.partition(b"====")[0].decode()
    (dump,) = read(TorchelasticText(), text(log))
    assert (dump.rank, dump.local_rank, dump.pid) == (None, 1, 6332)
    assert dump.events[-1].reason == "killed by signal 9"


def test_a_line_that_is_cut_says_nothing():
    log = text(
        "  time      : never", "  rank      : x", "  exitcode  : 1 (pid: 3)", "  exitcode  : -"
    )
    assert read(TorchelasticText(), log) == []
