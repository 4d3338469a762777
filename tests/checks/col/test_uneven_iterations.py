import pytest

from distdiag.checks.col.uneven_iterations import UnevenIterations
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.findings.source import location_of
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, plain_site, signature, stacks
from tests.checks.verdicts import codes, findings

LOOP = """
    def main():
        setup()
        for batch in loader:
            loss.backward()
        dist.barrier()
        dist.all_reduce(once)
    """


def found(job, **where):
    return findings(UnevenIterations, job.alignment(**where))


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path, LOOP)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize(("leavers", "odd"), [((2,), [2]), ((0, 1, 3), [2]), ((0, 1), [0, 1])])
def test_the_fewer_side_or_those_that_left_are_odd(program, order, leavers, odd):
    job = Job(4)
    for _ in range(3):
        job.every(program.site("backward"))
    for rank in order:
        left = rank in leavers
        job.call(rank, program.site("barrier" if left else "backward"), "barrier" if left else "x")
    (finding,) = found(job)
    assert (finding.ranks, finding.grade) == (RankSet(odd), Grade.PROVEN)
    stayers, leavers = RankSet(set(range(4)) - set(leavers)).phrase(), RankSet(leavers).phrase()
    loop, here = location_of(program.frame("for batch")), location_of(program.frame("backward"))
    assert finding.location == loop
    assert finding.message == (
        f"{stayers} ran the loop at {loop} more often than {leavers}: {leavers} called x at {here} "
        f"3 times, {stayers} 4 times"
    )


def test_a_rank_that_finished_after_fewer_passes(program):
    job = Job()
    job.every(program.site("backward"))
    job.call(0, program.site("backward"))
    job.set(1, status=RankStatus.FINISHED)
    assert [f.ranks for f in found(job, trigger=Trigger.LEFT)] == [RankSet([1])]
    assert codes(job.alignment(trigger=Trigger.LEFT)) == ["COL011"]


def test_the_evidence_is_of_the_moment_of_the_call_and_not_of_what_came_later(program):
    job = Job()
    for step in range(3):
        job.every(program.site("backward"), step=step)
    point = job.call(0, program.site("backward"), step=3)
    job.call(1, program.site("barrier"), "barrier", step=3)
    other = job.group(name="other")
    for step in range(4, 9):  # asynchronous calls of the same line, in another group
        job.call(0, program.site("backward"), step=step, group=other)
        job.call(1, program.site("backward"), step=step, group=other)
    job.set(0, 1, step=9, num_batches=90, num_backwards=90)
    (finding,) = found(job, seq_id=point.collective_seq_id)
    assert "rank 1 called all_reduce" in finding.message
    assert "3 times" in finding.message
    assert [evidence.values for evidence in finding.evidence[:2]] == [{"step": 3}, {"step": 3}]
    here, there = (evidence.summary for evidence in finding.evidence[:2])
    assert here.endswith("call 4 from here")
    assert there.startswith("made 3 calls from there, then went on to barrier")


BY_STEPS = """
    def main():
        for step in range(100):
            if scaler.steps_taken % 4 == 0:
                average(model)
        dist.barrier()

    def average(model):
        for param in model.parameters():
            dist.all_reduce(param)
    """
BY_LOSS = """
    def main():
        while True:
            loss = train(model)
            dist.all_reduce(loss)
            if loss < best:
                break
        dist.barrier()
    """
BY_EPOCH = """
    def main():
        for epoch in range(9):
            for batch in loader:
                dist.all_reduce(loss)
            if loss < best:
                break
        dist.barrier()
    """
BY_TEST = """
    def main():
        while loss > best:
            dist.all_reduce(loss)
        dist.barrier()
    """


@pytest.mark.parametrize(
    ("text", "decides", "lines", "advice"),
    [
        (LOOP, "for batch", ["backward"], "Give the loop in line 3 equally many items"),
        (
            BY_STEPS,
            "if scaler",
            ["dist.all_reduce", "            average(model)"],
            "Find out why `if scaler.steps_taken % 4 == 0:` (line 3) holds on some ranks only.",
        ),
        (BY_LOSS, "if loss", ["dist.all_reduce"], "the condition `loss < best` of line 5 (MAX)"),
        (BY_EPOCH, "if loss", ["dist.all_reduce"], "the condition `loss < best` of line 5 (MAX)"),
        (BY_TEST, "while loss", ["dist.all_reduce"], "the condition `loss > best` of line 2 (MAX)"),
    ],
    ids=[
        "items",
        "a condition in the loop",
        "a way out",
        "a way out of the outer one",
        "its own condition",
    ],
)
def test_the_fix_is_about_what_ends_the_loop(tmp_path, text, decides, lines, advice):
    program, job = Program(tmp_path, text), Job()
    job.every(program.site(*lines))
    job.call(0, program.site(*lines))
    job.call(1, program.site("dist.barrier"), "barrier")
    (finding,) = found(job)
    assert finding.location == location_of(program.frame(decides))
    assert advice in finding.fix
    is_under = any("stands under" in each.summary for each in finding.evidence)
    assert is_under == (text is BY_STEPS)
    did = "called all_reduce in the loop at" if is_under else "ran the loop at"
    assert finding.message.startswith(f"rank 0 {did}")


INSIDE = """
    def main():
        for batch in loader:
            try:
                dist.all_reduce(loss)
            except {clause}:
                {ends}
        dist.barrier()
    """
BEHIND = """
    def main():
        for batch in loader:
            try:
                loss = train(batch)
            except {clause}:
                {ends}
            dist.all_reduce(loss)
        dist.barrier()
    """


@pytest.mark.parametrize(
    ("text", "ends", "is_left_out"),
    [
        (INSIDE, "continue", True),
        (INSIDE, "pass", True),
        (INSIDE, "raise", False),
        (BEHIND, "continue", True),
        (BEHIND, "loss = zero", False),
        (BEHIND, "raise", False),
    ],
)
def test_an_exception_may_have_been_caught_in_the_loop(tmp_path, text, ends, is_left_out):
    filled = text.format(clause="RuntimeError", ends=ends)
    program, job = Program(tmp_path, filled), Job()
    job.every(program.site("dist.all_reduce"))
    job.call(0, program.site("dist.all_reduce"))
    job.call(1, program.site("dist.barrier"), "barrier")
    (finding,) = found(job)
    assert finding.location == location_of(program.frame("for batch"))
    caught = [each for each in finding.evidence if "that is caught here" in each.summary]
    assert bool(caught) == is_left_out
    assert ("Look whether `except RuntimeError:` (line" in finding.fix) == is_left_out


@pytest.mark.parametrize("block", ["finally", "except ValueError"])
def test_a_loop_that_an_exception_may_have_ended(tmp_path, block):
    text = f"""
    def main():
        try:
            for batch in loader:
                dist.all_reduce(loss)
        {block}:
            dist.barrier()
    """
    program, job = Program(tmp_path, text), Job()
    job.every(program.site("dist.all_reduce"))
    job.call(0, program.site("dist.all_reduce"))
    job.call(1, program.site("dist.barrier"), "barrier")
    (finding,) = found(job)
    assert finding.location == location_of(program.frame("dist.barrier"))
    assert finding.fix.startswith("Look for an exception in the log of rank 1")


@pytest.mark.parametrize(("place", "num_findings"), [("setup()", 1), ("backward", 0)])
def test_the_stack_says_whether_a_stuck_rank_has_left_the_loop(program, place, num_findings):
    job = Job()
    job.every(program.site("backward"))
    job.call(0, program.site("backward"))
    job.set(1, stacks=stacks(1, program.frame(place)))
    assert len(found(job, trigger=Trigger.STALLED)) == num_findings


def test_a_call_outside_of_loops_is_no_iteration(program):
    job = Job()
    job.every(program.site("once"))
    job.call(0, program.site("once"))
    job.set(1, status=RankStatus.FINISHED)
    assert not found(job, trigger=Trigger.LEFT)


def test_without_the_source_the_counts_decide():
    job = Job()
    for _ in range(3):
        job.every(plain_site(10))
    job.every(plain_site(20), "barrier")
    for _ in range(3):
        job.every(plain_site(10))
    job.call(0, plain_site(10))
    job.call(1, plain_site(20), "barrier")
    (finding,) = found(job)
    assert finding.ranks == RankSet([1])


def test_a_loop_that_all_ranks_leave_together_is_silent(program):
    job = Job()
    for _ in range(3):
        job.every(program.site("backward"))
    job.every(program.site("barrier"), "barrier")
    assert not found(job)


def test_a_first_pass_that_only_one_rank_makes_is_not_called_uneven(program):
    job = Job()
    job.call(0, program.site("backward"))
    job.call(1, program.site("barrier"), "barrier")
    assert not found(job)


NESTED = """
    def average():
        for parameter in parameters:
            reduce(parameter)

    def main():
        for batch in loader:
            prepare(batch)
            average()
            store(batch)
    """


@pytest.mark.parametrize(
    ("place", "reported"),
    [("prepare", ["COL001"]), ("for batch", ["COL001"]), ("store", ["COL011"])],
)
def test_a_rank_on_its_way_to_an_inner_loop_has_not_left_it(tmp_path, place, reported):
    p = Program(tmp_path, NESTED)
    inner = p.site("reduce(", "    average()")
    job = Job()
    for _ in range(4):
        job.every(inner)
    job.call(0, inner)
    job.set(1, stacks=stacks(1, p.frame(place)), idle_s=31.0)
    assert codes(job.alignment(trigger=Trigger.STALLED)) == reported


INNER_CALL = """
    def main():
        for batch in loader:
            log(batch)
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
    """


@pytest.mark.parametrize(("op", "num_findings"), [("recv", 0), ("all_reduce", 1)])
def test_a_message_that_never_comes_holds_a_rank_up_on_its_way(tmp_path, op, num_findings):
    program = Program(tmp_path, INNER_CALL)
    job = Job()
    job.every(program.site("all_reduce"))
    job.call(0, program.site("all_reduce"))
    sign = signature(op, peer=0) if op == "recv" else signature(op)
    elsewhere = None if op == "recv" else job.group(name="other")
    job.call(1, program.site("log"), sign=sign, group=elsewhere)
    assert len(found(job, trigger=Trigger.CYCLE)) == num_findings


SWALLOWED = """
    def evaluate(task):
        dist.all_gather_object(parts, task)

    def main():
        for task in tasks:
            try:
                evaluate(task)
            except Exception as error:
                log(error)
                break
    """


def test_an_exception_that_is_caught_and_ends_the_loop_is_looked_for(tmp_path):
    program = Program(tmp_path, SWALLOWED)
    site = program.site("all_gather", "            evaluate(task)")
    job = Job()
    job.every(site)
    job.call(0, site)
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = found(job, trigger=Trigger.LEFT)
    assert finding.location == location_of(program.frame("except Exception"))
    assert finding.fix.startswith("Look for an exception that `except Exception as error:` (line ")
