"""Which saves of parts of sharded parameters some ranks never made."""

from __future__ import annotations

from distdiag.engine.models.aligner import SliceSaves
from distdiag.events.models import SliceSaved
from distdiag.events.ranks import RankSet
from tests.checks.streams import plain_site


def saved(rank, *names, members=(0, 1), step=0):
    return SliceSaved(
        rank=rank,
        seq=step,
        time_ns=0,
        step=step,
        names=names,
        members=members,
        site=plain_site(60),
    )


def incomplete(*events):
    saves = SliceSaves()
    for event in events:
        saves.add(event)
    return list(saves.incomplete())


def test_a_save_of_one_rank_is_incomplete():
    (save,) = incomplete(saved(0, "w"))
    assert (save.kind, save.key) == ("save", ("w",))
    assert save.present_ranks == RankSet([0])
    assert save.missing_ranks == RankSet([1])


def test_a_save_of_all_ranks_at_any_time_is_complete():
    assert not incomplete(saved(0, "w", step=3), saved(1, "w", step=90))


def test_the_first_of_many_saves_is_shown():
    (save,) = incomplete(saved(0, "w", step=3), saved(0, "w", step=6))
    assert save.any_event.step == 3


def test_a_tensor_with_too_few_rows_for_all_ranks_is_saved_all_the_same():
    assert not incomplete(saved(0, "w", "bias_of_one"), saved(1, "w"))
