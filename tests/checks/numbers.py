"""Builds what ranks log, and what the losses of their passes hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distdiag.events.base import CallSite, Frame
from distdiag.events.logged import CodesChosen, LossNumbers, MemoryUse, Prediction
from distdiag.views.logged import LoggedSeries, LoggedView, LossView
from tests.checks.streams import event_of

SITE = CallSite((Frame("train.py", 7, "train"),))


def logged_view(ranks: Sequence[int] = (0,), **series: Sequence[float]) -> LoggedView:
    """What ranks have logged after each of their steps, by name (``__`` stands for ``/``)."""
    named = {name.replace("__", "/"): values for name, values in series.items()}
    return LoggedView({rank: _series(named) for rank in ranks})


def _series(named: dict[str, Sequence[float]]) -> dict[str, LoggedSeries]:
    return {
        name: LoggedSeries(name, "distdiag.log", SITE, tuple(enumerate(values, 1)))
        for name, values in named.items()
    }


def one_pass(step: int, loss: float = 1.25, **values: Any) -> LossNumbers:
    """One pass that was looked at."""
    return event_of(
        LossNumbers, step=step, loss=loss, **{"is_coarse": False, "rate": 0.1, **values}
    )


def loss_view(
    passes: Sequence[LossNumbers],
    ranks: Sequence[int] = (0,),
    *,
    others: Sequence[LossNumbers] | None = None,
    varied: Sequence[int] = (),
    **series: Sequence[float],
) -> LossView:
    """The same passes on all of these ranks; rank 1 may have others."""
    by_rank = dict.fromkeys(ranks, tuple(passes))
    if others is not None:
        by_rank[1] = tuple(others)
    logged = {rank: _series(dict(series)) for rank in by_rank} if series else {}
    return LossView(SITE, by_rank, logged, varied=frozenset(varied))


def prediction(entropy: float, cross_entropy: float, **values: Any) -> Prediction:
    """What a sample of rows predicts, of 16 classes where nothing else is given."""
    fields: dict[str, Any] = {"num_classes": 16, "num_rows": 32, "top_share": 0.3, "targets": ()}
    return Prediction(entropy=entropy, cross_entropy=cross_entropy, **{**fields, **values})


def window(step: int, num_used: int, num_codes: int = 64) -> CodesChosen:
    """A window in which so many codes were chosen."""
    return event_of(
        CodesChosen,
        step=step,
        codebook="codes.weight",
        num_codes=num_codes,
        num_choices=8 * num_codes,
        num_used=num_used,
        perplexity=float(num_used),
        counts=((3, 8 * num_codes),),
        site=SITE,
    )


def memory(used_mib: Sequence[float], every: int = 8, limit_mib: int = 4000, **values: Any) -> Any:
    """Samples of memory, one after every eighth step."""
    return tuple(
        event_of(
            MemoryUse,
            step=every * number,
            memory="host",
            used_bytes=int(used * (1 << 20)),
            limit_bytes=limit_mib << 20,
            **values,
        )
        for number, used in enumerate(used_mib, 1)
    )
