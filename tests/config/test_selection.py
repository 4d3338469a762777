"""Which codes a selection lets through, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.config.selection import Selection
from distdiag.events.errors import UsageError

CODES = ("BAR001", "COL001", "COL010", "COL011", "DIA001")


@pytest.mark.parametrize(
    ("select", "ignore", "selected"),
    [
        (("ALL",), (), "BAR001 COL001 COL010 COL011 DIA001"),
        ((), (), "BAR001 COL001 COL010 COL011 DIA001"),
        (("COL",), (), "COL001 COL010 COL011"),
        (("COL011", "BAR"), (), "BAR001 COL011"),
        (("ALL",), ("COL",), "BAR001 DIA001"),
        ((), ("COL01",), "BAR001 COL001 DIA001"),
        (("COL",), ("COL01",), "COL001"),
        (("COL011",), ("COL01",), "COL011"),
        (("COL", "COL011"), ("COL01",), "COL001 COL011"),
        (("COL",), ("COL",), ""),
        (("COL",), ("ALL",), "COL001 COL010 COL011"),
        (("ALL",), ("ALL",), ""),
    ],
)
def test_the_longest_prefix_decides_and_a_tie_ignores(select, ignore, selected):
    selection = Selection(select=select, ignore=ignore)
    assert [code for code in CODES if selection.selects(code)] == selected.split()


@given(
    st.lists(st.sampled_from((*CODES, "ALL", "COL", "COL01", "B")), min_size=1),
    st.lists(st.sampled_from((*CODES, "ALL", "COL", "COL01", "B"))),
    st.sampled_from(CODES),
)
def test_order_and_repetition_do_not_matter(select, ignore, code):
    forwards = Selection(tuple(select), tuple(ignore))
    backwards = Selection(tuple(reversed(select * 2)), tuple(reversed(ignore * 2)))
    assert forwards.selects(code) == backwards.selects(code)


@pytest.mark.parametrize("prefix", ["ALL", "C", "COL", "COL01", "COL011"])
def test_a_prefix_of_a_known_code_is_valid(prefix):
    Selection(select=(prefix,)).validate(CODES)
    Selection(ignore=(prefix,)).validate(CODES)


@pytest.mark.parametrize("prefix", ["XYZ", "COL0111", "col", ""])
def test_an_unknown_prefix_is_named(prefix):
    with pytest.raises(UsageError, match=f'^unknown code or prefix "{prefix}"'):
        Selection(select=("COL", prefix)).validate(CODES)
    with pytest.raises(UsageError, match=f'^unknown code or prefix "{prefix}"'):
        Selection(ignore=(prefix,)).validate(CODES)


def test_an_unknown_prefix_brings_a_suggestion():
    with pytest.raises(UsageError, match=r"\(did you mean COL.*\?\)"):
        Selection(select=("col",)).validate(CODES)
