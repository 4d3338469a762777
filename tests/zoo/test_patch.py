"""Tests that a diff is applied exactly or not at all."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zoo.patch import PatchError, apply_patch

OLD = "".join(f"line {number}\n" for number in range(1, 21))
NEW = OLD.replace("line 2\n", "line two\n").replace("line 17\n", "").replace("20\n", "20\n21\n")
texts = st.lists(st.sampled_from(["a\n", "b\n", "-- c\n", "++ d\n", "\n"]), max_size=12)


def diff_of(old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "bug.py", "fix.py"
    )
    return "".join(lines)


@given(old=texts, new=texts)
def test_a_diff_leads_from_the_old_text_to_the_new(old, new):
    before, after = "".join(old), "".join(new)
    if before != after:
        assert apply_patch(before, diff_of(before, after)) == after


@pytest.mark.parametrize("number", [1, 5, 14, 20])
def test_a_changed_line_of_context_is_an_error(number):
    changed = OLD.replace(f"line {number}\n", "another\n")
    with pytest.raises(PatchError, match="the text is not what the diff expects"):
        apply_patch(changed, diff_of(OLD, NEW))


def test_a_text_that_has_moved_is_an_error():
    with pytest.raises(PatchError, match="line 1: the text is not"):
        apply_patch("# a new first line\n" + OLD, diff_of(OLD, NEW))


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("", "begins with"),
        (NEW, "begins with"),
        ("--- bug.py\n+++ fix.py\n", "changes nothing"),
        (diff_of(OLD, NEW).replace("@@ -1,5", "@@ 1,5"), "a hunk begins"),
        (diff_of(OLD, NEW).replace("-line 2\n", ""), "a hunk of"),
        (diff_of(OLD, NEW) + "\\ No newline at end of file\n", "a hunk begins"),
    ],
)
def test_what_is_no_whole_diff_is_an_error(patch, reason):
    with pytest.raises(PatchError, match=reason):
        apply_patch(OLD, patch)
