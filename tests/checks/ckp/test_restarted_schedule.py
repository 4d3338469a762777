import pytest
import torch
from torch.optim import lr_scheduler

from distdiag.checks.ckp.restarted_schedule import RestartedSchedule
from distdiag.engine.models.loads import LoadAligner
from distdiag.events.checkpoints import ScheduleRestarted
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.probes.checkpoints.loads import Schedules
from tests.checks.streams import event_of, plain_site
from tests.engine.aligned import aligned


def findings(*same):
    events = [
        event_of(
            ScheduleRestarted,
            rank,
            optimizer="AdamW",
            schedule="StepLR",
            saved_step=40,
            same=same,
            site=plain_site(50),
        )
        for rank in (0, 1)
    ]
    return aligned(LoadAligner, *events, checks=[RestartedSchedule()]).findings


def test_a_schedule_that_begins_anew_is_a_warning():
    (finding,) = findings("gamma", "step_size")
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert (
        "AdamW resumes, but its StepLR starts from the beginning: the checkpoint has its state "
        "at step 40" in (finding.message)
    )
    assert finding.location.line == 50


def test_a_function_may_be_another_one():
    (finding,) = findings()
    assert finding.grade is Grade.NOTE


def optimizer_with(schedule, **settings):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return optimizer, schedule(optimizer, **settings)


def restarted(saved, again, *, advances=0):
    """What is said of a schedule, where the other was read from a checkpoint at step 3."""
    schedules = Schedules()
    _, first = optimizer_with(saved[0], **saved[1])
    for _ in range(3):
        first.step()
    schedules.read({"trainer": [first.state_dict()]})
    optimizer, second = optimizer_with(again[0], **again[1])
    schedules.made(second)
    for _ in range(advances):
        second.step()
    return schedules.restarted(optimizer)


HALVING = (lr_scheduler.StepLR, {"step_size": 2})
COSINE = (lr_scheduler.CosineAnnealingLR, {"T_max": 8})


@pytest.mark.filterwarnings("ignore")
def test_the_same_settings_are_needed_and_the_beginning():
    fields = restarted(HALVING, HALVING)
    assert (fields["schedule"], fields["saved_step"]) == ("StepLR", 3)
    assert set(fields["same"]) >= {"gamma", "step_size"}
    assert not restarted(HALVING, (lr_scheduler.StepLR, {"step_size": 4}))
    assert not restarted(COSINE, (lr_scheduler.CosineAnnealingLR, {"T_max": 9}))
    assert not restarted(COSINE, HALVING)
    assert not restarted(COSINE, COSINE, advances=2)


@pytest.mark.filterwarnings("ignore")
def test_functions_are_no_settings():
    warming = (lr_scheduler.LambdaLR, {"lr_lambda": lambda step: 1 / (1 + step)})
    assert restarted(warming, warming)["same"] == ()
