import pytest

from distdiag.checks.col.collective_shape_mismatch import CollectiveShapeMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.findings.source import location_of
from tests.checks.streams import Job, Program, signature
from tests.checks.verdicts import findings, serious


def sizes(*numels):
    return tuple((n,) for n in numels)


def job_of(*signatures):
    job = Job(len(signatures))
    for rank in sorted(job.world, reverse=True):
        job.call(rank, sign=signatures[rank])
    return job


def sign(op, inputs=(), outputs=(), **values):
    return signature(op, input_sizes=sizes(*inputs), output_sizes=sizes(*outputs), **values)


def split(rows, inputs, outputs):
    return signature(
        "all_to_all_single",
        input_sizes=((sum(inputs) or rows, 3),),
        output_sizes=((sum(outputs) or rows, 3),),
        input_splits=inputs,
        output_splits=outputs,
    )


FITTING = {
    "all_reduce of equal tensors": [sign("all_reduce", [4], [4])] * 2,
    "uneven all_gather": [sign("all_gather", [2], [2, 5]), sign("all_gather", [5], [2, 5])],
    "gather": [sign("gather", [2], [2, 3], root=0), sign("gather", [3], root=0)],
    "scatter": [sign("scatter", [2, 3], [2], root=0), sign("scatter", [], [3], root=0)],
    "uneven reduce_scatter": [
        sign("reduce_scatter", [2, 3], [2]),
        sign("reduce_scatter", [2, 3], [3]),
    ],
    "uneven all_to_all": [
        sign("all_to_all", [1, 2], [1, 3]),
        sign("all_to_all", [3, 4], [2, 4]),
    ],
    "even all_to_all_single": [split(4, (), ())] * 2,
    "uneven all_to_all_single": [split(0, (1, 2), (1, 3)), split(0, (3, 4), (2, 4))],
    "an all_to_all_single of nothing": [split(0, (0, 0), (0, 2)), split(0, (2, 1), (0, 1))],
    "barriers": [sign("barrier", [1]), sign("barrier")],
    "an operation that is not known": [sign("mystery", [1]), sign("mystery", [9])],
}


@pytest.mark.parametrize("signatures", FITTING.values(), ids=FITTING)
def test_sizes_that_fit_are_silent(signatures):
    job = job_of(*signatures)
    assert not findings(CollectiveShapeMismatch, job.alignment())
    assert not serious(job.alignment())


CONTRADICTING = {
    "all_reduce": [sign("all_reduce", [4]), sign("all_reduce", [5])],
    "all_reduce of lists": [
        sign("all_reduce_coalesced", [4, 1]),
        sign("all_reduce_coalesced", [4, 2]),
    ],
    "all_gather_into_tensor": [
        sign("all_gather_into_tensor", [4], [8]),
        sign("all_gather_into_tensor", [3], [6]),
    ],
    "all_gather": [sign("all_gather", [2], [2, 2]), sign("all_gather", [3], [3, 3])],
    "gather": [sign("gather", [2], [2, 2], root=0), sign("gather", [3], root=0)],
    "scatter": [sign("scatter", [2, 2], [2], root=0), sign("scatter", [], [3], root=0)],
    "all_to_all_single": [split(0, (1, 2), (1, 3)), split(0, (1, 4), (2, 4))],
}


@pytest.mark.parametrize("signatures", CONTRADICTING.values(), ids=CONTRADICTING)
def test_sizes_that_do_not_fit_name_both_of_two_ranks(signatures):
    (finding,) = findings(CollectiveShapeMismatch, job_of(*signatures).alignment())
    assert finding.severity is Severity.ERROR
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_the_uneven_last_batch_of_one_of_four_names_that_rank(op):
    def of(numel):
        return sign(op, [numel], [numel] * 4 if op == "all_gather" else [numel])

    (finding,) = findings(CollectiveShapeMismatch, job_of(of(8), of(8), of(8), of(5)).alignment())
    assert (finding.ranks, finding.grade) == (RankSet([3]), Grade.PROVEN)


def test_the_message_says_what_was_sent_and_what_expected():
    (finding,) = findings(CollectiveShapeMismatch, job_of(*CONTRADICTING["gather"]).alignment())
    assert "rank 1 sends 3 elements to rank 0, which expects 2" in finding.message


def test_other_shapes_of_equally_many_elements_are_a_note():
    a, b = signature(input_sizes=((4, 2),)), signature(input_sizes=((8,),))
    (finding,) = findings(CollectiveShapeMismatch, job_of(a, b).alignment())
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize(("numel", "num_findings"), [(4, 0), (6, 1)])
def test_a_message_must_fit_its_receive(numel, num_findings):
    job = Job()
    send = job.call(0, sign=sign("send", [4], peer=1))
    receive = job.call(1, sign=sign("recv", [], [numel], peer=0))
    found = findings(CollectiveShapeMismatch, job.message(send, receive))
    assert len(found) == num_findings


TOWER = """
def forward(ids, pixels):
    if pixels is not None:
        seen = vision(pixels)
    return lm(ids)
"""


def test_calls_of_two_lines_are_told_apart_and_the_condition_is_named(tmp_path):
    p = Program(tmp_path, TOWER)
    job = Job()
    job.call(0, p.site("vision(pixels)"), sign=sign("all_gather_into_tensor", [240], [480]))
    job.call(1, p.site("lm(ids)"), sign=sign("all_gather_into_tensor", [932], [1864]))
    (finding,) = findings(CollectiveShapeMismatch, job.alignment())
    assert "these are different calls: rank 0 at train.py:3, rank 1 at train.py:4" in (
        finding.message.replace(f"{tmp_path}/", "")
    )
    assert finding.location == location_of(p.frame("if pixels"))
    assert finding.fix.startswith("Find out why `if pixels is not None:` (line 2) is decided")


def test_calls_of_two_lines_without_a_condition_have_other_sizes(tmp_path):
    p = Program(tmp_path, "def main():\n    gather(a)\n    gather(b)\n")
    job = Job()
    job.call(0, p.site("gather(a)"), sign=sign("all_gather_into_tensor", [240], [480]))
    job.call(1, p.site("gather(b)"), sign=sign("all_gather_into_tensor", [932], [1864]))
    (finding,) = findings(CollectiveShapeMismatch, job.alignment())
    assert "different calls" not in finding.message
    assert finding.fix.startswith("Make the sizes equal")
