"""Injected NaN and infinities are found in the module, on the rank and at the step of the fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("numerics_faults.py")

pytestmark = pytest.mark.timeout(300)

# What is injected, into which module it comes, at which stage, and the step. The ranks alternate.
PLACES = (
    ("layers.0.norm1.out", "layers.0.norm1", "forward", 0),
    ("layers.0.attention.qkv.out", "layers.0.attention.qkv", "forward", 1),
    ("layers.1.attention.code", "layers.1.attention", "forward", 2),
    ("layers.2.code", "layers.2", "forward", 3),
    ("layers.2.down.out", "layers.2.down", "forward", 5),
    ("norm.out", "norm", "forward", 7),
    ("head.out", "head", "forward", 17),
    ("layers.1.up.out", "layers.1.up", "forward", 33),
    ("layers.2.attention.out.out", "layers.2.attention.out", "forward", 40),
    ("loss.out", "the loss", "loss", 4),
    ("input.out", "Model", "input", 6),
    ("layers.0.up.grad", "layers.0.up", "backward", 0),
    ("layers.1.down.grad", "layers.1.down", "backward", 2),
    ("layers.2.norm2.grad", "layers.2.norm2", "backward", 5),
    ("layers.1.attention.qkv.grad", "layers.1.attention.qkv", "backward", 9),
    ("head.grad", "head", "backward", 17),
    ("layers.0.attention.out.grad", "layers.0.attention.out", "backward", 34),
    ("norm.grad", "norm", "backward", 40),
    ("layers.1.up.update", "", "update", 3),
    ("layers.1.up.weight", "layers.1.up", "gradient", 4),
)
FAULTS = [
    (wrapper, place, "inf" if number % 4 == 3 else "nan", number % 2, step, module, stage)
    for wrapper in ("ddp", "fsdp2")
    for number, (place, module, stage, step) in enumerate(PLACES)
    if (wrapper, stage) != ("fsdp2", "gradient")  # a hook of a shard is no place in a backward pass
] + [("fsdp2", "layers.0.down.out", "nan", 1, 70, "layers.0.down", "forward")]
QUICK = {
    ("ddp", "layers.0.norm1.out"),
    ("fsdp2", "layers.1.down.grad"),
    ("ddp", "layers.1.up.weight"),
}
WORDS = {
    "forward": "forward pass",
    "loss": "loss",
    "input": "an input of",
    "backward": "backward pass",
    "update": "after the step of its optimizer",
    "gradient": "own backward pass",
}


def first_of(wrapper, place, value, rank, step):
    run = run_checked(SCRIPT, [wrapper, f"{place}:{value}:{rank}:{step}", str(step + 3)])
    found = [each for each in run.report["findings"] if each["code"] == "NUM001"]
    assert len(found) == 1, run.describe()
    alarms = {each["code"] for each in run.report["findings"] if each["severity"] != "info"}
    return found[0], alarms, run.describe()


def cases():
    for fault in FAULTS:
        is_quick = fault[:2] in QUICK
        name = f"{fault[0]}-{fault[1]}-{fault[2]}-rank{fault[3]}-step{fault[4]}"
        yield pytest.param(fault, id=name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("fault", list(cases()))
def test_a_fault_is_found_where_it_is_made(fault):
    wrapper, place, value, rank, step, module, stage = fault
    found, alarms, shown = first_of(wrapper, place, value, rank, step)

    assert found["severity"] == "error", shown
    assert found["step"] == step, shown
    assert WORDS[stage] in found["message"], shown
    assert module in ("", *found["subjects"]), shown
    # The update of a shard changes that of its rank; what DDP has averaged is the same on all.
    assert found["ranks"] == [rank] or stage == "update", shown
    assert alarms <= {"NUM001", "REP003", "REP004", "SHD004"}, shown


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_healthy_training_is_silent(wrapper):
    run = run_checked(SCRIPT, [wrapper, "none", "6"])

    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    assert run.alarms == [], run.describe()
    assert not [each for each in run.report["findings"] if re.match("NUM00", each["code"])]
