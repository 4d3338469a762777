from distdiag.events.base import Phase
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, Program, library, stacks
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import serious


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("torch/serialization.py", "save"))
    assert_alone_and_right(job, "HNG007")


def test_the_phase_tells_where_there_is_no_stack(tmp_path):
    job = stuck_job(tmp_path, phase=Phase.CHECKPOINT)
    job.set(1, stacks=None)
    (finding,) = serious(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.ranks) == ("HNG007", RankSet([1]))


def test_loading_a_sample_in_the_data_loader_is_no_checkpoint(tmp_path):
    inner = library("torch/serialization.py", "load"), library("torch/utils/data/a.py", "fetch")
    assert_left_to(stuck_job(tmp_path, *inner), "HNG004")


def test_a_rank_that_saves_after_an_inner_loop_has_not_left_it_early(tmp_path):
    p = Program(
        tmp_path,
        """
        def main():
            for epoch in range(2):
                for batch in loader:
                    loss.backward()
                save(model)
        """,
    )
    job = Job()
    job.every(p.site("backward"))
    job.call(0, p.site("backward"))
    inner = library("torch/serialization.py", "save")
    job.set(1, idle_s=31.0, stacks=stacks(1, inner, p.frame("save(model)")))
    (finding,) = serious(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.ranks, finding.location.line) == ("HNG007", RankSet([1]), 5)
