"""Trainings whose numbers are wrong are found, and none that is right is accused."""

from pathlib import Path

import pytest

from tests.integration.healthy_numbers import HEALTHY
from tests.integration.healthy_numbers import program as healthy_program
from tests.integration.launch import run_checked
from tests.integration.number_programs import FAULTS, program

PROGRAMS_PER_FAULT = 4
LEAST_FOUND = 0.95

VARIANCE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
num_samples = 1 if dist.get_rank() == 1 else 4
for step in range(3):
    rewards = torch.randn(num_samples)
    advantages = rewards / (rewards.std().nan_to_num(1.0) + 1e-6)
    loss = (model(torch.randn(num_samples, 4)).squeeze(1) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
del model
dist.destroy_process_group()
"""


def found_in(folder: Path, text: str) -> set[str]:
    """The codes of the findings above info of a training of one process."""
    script = folder / "train.py"
    script.write_text(text)
    outcome = run_checked(script, nproc=0)
    assert outcome.report is not None and "Traceback" not in outcome.stderr, outcome.describe()
    return {finding["code"] for finding in outcome.alarms}


def test_the_variance_of_one_sample_names_rank_line_and_fix(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(VARIANCE.lstrip())
    outcome = run_checked(script, nproc=2)
    found = outcome.reported()["NUM040"]
    lines = script.read_text().splitlines()
    assert found["ranks"] == [1]
    assert ".std()" in lines[found["location"]["line"] - 1]
    assert "variance or standard deviation of one sample" in found["message"]
    assert "degrees of freedom is <= 0" in found["evidence"][0]["summary"]
    assert "two samples" in found["fix"]


def test_a_policy_that_gets_no_gradient(tmp_path: Path) -> None:
    one = program("policy", 0)
    assert found_in(tmp_path, one.wrong) == {"NUM035"}
    assert found_in(tmp_path, one.right) == set()


def test_no_two_programs_are_alike() -> None:
    written = [program(fault, n) for fault in FAULTS for n in range(PROGRAMS_PER_FAULT)]
    assert len(written) >= 30
    texts = [text for one in written for text in (one.wrong, one.right)]
    assert len(set(texts)) == len(texts)
    for text in (*texts, *map(healthy_program, HEALTHY)):
        compile(text, "train.py", "exec")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_wrong_numbers_are_found_and_right_ones_are_not_accused(tmp_path: Path) -> None:
    written = [program(fault, n) for fault in FAULTS for n in range(PROGRAMS_PER_FAULT)]
    missed = [f"{p.fault} {p.number}" for p in written if p.code not in found_in(tmp_path, p.wrong)]
    accused = {f"{p.fault} {p.number}": found_in(tmp_path, p.right) for p in written}
    assert {name: codes for name, codes in accused.items() if codes} == {}
    assert len(missed) <= (1 - LEAST_FOUND) * len(written), missed


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_correct_training_is_not_accused(tmp_path: Path, name: str) -> None:
    assert found_in(tmp_path, healthy_program(name)) == set()
