import pytest

from distdiag.checks.bar.concurrent_writers import ConcurrentWriters
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.races import access, alarms, race
from tests.checks.streams import Program, plain_site
from tests.checks.verdicts import findings


def writers(*contents, action="write", **values):
    return race(
        "two-writes",
        [
            access(rank, action, plain_site(5), content=content, **values)
            for rank, content in enumerate(contents)
        ],
    )


def test_writers_of_different_content_are_all_named():
    (finding,) = alarms(ConcurrentWriters, writers("a" * 9, "b" * 9))
    assert finding.ranks == RankSet([0, 1])
    assert "ranks 0-1 write cache.pt at train.py:5" in finding.message


def test_content_that_nobody_knows_is_an_alarm():
    assert alarms(ConcurrentWriters, writers(None, None))


def test_writers_of_the_same_content_are_information():
    (finding,) = findings(ConcurrentWriters, writers("same", "same"))
    assert finding.severity is Severity.INFO
    assert "with the same content" in finding.message


@pytest.mark.parametrize(
    ("moved", "is_alarm"), [(("a", "a"), False), (("a", "b"), True), ((None, None), True)]
)
def test_replacements_count_by_what_they_put_in_place(moved, is_alarm):
    shown = race(
        "two-writes",
        [access(rank, "rename", plain_site(5), moved=digest) for rank, digest in enumerate(moved)],
    )
    assert bool(alarms(ConcurrentWriters, shown)) is is_alarm


def test_a_guard_that_lets_several_through_is_pointed_out(tmp_path):
    program = Program(tmp_path, "if local_rank == 0:\n    save()\n")
    shown = race("two-writes", [access(r, "write", program.site("save()")) for r in (0, 2)])
    (finding,) = alarms(ConcurrentWriters, shown)
    assert "though `if local_rank == 0:`" in finding.message
