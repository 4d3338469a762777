"""Builds what the engine would show of ranks that share sequences."""

from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUse, SequenceUse
from distdiag.views.sequences import SequenceView
from tests.checks.streams import event_of, plain_site


def use(rank, number, **values):
    """Attention over 40 tokens, half of them of this rank, with exchanges before and after it."""
    fields = {
        "given": tuple(f"{name} {rank} {number}" for name in ("query", "key", "value")),
        "num_distinct": 30,
        "num_repeated": 4,
        "num_tokens": 40,
        "is_returned": True,
        "peer": -1,
        "site": plain_site(30),
    }
    return AttentionUse(**{**fields, **values})


def passed(rank, number, *uses, how="all_to_all", members=(0, 1), **values):
    """One forward pass of a rank, with one layer unless others are given."""
    return event_of(
        SequenceUse,
        rank,
        step=number,
        how=how,
        number=number,
        members=members,
        uses=uses or (use(rank, number, **values),),
    )


def shared(*passes, how="all_to_all", kind=SequenceView, **values):
    """What the ranks of a group did in several passes: for each the events of all ranks."""
    by_rank = tuple({event.rank: event for event in events} for events in passes)
    return kind(how, RankSet(by_rank[0]), by_rank, **values)


def both(number, **values):
    """One forward pass of two ranks."""
    return [passed(rank, number, **values) for rank in (0, 1)]
