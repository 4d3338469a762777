"""Inputs and random numbers of ranks in many styles of training: what they should share."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("related.py")

pytestmark = pytest.mark.timeout(300)

FOUND = {
    "DAT006": {
        *("DDP Masks", "FSDP2 MasksOfFunctions", "DDP MasksOfAttention", "FSDP2 Noise"),
        *("DDP MasksOfParts", "DDP MasksOfWholes", "MasksByHand", "MasksOfPartsByHand"),
        "MasksWithinColumns",
    },
    "DAT008": {
        *("DDP SameSlices", "FSDP2 SameSlicesSharded", "SameSlicesByHand", "DDP SameStream"),
    },
    "DAT009": {"SplitShards"},
    "REP005": {"MasksOfCopies"},
    "REP006": {"norm.running_mean"},
}


def test_what_ranks_should_not_share_is_named_in_every_style():
    outcome = run_checked(SCRIPT, ["wrong"])
    found: dict[str, set[str]] = {}
    for alarm in outcome.alarms:
        found.setdefault(alarm["code"], set()).add(alarm["subjects"][0])
        assert alarm["ranks"] == [0, 1]
        assert alarm["location"]["file"] == str(SCRIPT)
    assert found == FOUND, outcome.describe()


def test_what_they_may_share_is_no_alarm():
    outcome = run_checked(SCRIPT, ["right"])
    assert outcome.alarms == [], outcome.describe()
    found = [each for each in outcome.report["findings"] if each["code"] in FOUND]
    notes = {each["subjects"][0] for each in found if each["subjects"]}
    may_be_meant = {"DDP CutInside", "DDP NoiseOfItsOwn", "DDP Trial", "PlannedSequence"}
    may_be_meant |= {"DDP TrialInPlace"}
    assert notes == may_be_meant, outcome.describe()
    assert FOUND.keys() <= set(outcome.report["checked"])
