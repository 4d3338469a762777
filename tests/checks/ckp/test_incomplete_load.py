import pytest

from distdiag.checks.ckp.incomplete_load import IncompleteLoad
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.loads import loaded
from tests.checks.streams import together
from tests.checks.verdicts import findings

PREFIX = {
    "num_loaded": 0,
    "num_missing": 10,
    "num_untouched": 10,
    "missing_bytes": 1000,
    "num_renamed": 10,
    "renamed_bytes": 1000,
    "given_prefix": "module.",
}


def found(*ranks, **values):
    loads = [loaded(rank, **values) for rank in ranks or (0, 1)]
    return findings(IncompleteLoad, together(*loads))


def test_a_prefix_for_which_nothing_fits_is_named():
    (finding,) = found(**PREFIX)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.PROVEN)
    assert finding.ranks == RankSet([0, 1])
    assert "under `module.` and the model under no prefix" in finding.message
    assert "`module.`" in finding.fix


@pytest.mark.parametrize(
    "values",
    [
        {"num_loaded": 0, "num_missing": 10, "missing_bytes": 1000},
        {"holes": ("layers.1.weight",)},
        {"is_refused": True},
        {"num_renamed": 2, "renamed_bytes": 300},
    ],
)
def test_what_no_new_head_explains_is_a_warning(values):
    (finding,) = found(**values)
    assert finding.severity is Severity.WARNING


def test_a_strict_load_that_was_refused_is_no_matter_of_a_renamed_head():
    """Also where some of the names would meet under another prefix."""
    renamed = {"num_renamed": 2, "renamed_bytes": 100, "given_prefix": "a.", "wanted_prefix": "b."}
    (finding,) = found(is_refused=True, missing_bytes=900, num_missing=8, **renamed)
    assert finding.severity is Severity.WARNING
    assert "a strict load failed, and the program caught the error and went on" in finding.message


def test_a_new_head_is_a_note():
    (finding,) = found()
    assert finding.grade is Grade.NOTE
    assert finding.message.startswith("2 of 10 tensors of Net (100 bytes of 1000 bytes)")


def test_a_head_of_another_name_and_the_same_shape_is_a_note():
    (finding,) = found(num_renamed=2, renamed_bytes=100, given_prefix="fc.", wanted_prefix="head.")
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize("values", [{"missing_bytes": 900}, {"at_step": 5, "is_refused": True}])
def test_an_adapter_and_a_load_amid_the_training_are_silent(values):
    assert not found(**values)


def test_a_rank_that_left_out_something_else_has_a_finding_of_its_own():
    both = findings(IncompleteLoad, together(loaded(0), loaded(1, **PREFIX)))
    assert [(f.ranks, f.severity) for f in both] == [
        (RankSet([0]), Severity.INFO),
        (RankSet([1]), Severity.WARNING),
    ]
