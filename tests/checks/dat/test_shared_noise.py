import pytest

from distdiag.checks.dat.shared_noise import SharedNoise
from distdiag.events.base import CallSite, Frame
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import draw, mask, model_fed, related
from tests.checks.streams import plain_site


def drawing(number, *draws, **values):
    """Both ranks make these draws."""
    return [model_fed(rank, number, draws=draws, **values) for rank in (0, 1)]


def judged(*passes, **values):
    return related(SharedNoise, *passes, **values)


def test_noise_from_generators_in_one_state_is_named():
    (finding,) = judged(drawing(1, draw("a")), drawing(2, draw("b")))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.location.line == 30
    assert "torch.randn_like of [4, 8] for DDP Net draws the same numbers" in finding.message


def test_noise_beside_batches_of_a_data_loader_is_named():
    assert judged(*[drawing(n, draw(str(n), inside=False)) for n in (1, 2)])


def test_samples_that_a_generator_of_its_own_yields_are_no_noise():
    passes = []
    for number in (1, 2):
        own = [draw(f"own {rank} {number}", inside=False, given=True) for rank in (0, 1)]
        noise = draw(f"noise {number}", line=33)
        passes.append([model_fed(rank, number, draws=(own[rank], noise)) for rank in (0, 1)])
    (finding,) = judged(*passes)
    assert finding.location.line == 33


@pytest.mark.parametrize(
    ("values", "is_shared_work"),
    [({"batch": ""}, False), ({}, True)],
    ids=["samples may be drawn", "ranks may share samples"],
)
def test_where_it_may_be_meant_it_is_a_note(values, is_shared_work):
    inside = is_shared_work
    passes = [drawing(n, draw(str(n), inside=inside), **values) for n in (1, 2)]
    (finding,) = judged(*passes, is_shared_work=is_shared_work)
    assert finding.severity is Severity.INFO


def masking(number, state="", activation="", **values):
    """Both ranks draw a mask; if nothing is told, from one state for activations of their own."""
    states = [(state or "s {n}").format(n=number, r=rank) for rank in (0, 1)]
    given = [(activation or "a {n} {r}").format(n=number, r=rank) for rank in (0, 1)]
    return [
        model_fed(rank, number, draws=(mask(states[rank], given[rank]),), **values)
        for rank in (0, 1)
    ]


def test_dropout_with_one_mask_for_different_samples_is_named_with_its_module_and_the_seed():
    seeded = plain_site(3)
    (finding,) = judged(*[masking(n, seeded=seeded) for n in (1, 2)])
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.message.startswith(
        "torch.dropout of [4, 8] in drop Dropout of DDP Net draws the same numbers on ranks 0-1, "
        "whose activations differ, in 2 steps"
    )
    assert "drop" in finding.subjects
    assert any("torch.manual_seed was called last by" in e.summary for e in finding.evidence)


def test_a_seed_that_a_library_sets_by_itself_is_a_note():
    frames = [Frame("/lib/random.py", 9, "set_seed", False), *plain_site(3).frames]
    (asked,) = judged(*[masking(n, seeded=CallSite(tuple(frames))) for n in (1, 2)])
    frames.insert(1, Frame("/lib/trainer.py", 80, "train", False))
    (given,) = judged(*[masking(n, seeded=CallSite(tuple(frames))) for n in (1, 2)])
    assert (asked.severity, given.severity) == (Severity.WARNING, Severity.INFO)


def test_dropout_is_named_although_ranks_exchange_activations():
    (finding,) = judged(*[masking(n) for n in (1, 2)], is_shared_work=True)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "passes",
    [
        [masking(n, "s {n} {r}") for n in (1, 2)],
        [masking(n, activation="a {n}") for n in (1, 2)],
        [masking(n, inputs=("same",)) for n in (1, 2)],
        [masking(n, "always the same") for n in (1, 2)],
        [masking(1)],
    ],
    ids=[
        "seeded by rank",
        "replicated activations",
        "shares of one batch, as columns",
        "one mask for all steps",
        "once by chance",
    ],
)
def test_dropout_of_right_programs_is_silent(passes):
    assert not judged(*passes)


def test_a_rank_that_trains_alone_shares_its_masks_with_nobody():
    passes = [masking(n, members=(0,))[:1] for n in (1, 2)]
    assert not judged(*passes, world=(0,))


@pytest.mark.parametrize(
    "passes",
    [
        [drawing(1, draw("a"))],
        [drawing(n) for n in (1, 2)],
        [drawing(n, draw("always the same")) for n in (1, 2)],
        [drawing(n, draw(str(n), sizes=())) for n in (1, 2)],
        [drawing(n, draw(str(n), sizes=(8, 8))) for n in (1, 2)],
        [drawing(n, draw(str(n)), inputs=("same",)) for n in (1, 2)],
        [[model_fed(r, n, draws=(draw(f"{r} {n}"),)) for r in (0, 1)] for n in (1, 2)],
        [[model_fed(r, n, draws=(draw(str(n)),) * r) for r in (0, 1)] for n in (1, 2)],
    ],
    ids=[
        "once by chance",
        "nothing drawn",
        "one mask for all steps",
        "one number for the whole batch",
        "the batch of all ranks",
        "the same samples",
        "seeded by rank",
        "drawn on one rank only",
    ],
)
def test_right_programs_are_silent(passes):
    assert not judged(*passes)
