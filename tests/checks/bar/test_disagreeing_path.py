from distdiag.checks.bar.disagreeing_path import DisagreeingPath
from distdiag.checks.bar.guard_by_global_rank import GuardByGlobalRank
from distdiag.events.ranks import RankSet
from distdiag.views.files import MissingFile
from tests.checks.races import access, missing_file
from tests.checks.streams import Program, plain_site
from tests.checks.verdicts import findings


def missing(needed, made, *, site=None, folders=()):
    """Rank 1 needs a file that rank 0 has written elsewhere; ranks made their folder at a line."""
    wrote = access(0, "write", site or plain_site(9), made, written=made).event
    above = {
        rank: access(rank, "make-dir", plain_site(line), f"/{rank}", written=f"{rank}").event
        for rank, line in folders
    }
    return MissingFile(1, needed, missing_file(1, needed), {0: wrote}, {}, needed, above)


def test_a_file_beside_in_a_folder_with_other_numbers():
    shown = missing("runs/1027/a.json", "runs/1028/a.json", folders=[(0, 4), (1, 4)])
    (finding,) = findings(DisagreeingPath, shown)
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 4)
    assert "rank 1 needs runs/1027/a.json" in finding.message
    assert "rank 0 wrote it as runs/1028/a.json" in finding.message


def test_random_names_that_ranks_made_at_one_place():
    paths = "runs/qx/a.json", "runs/zy/a.json"
    assert findings(DisagreeingPath, missing(*paths, folders=[(0, 4), (1, 4)]))
    assert not findings(DisagreeingPath, missing(*paths, folders=[(0, 4), (1, 5)]))
    assert not findings(DisagreeingPath, missing(*paths))


def test_another_file_with_a_common_name_is_silent():
    assert not findings(DisagreeingPath, missing("out/3/config.json", "data/4/config.json"))
    assert not findings(DisagreeingPath, missing("out/config.json", "out/1/config.json"))


def test_a_guard_is_not_at_fault_where_the_names_differ(tmp_path):
    site = Program(tmp_path, "if rank == 0:\n    build()\nread()\n").site("build()")
    assert not findings(GuardByGlobalRank, missing("r/1/a", "r/2/a", site=site))
    assert findings(GuardByGlobalRank, missing("r/1/a", "r/1/a", site=site))
