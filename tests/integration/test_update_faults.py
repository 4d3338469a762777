"""Faults of updates, types and loss scales, each with the same training that is right."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.launch import Launch

PROGRAM = Path(__file__).with_name("updating.py")
HEALTHY = Path(__file__).with_name("healthy_updates.py")


class Case(NamedTuple):
    """One fault in one training, and the code of what must be found."""

    code: str
    fault: str
    model: str = "perceptron"
    optimizer: str = "adamw"
    wrapper: str = "ddp"
    lr: float = 1e-4
    steps: int = 9

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.model}-{self.optimizer}-{self.wrapper}"

    @property
    def arguments(self) -> list[str]:
        return [
            *("--fault", self.fault, "--model", self.model, "--optimizer", self.optimizer),
            *("--wrapper", self.wrapper, "--lr", str(self.lr), "--steps", str(self.steps)),
        ]


CASES = (
    Case("NUM010", "lost"),
    Case("NUM020", "scaler-local", wrapper="plain", optimizer="sgd", lr=1e-2),
    Case("NUM014", "positions", model="attention", lr=1e-2),
    Case("NUM010", "lost", optimizer="adam"),
    Case("NUM010", "lost", optimizer="lion"),
    Case("NUM010", "lost", optimizer="adafactor"),
    Case("NUM010", "lost", optimizer="sgd"),
    Case("NUM010", "lost", optimizer="momentum"),
    Case("NUM010", "lost", model="convolution"),
    Case("NUM010", "lost", model="convolution", optimizer="adam", wrapper="plain"),
    Case("NUM010", "lost", model="convolution", optimizer="sgd", wrapper="fsdp2"),
    Case("NUM010", "lost", model="attention", wrapper="plain"),
    Case("NUM010", "lost", model="attention", optimizer="lion", wrapper="plain"),
    Case("NUM010", "lost", model="attention", optimizer="momentum"),
    Case("NUM010", "lost", wrapper="fsdp2"),
    Case("NUM010", "lost", optimizer="adam", wrapper="fsdp2"),
    Case("NUM010", "lost", optimizer="lion", wrapper="fsdp2"),
    Case("NUM010", "lost", wrapper="plain"),
    Case("NUM010", "lost-half", optimizer="lion", lr=1e-5),
    Case("NUM010", "lost-half", optimizer="sgd", wrapper="plain", lr=1e-5),
    Case("NUM011", "lost", wrapper="plain", optimizer="momentum"),
    Case("NUM012", "state", optimizer="momentum", lr=1e-2),
    Case("NUM012", "state", model="attention", optimizer="momentum", wrapper="plain", lr=1e-2),
    Case("NUM012", "state", model="convolution", optimizer="lion"),
    Case("NUM014", "positions", model="attention", wrapper="plain", lr=1e-2),
    Case("NUM014", "positions", model="attention", optimizer="sgd", lr=0.3),
    Case("NUM015", "vanish"),
    Case("NUM015", "vanish", model="attention", optimizer="sgd", wrapper="plain"),
    Case("NUM015", "vanish", model="convolution", wrapper="fsdp2"),
    Case("NUM016", "explode", optimizer="sgd", lr=1e-12),
    Case("NUM016", "explode", model="convolution", wrapper="plain", lr=1e-6),
    Case("NUM018", "region", optimizer="sgd", lr=1e-2),
    Case("NUM018", "region", model="attention", wrapper="plain", lr=1e-3),
    Case("NUM018", "region", model="convolution", lr=1e-3),
    Case("NUM020", "scaler-local", model="attention", wrapper="plain", lr=1e-3),
    Case("NUM020", "scaler-local", model="convolution", optimizer="momentum", wrapper="plain"),
    Case("NUM021", "endless", steps=40, lr=1e-3),
    Case("NUM021", "endless", model="convolution", optimizer="sgd", wrapper="plain", steps=40),
)

ORDERED = [
    pytest.param(case, id=case.name, marks=[] if number < 3 else [pytest.mark.slow])
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", ORDERED)
def test_the_fault_is_found(case):
    outcome = Launch().checked(PROGRAM, case.arguments, timeout=90)
    assert case.code in outcome.reported(), outcome.describe()


@pytest.mark.parametrize("case", ORDERED)
def test_the_same_training_without_it_is_not_accused(case):
    outcome = Launch().checked(PROGRAM, [*case.arguments, "--right"], timeout=90)
    assert outcome.exit_status == 0, outcome.describe()
    assert not outcome.reported(), outcome.describe()


def test_right_trainings_are_not_accused():
    """Types, schedules and optimizers that look like a fault and are none."""
    outcome = Launch().checked(HEALTHY, timeout=120)
    assert outcome.exit_status == 0, outcome.describe()
    assert not outcome.reported(), outcome.describe()


def test_losses_are_the_same_bit_by_bit():
    arguments = ["--fault", "lost", "--model", "attention"]
    plain, checked = Launch().plain(PROGRAM, arguments), Launch().checked(PROGRAM, arguments)
    # Ranks share a pipe, so that two lines may stand in one.
    steps = [sorted(re.findall(r"step \d+ loss \d+\.\d{6}", o.stdout)) for o in (plain, checked)]
    assert len(steps[0]) == 18
    assert steps[0] == steps[1]
