from distdiag.checks.bar.deleted_or_renamed_while_used import DeletedOrRenamedWhileUsed
from distdiag.events.ranks import RankSet
from tests.checks.races import access, alarms, race
from tests.checks.streams import Program, plain_site


def removed(change="remove-tree", use="read", site=None):
    return race(
        "use-of-removed",
        [access(0, change, plain_site(9), "/data/cache")],
        [access(1, use, site or plain_site(5), "/data/cache/a.pt")],
    )


def test_the_rank_that_removes_is_named_with_both_lines():
    (finding,) = alarms(DeletedOrRenamedWhileUsed, removed())
    assert finding.ranks == RankSet([0])
    assert "rank 0 removes the tree cache at train.py:9" in finding.message
    assert "rank 1 reads a.pt at train.py:5" in finding.message


def test_a_user_that_copes_with_absence_is_no_defect(tmp_path):
    program = Program(tmp_path, "try:\n    load()\nexcept FileNotFoundError:\n    pass\n")
    assert not alarms(DeletedOrRenamedWhileUsed, removed(site=program.site("load()")))


def test_ranks_that_all_remove_are_one_finding():
    both = [access(rank, "remove", plain_site(9)) for rank in (0, 1)]
    (finding,) = alarms(DeletedOrRenamedWhileUsed, race("use-of-removed", both, both))
    assert finding.ranks == RankSet([0, 1])


def test_ranks_that_all_remove_what_may_be_gone_are_no_defect(tmp_path):
    program = Program(tmp_path, "shutil.rmtree(cache, ignore_errors=True)\n")
    both = [access(rank, "remove-tree", program.site("rmtree")) for rank in (0, 1)]
    assert not alarms(DeletedOrRenamedWhileUsed, race("use-of-removed", both, both))
