"""The folders in which reports of failed tests are kept."""

import pytest

from distdiag.testing.kept import folder_name


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/test_a.py::test_b[world2]", "tests-test_a.py--test_b[world2]"),
        ("test_a.py::TestC::test_b[0.5-world2]", "test_a.py--TestC--test_b[0.5-world2]"),
    ],
)
def test_a_usual_name_stays_readable(nodeid, name):
    assert folder_name(nodeid) == name


def test_what_no_folder_can_be_called_is_replaced_and_stays_apart():
    parameters = ["a b", "a:b", "a\u00e4b", "x" * 999, "x" * 998 + "y"]
    names = [folder_name(f"t.py::test[{each}]") for each in parameters]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.isascii() and len(name) < 255 and not set(name) & set(" :/")
