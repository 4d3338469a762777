from distdiag.checks.bar.listing_while_written import ListingWhileWritten
from distdiag.events.base import CallSite, Frame
from distdiag.events.ranks import RankSet
from tests.checks.races import access, alarms, race
from tests.checks.streams import plain_site


def listed(site=None, **values):
    return race(
        "list-of-changed",
        [access(0, "rename", plain_site(3), "/out/config.json", origin="/out/config.tmp")],
        [access(1, "list", site or CallSite(plain_site(8).user_frames), "/out", **values)],
    )


def test_a_listing_whose_entries_are_used_names_the_lister():
    (finding,) = alarms(ListingWhileWritten, listed(is_followed=True))
    assert finding.ranks == RankSet([1])
    assert "rank 1 lists out at train.py:8" in finding.message
    assert "whether config.json is listed depends on timing" in finding.message


def test_a_listing_that_leads_to_nothing_of_the_others_is_no_defect():
    assert not alarms(ListingWhileWritten, listed())


def test_a_listing_that_a_package_makes_for_itself_is_its_own_affair():
    frame = Frame("/venv/lib/site-packages/logger/versions.py", 3, "next_version", user=False)
    site = CallSite((frame, *plain_site(8).user_frames))
    assert not alarms(ListingWhileWritten, listed(site, is_followed=True))
    library = Frame("/usr/lib/python3.11/glob.py", 3, "glob", user=False)
    site = CallSite((library, *plain_site(8).user_frames))
    assert alarms(ListingWhileWritten, listed(site, is_followed=True))
