from distdiag.checks.dat.missing_part import MissingPart
from distdiag.events.ranks import RankSet
from distdiag.views.files import MissingFile
from tests.checks.races import access, missing_file
from tests.checks.streams import Program, plain_site
from tests.checks.verdicts import findings

NEEDED = "/d/part1.pt"


def judged(site, namesakes=()):
    made = access(0, "write", site, "/d/part0.pt").event
    raised = missing_file(1, NEEDED)
    others = {rank: made for rank in namesakes}
    return findings(MissingPart, MissingFile(1, NEEDED, raised, others, {0: made}))


def test_a_part_that_only_others_wrote_is_named(tmp_path):
    program = Program(tmp_path, "if rank == 0:\n    save()\nload()\n")
    (finding,) = judged(program.site("save()"))
    assert finding.ranks == RankSet([1])
    assert "rank 1 needs /d/part1.pt" in finding.message
    assert "rank 0 wrote part0.pt" in finding.message
    assert "since `if rank == 0:` lets no other rank write" in finding.message


def test_a_file_of_that_name_elsewhere_is_another_matter():
    assert not judged(plain_site(3), namesakes=[0])
