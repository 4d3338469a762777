"""What optimizers, buffers and checkpoints are given wrongly, and what only looks so."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("write_faults.py")

pytestmark = pytest.mark.timeout(300)

WRONG = {
    "switched": ("SHD024", "body.weight"),
    "chosen": ("SHD024", "extra.weight"),
    "not_walked": ("SHD025", "last.bias"),
    "not_reset": ("SHD025", "last.counts"),
    "not_reduced": ("SHD025", "last.bias"),
    "own_halves": ("CKP008", "model.extra.weight"),
    "ignored_by_a_wrapped_name": ("SHD014", "module.extra.weight"),
    "schedule_dropped": ("CKP009", "StepLR"),
    "parted_by_to_empty": ("SHD009", "head.weight"),
    "parted_by_assign": ("SHD009", "head.weight"),
    "parted_by_a_plan": ("SHD009", "head.weight"),
    "copied": ("SHD001", "body.weight"),
    "emptied": ("REP002", "extra.weight"),
}
RIGHT = (
    *("own_part", "head_alone", "by_hand", "tasks", "walked", "partly_frozen", "balanced"),
    *("own_saved_by_all", "own_gathered", "copies_left_out"),
    *("teacher", "global_names", "own_statistics", "drifting"),
    *(
        "tied_again",
        "tied_by_fsdp",
        "parted_on_purpose",
        "ignored_on_one_rank",
        "schedule_loaded",
        "schedule_replaced",
        "tied_after_a_plan",
        "copied_by_hand",
        "copied_for_a_meta_step",
        "copied_in_full_precision",
        "emptied_and_filled",
    ),
)
CODES = {"REP002", "SHD001", "SHD009", "SHD014", "SHD024", "SHD025", "CKP002", "CKP008", "CKP009"}


def checked(tmp_path, cases, codes=frozenset(CODES - {"CKP009"})):
    outcome = run_checked(SCRIPT, [str(tmp_path), *cases])
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = outcome.report["findings"]
    assert "DIA003" not in {finding["code"] for finding in found}, outcome.describe()
    # What is loaded in the middle of a run tells of itself only when it is wrong: CKP009.
    assert set(outcome.report["checked"]) >= set(codes)
    return found


def test_what_is_written_wrongly_is_reported(tmp_path):
    told = [
        (finding["code"], finding["subjects"][0], finding["severity"])
        for finding in checked(tmp_path, WRONG)
        if finding["code"] in CODES
    ]
    severities = dict.fromkeys(("CKP009", "SHD014", "SHD025"), "warning")
    wanted = [(code, name, severities.get(code, "error")) for code, name in WRONG.values()]
    assert sorted(told) == sorted(wanted)


def test_own_parameters_that_one_rank_alone_saves_are_reported(tmp_path):
    (finding,) = checked(tmp_path, ["own_saved_by_one"], ["CKP002"])
    assert (finding["code"], finding["ranks"]) == ("CKP002", [1])
    assert finding["subjects"] == ["extra.weight", "extra.bias"]


def test_what_only_looks_so_is_silent(tmp_path):
    found = checked(tmp_path, RIGHT)
    assert [each for each in found if each["severity"] != "info" or each["code"] in CODES] == []
