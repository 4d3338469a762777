import pytest

from distdiag.checks.col.collective_call_site_mismatch import CollectiveCallSiteMismatch
from distdiag.events.base import CallSite, Frame
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import TORCH, Job, Program, plain_site, signature
from tests.checks.verdicts import findings, serious

GATHER = "all_gather_into_tensor"


def test_shards_of_different_modules_are_an_error_with_both_names():
    job = Job()
    for rank, name in ((1, "text"), (0, "image")):
        job.call(rank, plain_site(10, module=f"_fsdp_wrapped_module.{name}"), GATHER)
    (finding,) = findings(CollectiveCallSiteMismatch, job.alignment())
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.LIKELY)
    assert finding.subjects == ("image", "text")


def test_the_one_rank_of_four_in_another_module_is_named_with_proof():
    job = Job(4)
    for rank in job.world:
        job.call(rank, plain_site(10, module="b" if rank == 1 else "a"), GATHER)
    (finding,) = findings(CollectiveCallSiteMismatch, job.alignment())
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)


def test_shards_of_one_module_may_be_gathered_from_either_branch():
    job = Job()
    for rank, line in enumerate((10, 12)):
        job.call(rank, plain_site(line, module=("_orig_mod." * rank) + "image"), GATHER)
    assert not findings(CollectiveCallSiteMismatch, job.alignment())


def test_a_rank_that_lags_by_a_call_of_its_own_is_likely_wrong():
    job = Job()
    for line in (10, 20, 21):
        job.call(0, plain_site(line), "barrier")
    for line in (20, 21, 22):
        job.call(1, plain_site(line), "barrier")
    (finding,) = findings(CollectiveCallSiteMismatch, job.alignment(seq_id=1))
    assert (finding.ranks, finding.severity) == (RankSet([0]), Severity.WARNING)
    assert finding.location.line == 10


def test_a_lag_that_a_guard_explains_is_reported_as_the_guard(tmp_path):
    p = Program(
        tmp_path,
        """
        def main():
            if rank == 0:
                dist.barrier()
            dist.barrier()  # A
            dist.barrier()  # B
        """,
    )
    inner = plain_site(p.line("if rank") + 1, file=str(p.path))
    a, b = p.site("# A"), p.site("# B")
    job = Job()
    for site in (inner, a):
        job.call(0, site, "barrier")
    for site in (a, b):
        job.call(1, site, "barrier")
    (finding,) = serious(job.alignment(1))
    assert (finding.code, finding.ranks) == ("COL009", RankSet([0]))


def take_turns(num_ranks, num_turns):
    """Every turn one rank broadcasts from line 10 and the others receive at line 20."""
    job = Job(num_ranks)
    for turn in range(num_turns):
        for rank in job.world:
            job.call(rank, plain_site(10 if turn % num_ranks == rank else 20), "broadcast")
    return job


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seq_id", range(8))
def test_ranks_that_take_turns_at_sending_are_no_more_than_a_note(num_ranks, seq_id):
    assert not serious(take_turns(num_ranks, 8).alignment(seq_id))


def join_site(line):
    """The call site of what `Join` calls at its exit, on a rank that has no more inputs."""
    join = Frame("/torch/distributed/algorithms/join.py", 300, "__exit__", user=False)
    return CallSite((TORCH, join, Frame("train.py", line, "main")))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_join_calls_for_a_rank_that_is_done_has_no_line_of_its_own(num_ranks):
    job = Job(num_ranks)
    for rank in job.world:
        job.call(rank, join_site(20) if rank == 1 else plain_site(22))
    assert not findings(CollectiveCallSiteMismatch, job.alignment())


def test_the_lines_of_the_ranks_that_have_inputs_are_compared_within_join():
    job = Job(3)
    for rank, site in enumerate((plain_site(22), join_site(20), plain_site(24))):
        job.call(rank, site)
    (finding,) = findings(CollectiveCallSiteMismatch, job.alignment())
    assert finding.grade is Grade.NOTE


CORRECT = {
    "a broadcast from both branches of an if": """
        def main():
            if rank == 0:
                dist.broadcast(values, 0)
            else:
                dist.broadcast(empty, 0)
        """,
    "the main process first": """
        def main():
            if rank != 0:
                dist.broadcast(values, 0)
            prepare()
            if rank == 0:
                dist.broadcast(empty, 0)
        """,
    "dummy passes on the rank that is done": """
        def main():
            for batch in loader:
                dist.broadcast(values, 0)
            for _ in range(missing):
                dist.broadcast(empty, 0)
        """,
    "an early return after the call": """
        def main():
            if rank == 0:
                dist.broadcast(values, 0)
                return
            dist.broadcast(empty, 0)
        """,
}


@pytest.mark.parametrize("code", CORRECT.values(), ids=CORRECT)
def test_correct_programs_get_no_more_than_a_note(code, tmp_path):
    p = Program(tmp_path, code)
    job = Job()
    for _ in range(3):
        job.every(p.site("(values"), "broadcast")
    for _ in range(3):
        job.call(0, p.site("(values"), "broadcast")
        job.call(1, p.site("(empty"), "broadcast")
        assert not serious(job.alignment())


def test_the_same_place_is_silent():
    job = Job(4)
    job.every()
    assert not findings(CollectiveCallSiteMismatch, job.alignment())


ROLES = """
    def main():
        if rank == 0:
            dist.broadcast(values, 0)
        else:
            dist.broadcast(empty, 0)
    """


@pytest.mark.parametrize(
    ("op", "root", "is_silent"),
    [
        ("broadcast", 0, True),
        ("scatter", 0, True),
        ("broadcast", 1, False),
        ("all_reduce", None, False),
    ],
)
def test_a_root_and_its_receivers_may_call_from_two_branches(op, root, is_silent, tmp_path):
    p = Program(tmp_path, ROLES)
    job = Job(3)
    for rank in job.world:
        site = p.site("(values" if rank == 0 else "(empty")
        job.call(rank, site, sign=signature(op, root=root))
    found = findings(CollectiveCallSiteMismatch, job.alignment())
    assert [finding.grade for finding in found] == [Grade.NOTE] * (not is_silent)
    assert all(finding.fix.startswith("Nothing") for finding in found)
