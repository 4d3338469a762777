import pytest

from distdiag.checks.par.miscounted_tokens import MiscountedTokens
from distdiag.events.base import CallSite, Frame
from distdiag.findings.finding import Grade, Severity
from tests.checks.losses import losses, over, part, times
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def test_one_token_more_for_each_sequence_of_all_ranks_is_found():
    count = 4 * 18 + 4 * 4  # two ranks, two passes, four sequences in each
    passes = [part(18, 2 / count, times(2), over(count))] * 2
    (finding,) = findings(MiscountedTokens, losses(passes, passes))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "divided by 88 tokens, but sums 72" in finding.message
    assert "16 sequences" in finding.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([part(18, 1 / 22, over(22))], [part(9, 1 / 13, over(13))]),
        ([part(18, 1 / 28, over(28)), part(2, 1 / 28, over(28))], [part(9, 1 / 26, over(26))] * 2),
    ],
    ids=["of each pass", "of each rank"],
)
def test_narrower_counts_are_found(first, second):
    (finding,) = findings(MiscountedTokens, losses(first, second))
    assert finding.grade is Grade.LIKELY


@pytest.mark.parametrize(
    "each",
    [
        part(18, 1 / 18, over(18)),
        part(18, 2 / 36, times(2), over(36)),
        part(18, 1 / 21, over(21)),
        part(18, 1 / 22, over(22), num_rows=0),
        part(18, 1 / 22, over(22), kind="dense"),
        part(18, 1 / 22, times(1 / 22)),
        part(0, 0.0, over(4)),
    ],
)
def test_other_counts_are_silent(each):
    assert not findings(MiscountedTokens, losses([each], [each]))


def test_a_size_that_batches_have_anyway_is_a_note():
    each = part(40, 1 / 44, over(44))
    (finding,) = findings(MiscountedTokens, losses([each], [each]))
    assert finding.grade is Grade.NOTE


def test_only_first_labels_that_are_valid_count_more():
    def parts(divisor):
        first = part(18, 1 / divisor, over(divisor), num_first=3, num_rows=0)
        return [first], [part(11, 1 / divisor, over(divisor), num_first=0)]

    (finding,) = findings(MiscountedTokens, losses(*parts(18 + 11 + 3)))
    assert finding.grade is Grade.LIKELY
    assert "divided by 32 tokens, but sums 29" in finding.message
    assert not findings(MiscountedTokens, losses(*parts(18 + 11)))
    assert not findings(MiscountedTokens, losses(*parts(18 + 11 + 4)))


def test_full_sequences_of_one_length_are_a_note():
    each = part(40, 1 / 44, over(44), num_first=4)
    (finding,) = findings(MiscountedTokens, losses([each], [each]))
    assert finding.grade is Grade.NOTE


def test_a_count_by_a_framework_that_runs_the_loop_is_a_note():
    inner = [Frame("/site-packages/hf/trainer.py", n, "train", user=False) for n in range(3)]
    site = CallSite((*inner, *plain_site(50).frames))
    each = part(18, 1 / 22, over(22))
    (finding,) = findings(MiscountedTokens, losses([each], [each], site=site))
    assert finding.grade is Grade.NOTE


def test_a_step_whose_counts_agree_disproves_it():
    view = losses([part(18, 1 / 22, over(22))], [part(18, 1 / 22, over(22))])
    other = losses([part(18, 1 / 20, over(20))], [part(18, 1 / 20, over(20))])
    mixed = type(view)("AdamW", view.ranks, (*view.windows, *other.windows))
    assert not findings(MiscountedTokens, mixed)
