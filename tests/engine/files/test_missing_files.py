import pytest
from msgspec.structs import replace

from distdiag.engine.files.aligner import MissingFiles
from tests.checks.races import access, missing_file
from tests.checks.streams import plain_site

HERE, THERE = "/node0/index.npy", "/node1/index.npy"


def event(rank, action, path):
    return access(rank, action, plain_site(3), path, written=path).event


@pytest.fixture
def files():
    files = MissingFiles()
    files.add(event(0, "write", HERE))
    files.add(event(1, "read", THERE))
    return files


def test_the_writer_of_a_namesake_is_found(files):
    found = files.explain(missing_file(1, THERE))
    assert (found.rank, found.path, list(found.namesakes)) == (1, THERE, [0])


def test_a_file_that_was_written_is_a_matter_of_order(files):
    files.add(event(0, "write", THERE))
    assert files.explain(missing_file(1, THERE)) is None


def test_a_relative_name_is_found_by_the_access(files):
    raised = missing_file(1, "cache/index.npy")
    files.add(replace(event(1, "read", THERE), written="cache/index.npy"))
    assert files.explain(raised).path == THERE


@pytest.mark.parametrize("path", ["/node1/other.npy", "relative.npy"])
def test_a_file_of_which_nobody_wrote_a_namesake_says_nothing(files, path):
    assert files.explain(missing_file(1, path)) is None


def test_another_exception_says_nothing(files):
    raised = replace(missing_file(1, THERE), type="ValueError", message=f"bad header in {THERE}")
    assert files.explain(raised) is None
