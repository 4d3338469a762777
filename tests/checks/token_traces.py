"""Builds what the ranks of a group saw of the same tokens."""

from distdiag.events.base import Frame
from distdiag.events.sequences import TokenSpec, TokenTrace
from tests.checks.streams import event_of, plain_site, together

LENGTH = 8


def spec(length=LENGTH, batch=1, **values):
    return TokenSpec((batch, length, 4), 1, batch, length, **values)


def token_traces(parts, gathered=None, *, scales=None, contexts=None, of=None, **values):
    """One alignment; `parts` are the tokens of each rank, other arguments are by rank as well."""
    of = of or spec()
    ranks = tuple(range(len(parts)))
    gathered = gathered or [range(of.num_tokens)] * len(parts)
    events = []
    for rank in ranks:
        others = {name: given[rank] for name, given in values.items()}
        event = event_of(
            TokenTrace,
            rank,
            name="train:split, train:gather",
            number=0,
            members=ranks,
            spec=of,
            site=plain_site(50),
            functions=(
                ("split", Frame("train.py", 10, "split")),
                ("gather", Frame("train.py", 20, "gather")),
                ("attention", Frame("train.py", 30, "attention")),
            ),
            parts=tuple(parts[rank]),
            gathered=tuple(gathered[rank]),
            part_shape=others.pop("part_shape", (of.batch, len(parts[rank]) // of.batch, 4)),
            gathered_shape=others.pop("gathered_shape", of.shape),
            scales=tuple(scales[rank]) if scales else (),
            contexts=tuple(contexts[rank]) if contexts else (),
            **others,
        )
        events.append(event)
    return together(*events)


HALVES = (range(4), range(4, 8))


def own_half(rank, value=1.0):
    """The gradient of each token comes to the rank that holds it."""
    return [value if token in HALVES[rank] else 0.0 for token in range(LENGTH)]
