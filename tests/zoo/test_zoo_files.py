"""Tests that every zoo entry is whole, and that its expectation fits its script."""

import io
import itertools
import tokenize
from pathlib import Path

import pytest

from tests.zoo.expectation import ZOO, ZooEntry, load_entries, read_expectation

ENTRIES = load_entries()
FILES = {"bug.py", "fix.patch", "expect.toml"}
FAMILIES = {"BAR", "CKP", "COL", "DAT", "HNG", "MOE", "NUM", "PAR", "REP", "SEQ", "SHD"}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}

entries = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


def code_lines(script: Path) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(script.read_text()).readline)
    return {
        line
        for token in tokens
        if token.type not in NO_CODE and not token.string.startswith('"""')
        for line in range(token.start[0], token.end[0] + 1)
    }


def test_every_folder_of_the_zoo_is_an_entry():
    folders = [path.name for path in ZOO.iterdir() if path.is_dir() and path.name[0] not in "._"]
    assert [entry.id for entry in ENTRIES] == sorted(folders)
    assert len(folders) >= 108


@entries
def test_an_entry_holds_a_script_and_a_fix_that_applies_to_it(entry: ZooEntry):
    assert {path.name for path in entry.folder.iterdir()} - {"__pycache__"} == FILES
    assert entry.fix_patch.read_text().startswith("--- bug.py\n+++ fix.py\n@@ ")
    bug, fix = entry.bug.read_text(), entry.fixed_text
    assert bug != fix
    compile(bug, str(entry.bug), "exec")
    compile(fix, str(entry.fix_patch), "exec")


@entries
def test_the_expected_lines_are_code_of_the_bug(entry: ZooEntry):
    expectation = entry.expectation
    assert expectation.lines
    assert all(expectation.evidence_lines)
    expected = {*expectation.lines, *itertools.chain(*expectation.evidence_lines)}
    assert expected <= code_lines(entry.bug)


@entries
def test_the_expected_codes_belong_to_the_expected_families(entry: ZooEntry):
    expectation = entry.expectation
    assert set(expectation.families) <= FAMILIES
    # A class of hang may be known before there is a code for it.
    assert expectation.codes or expectation.hang_class
    assert {code[:3] for code in expectation.codes} <= set(expectation.families)


@entries
def test_the_expected_ranks_are_those_of_the_run(entry: ZooEntry):
    assert entry.expectation.ranks
    assert set(entry.expectation.ranks) <= set(range(entry.expectation.world_size))


@entries
def test_no_script_knows_the_tool_or_the_place_of_its_bug(entry: ZooEntry):
    for text in (entry.bug.read_text().lower(), entry.fixed_text.lower()):
        assert not [word for word in ("distdiag", "bug", "culprit", "deadlock") if word in text]


@entries
def test_the_source_names_a_report(entry: ZooEntry):
    repository, _, number = entry.expectation.source.partition("#")
    assert repository.count("/") == 1
    assert number.isdigit()


def test_an_unknown_key_of_an_expectation_is_an_error_with_its_path(tmp_path: Path):
    path = tmp_path / "expect.toml"
    path.write_text((ENTRIES[0].folder / "expect.toml").read_text() + "\nseverity = 'error'\n")
    with pytest.raises(ValueError, match=r"expect\.toml: .*severity"):
        read_expectation(path)


def test_an_unknown_entry_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="no such zoo entry: nobody-1"):
        load_entries(["nobody-1"])
