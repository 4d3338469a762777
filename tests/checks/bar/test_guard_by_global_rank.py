from distdiag.checks.bar.guard_by_global_rank import GuardByGlobalRank
from distdiag.events.ranks import RankSet
from distdiag.views.files import MissingFile
from tests.checks.races import access, missing_file
from tests.checks.streams import Program, plain_site
from tests.checks.verdicts import findings


def judged(site):
    made = access(0, "write", site, "/node0/index.npy").event
    raised = missing_file(2, "/node1/index.npy")
    shown = MissingFile(2, "/node1/index.npy", raised, {0: made})
    return findings(GuardByGlobalRank, shown)


def test_a_file_that_the_guard_gave_to_one_node_only(tmp_path):
    program = Program(tmp_path, "if rank == 0:\n    build()\nread()\n")
    (finding,) = judged(program.site("build()"))
    assert (finding.ranks, finding.location.line) == (RankSet([0]), program.line("if rank == 0"))
    assert finding.subjects == ("/node1/index.npy", "/node0/index.npy")
    assert "FileNotFoundError" in finding.evidence[0].summary


def test_without_a_guard_the_name_is_a_coincidence():
    assert not judged(plain_site(3))
