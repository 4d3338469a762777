import pytest

from distdiag.engine.logged import (
    CodesAligner,
    MemoryAligner,
    NumbersAligner,
    ParameterAligner,
    WarningAligner,
)
from distdiag.events.base import CallSite, Frame
from distdiag.events.logged import CodesChosen, Logged, LossNumbers, MemoryUse, Warned
from distdiag.views.logged import CodebookView, LoggedView, LossView, MemoryView, WarningView
from tests.checks.feeds import model_fed
from tests.checks.numbers import SITE, one_pass, window
from tests.checks.streams import event_of
from tests.engine.aligned import aligned, broken

OTHER = CallSite((Frame("train.py", 9, "train"),))


def logged(rank, step, value, site=None):
    fields = {"logger": "distdiag.log", "values": (("kl", value),), "num_updates": step}
    return event_of(Logged, rank, **fields, **({"site": site} if site else {}))


class TestNumbers:
    def test_values_of_a_name_stand_in_their_order_with_the_first_place(self):
        events = [logged(0, 0, 0.5, SITE), logged(1, 0, 0.25, SITE), logged(0, 1, 0.75)]
        (view,) = aligned(NumbersAligner, *events).views
        assert isinstance(view, LoggedView)
        assert view.by_rank[0]["kl"].points == ((0, 0.5), (1, 0.75))
        assert view.by_rank[0]["kl"].site == SITE
        assert view.by_rank[1]["kl"].values == (0.25,)

    def test_passes_belong_to_the_place_that_was_named_last(self):
        events = [one_pass(0, site=SITE), one_pass(0, site=OTHER), one_pass(1), one_pass(2)]
        views = aligned(NumbersAligner, *events).views
        assert [type(view) for view in views] == [LossView, LossView]
        assert [len(view.by_rank[0]) for view in views] == [1, 3]
        assert len({view.supersedes for view in views}) == 2

    def test_checks_look_when_values_have_doubled(self):
        events = [one_pass(n, site=SITE) for n in range(130)]
        views = aligned(NumbersAligner, *events).views
        assert [len(view.by_rank[0]) for view in views] == [64, 128, 130]

    @pytest.mark.parametrize(
        ("batches", "varied"),
        [("aa", ()), ("ab", (1,)), (("a", ""), ()), ((), ())],
        ids=["one", "two", "unread", "none"],
    )
    def test_ranks_whose_model_is_given_different_batches_are_known(self, batches, varied):
        feeds = [model_fed(1, n, inputs=(digest,)) for n, digest in enumerate(batches)]
        other = model_fed(1, 2, model="Other", inputs=("c",))
        (view,) = aligned(NumbersAligner, *feeds, other, one_pass(0, site=SITE)).views
        assert view.varied == frozenset(varied)

    def test_why_there_was_nothing(self):
        nothing = aligned(NumbersAligner)
        assert nothing.why(LoggedView) == "no number was logged by a known logger"
        assert nothing.why(LossView) == "no backward pass began at one number"
        assert aligned(NumbersAligner, only_start=True).why(LossView).startswith("the light")
        blind = aligned(NumbersAligner, broken(1, "loss-numbers"))
        assert blind.why(LossView) == "the losses of rank 1 are not observed"


def test_windows_of_a_codebook_stand_in_their_order():
    views = aligned(CodesAligner, *[window(n, 5) for n in range(6)]).views
    assert [len(view.by_rank[0]) for view in views] == [4, 6]
    assert aligned(CodesAligner).why(CodebookView)
    assert CodesAligner.needs == (CodesChosen,)


def test_ranks_with_one_warning_are_shown_together():
    events = [
        event_of(Warned, rank, topic="x", text="t", category="c", site=site)
        for rank, site in ((1, SITE), (0, SITE), (1, SITE), (0, OTHER))
    ]
    views = aligned(WarningAligner, *events).views
    assert [sorted(view.by_rank) for view in views] == [[1], [0, 1], [0]]
    assert views[0].supersedes == views[1].supersedes != views[2].supersedes
    assert aligned(WarningAligner).why(WarningView)


def test_of_one_step_the_last_sample_of_memory_counts():
    def sample(step, used):
        return event_of(MemoryUse, memory="host", used_bytes=used, limit_bytes=9, step=step)

    (view,) = aligned(MemoryAligner, sample(8, 1), sample(8, 2), sample(16, 3)).views
    assert [each.used_bytes for each in view.by_rank[0]] == [2, 3]
    assert aligned(MemoryAligner).why(MemoryView)


def test_what_each_aligner_says_is_known():
    for kind in (NumbersAligner, CodesAligner, WarningAligner, MemoryAligner, ParameterAligner):
        assert aligned(kind).gaps.keys() == set(kind.builds)
    assert LossNumbers in NumbersAligner.needs
