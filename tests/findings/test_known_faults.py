"""Each row of the table matches what it is about, and only that."""

import re
import tomllib
from pathlib import Path

import pytest

from distdiag.dumps.logs.known_fault_lines import SIGNS
from distdiag.events.base import Frame
from distdiag.findings import known_faults as module
from distdiag.findings.known_faults import (
    fault_of_exception,
    fault_of_line,
    fault_of_stack,
    known_faults,
    read_table,
)

EXAMPLES = tomllib.loads(Path(__file__).with_name("known_fault_examples.toml").read_text())
LINES, EXCEPTIONS, STACKS = EXAMPLES["lines"], EXAMPLES["exceptions"], EXAMPLES["stacks"]
HARMLESS = EXAMPLES["none"]["lines"]


def test_every_row_has_an_example():
    assert {*LINES, *EXCEPTIONS, *STACKS} == {row.id for row in known_faults()}
    assert len(known_faults()) >= 60


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines]
)
def test_a_line_is_of_its_row_and_no_other(name, line):
    found = fault_of_line(line)
    assert found is not None and found.id == name
    # The reader of logs looks at such a line at all.
    assert any(sign.decode() in line for sign in SIGNS)
    kind, colon, message = line.partition(": ")
    if colon and re.fullmatch(r"[\w.]+(?:Error|Exception)", kind):
        raised = fault_of_exception(kind, message)
        assert raised is not None and raised.id == name


@pytest.mark.parametrize(
    ("name", "raised"), [(name, each) for name, found in EXCEPTIONS.items() for each in found]
)
def test_an_exception_is_of_its_row(name, raised):
    found = fault_of_exception(*raised)
    assert found is not None and found.id == name


@pytest.mark.parametrize("name", [row.id for row in known_faults() if row.where == "exceptions"])
def test_what_only_an_exception_tells_is_no_fault_in_a_line(name):
    for kind, message in EXCEPTIONS[name]:
        assert fault_of_line(f"{kind}: {' '.join(message.split())}") is None


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_of_its_row(name):
    stack = [Frame(file, 1, function) for file, function in STACKS[name]]
    found = fault_of_stack(stack)
    assert found is not None and found.id == name
    assert fault_of_stack(stack[1:2]) is None


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_of_no_row(line):
    assert fault_of_line(line) is None


def test_a_wait_for_another_file_is_no_known_fault():
    assert fault_of_stack([Frame("/data/file_baton.py", 3, "hold")]) is None


def test_a_version_without_the_fault_is_left_out():
    line = "terminate called without an active exception"
    assert fault_of_line(line, {"torch": "2.12.1+cu126"}) is None
    for version in ("2.13.0+cpu", "2.13", "2.14.0a0", "3.0"):
        assert fault_of_line(line, {"torch": version}) is not None


def table(**changes):
    row = {
        "id": "a-fault",
        "words": ["something bad"],
        "whose": "program",
        "cause": "It is bad.",
        "fix": "Make it good.",
        "link": "https://example.com/1",
    }
    row |= changes
    texts = (
        (key, f"{value}" if isinstance(value, list) else f"'''{value}'''")
        for key, value in row.items()
    )
    return "[[fault]]\n" + "\n".join(f"{key} = {text}" for key, text in texts)


def test_a_good_row_is_read():
    (row,) = read_table(table(pattern=r"bad [\w*+]{1,9} \+ x{0,3}"))
    assert row.role == "cause"
    assert row.says("something bad abc + xx")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pattern": ".*x"}, "not bounded"),
        ({"pattern": "x+"}, "not bounded"),
        ({"pattern": "x{3,}"}, "not bounded"),
        ({"pattern": "("}, "not valid"),
        ({"link": "http://example.com"}, "not https"),
        ({"words": []}, "nothing matches"),
        ({"words": ["bad"]}, "too little"),
        ({"id": "Bad_Id"}, "small letters"),
        ({"whose": "nobody"}, "Invalid enum value"),
        ({"cause": ""}, "whole sentences"),
        ({"fix": "make it good"}, "whole sentences"),
        ({"versions": ">=2.0"}, "range of versions"),
        ({"library": "torch", "versions": "new"}, "range of versions"),
        ({"colour": "red"}, "unknown field"),
    ],
)
def test_a_wrong_row_is_named(changes, problem):
    with pytest.raises(ValueError, match=problem):
        read_table(table(**changes))


def test_an_id_comes_once():
    with pytest.raises(ValueError, match="comes twice"):
        read_table(table() + "\n\n" + table())


def test_the_table_is_a_file_of_the_package():
    assert module.TABLE.is_file()
    assert module.TABLE.parent.name == "findings"
