"""What is forgotten of files, and in which order."""

from __future__ import annotations

from distdiag.engine.files.races import PathIndex
from tests.engine.traces import Trace


def test_reads_are_forgotten_before_changes_and_that_is_said():
    trace, index = Trace(), PathIndex(most_accesses=2)
    trace.write(0, "/d/w")
    races = trace.judged()
    races._index = index
    for path in ("/d/w", "/d/a", "/d/b"):
        trace.access(0, "write" if path == "/d/w" else "read", path)
        races.order.feed(trace.events[-1])
    assert "forgotten" in races.problem
    assert index.at("/d/a") is None
    assert index.at("/d/w") is not None


def test_a_folder_is_forgotten_with_the_last_of_its_files():
    trace, index = Trace(), PathIndex(most_accesses=1)
    races = trace.judged()
    races._index = index
    for path in ("/d/sub/a", "/e/b"):
        trace.access(0, "read", path)
        races.order.feed(trace.events[-1])
    assert [path for path, _ in index.below("/d")] == []
    assert [path for path, _ in index.below("/e")] == ["/e/b"]
