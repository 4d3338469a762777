"""Whether ranks are meant to work on the same samples, by what else they exchange."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.engine.data import DataAligner
from tests.checks.feeds import model_fed
from tests.checks.streams import Job, signature
from tests.engine.aligned import aligned

SINCE, BEGIN, END = 100, 200, 300


def is_shared(op: str, sizes: tuple[int, ...], seq: int) -> bool:
    """Say what is made of one call between the batch and the end of the forward pass."""
    job, events = Job(2), []
    for rank in (0, 1):
        call = job.call(rank, sign=signature(op, input_sizes=(sizes,)))
        events.append(msgspec.structs.replace(call, seq=seq))
    for number in (0, 1):
        for rank in (0, 1):
            events.append(model_fed(rank, number, since=SINCE, begin=BEGIN, end=END))
    return aligned(DataAligner, *events).views[-1].is_shared_work


@pytest.mark.parametrize(
    ("op", "sizes", "seq", "shared"),
    [
        ("all_gather", (8,), BEGIN + 1, True),
        ("all_reduce", (8, 8), BEGIN + 1, False),
        ("all_gather", (8,), SINCE + 1, True),
        ("all_reduce", (8,), SINCE + 1, True),
        ("all_reduce", (), SINCE + 1, False),
        ("all_reduce", (1,), SINCE + 1, False),
        ("broadcast", (8, 8), SINCE + 1, False),
        ("all_gather", (8,), SINCE - 1, False),
    ],
    ids=[
        "activations",
        "sum in the forward pass",
        "rewards of all",
        "mean reward of each sample",
        "count of tokens",
        "count of tokens in a vector",
        "the batch itself",
        "before the batch",
    ],
)
def test_samples_are_shared_on_purpose_if_more_is_exchanged_for_them(
    op: str, sizes: tuple[int, ...], seq: int, shared: bool
) -> None:
    assert is_shared(op, sizes, seq) is shared
