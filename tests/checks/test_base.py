"""The contract of a check: which views it is shown, and where the texts of a finding come from."""

import pytest

from distdiag.checks.base import Check, sections
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.base import View


class Gradients(View):
    """One view."""


class Losses(View):
    """Another view."""


class Stale(Check[Gradients]):
    """A gradient is that of an earlier step.

    ## What you see
    The loss falls
    for a while.

    How it comes about is no part of `why`.

    ## Example
    ```
    loss.backward()
    ```

    ## How to fix
    Call `zero_grad()`
    before the backward pass.

    Changes: The gradient
    of each step.

    Leaves: What was saved.

    ## When it is not a defect
    Gradients are accumulated on purpose.

    Say so in the configuration.
    """

    code = "XXX001"
    name = "stale"
    severity = Severity.ERROR

    def check(self, view):
        yield self.finding("it is stale", ranks=RankSet([1]), evidence=())


class StaleLoss(Stale):
    """A subclass with texts of its own.

    ## What you see
    Nothing.
    """

    fix = "Do something else."


TEXTS = {
    "why": "The loss falls for a while.",
    "fix": "Call `zero_grad()` before the backward pass.",
    "fix_changes": "The gradient of each step.",
    "fix_leaves": "What was saved.",
    "disproof": "Gradients are accumulated on purpose.",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_finding_says_what_the_docstring_says(name):
    (finding,) = Stale().check(Gradients())
    assert getattr(finding, name) == getattr(Stale, name) == TEXTS[name]
    assert (finding.code, finding.name, finding.severity) == ("XXX001", "stale", Severity.ERROR)


def test_an_attribute_of_the_class_goes_before_its_docstring_and_that_before_its_base():
    assert StaleLoss.fix == "Do something else."
    assert StaleLoss.why == "Nothing."
    assert StaleLoss.disproof == TEXTS["disproof"]


def test_a_specific_text_goes_before_all():
    finding = Stale().finding("m", ranks=RankSet([0]), evidence=(), fix="Call it in line 7.")
    assert (finding.fix, finding.why) == ("Call it in line 7.", TEXTS["why"])


def test_a_note_is_information_whatever_the_check_says():
    values = {"ranks": RankSet([0]), "evidence": ()}
    assert Stale().finding("m", grade=Grade.NOTE, **values).severity is Severity.INFO
    assert Stale().finding("m", severity=Severity.WARNING, **values).severity is Severity.WARNING


def test_sections_are_found_by_their_titles():
    assert sections(Stale.__doc__)["Example"] == "```\nloss.backward()\n```"
    assert sections("No page.") == {}


class Both(Check[Gradients | Losses]):
    """Two views."""


class OfBoth(Both):
    """What it inherits."""


class Bare(Check):
    """No view."""


@pytest.mark.parametrize(
    ("check", "views"),
    [
        (Stale, (Gradients,)),
        (StaleLoss, (Gradients,)),
        (Both, (Gradients, Losses)),
        (OfBoth, (Gradients, Losses)),
        (Bare, ()),
    ],
)
def test_the_brackets_name_the_views(check, views):
    assert check.views == views
