"""What a number is that a program logs, by the words of its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from distdiag.views.logged import LoggedSeries, SeriesByName

LEAST_SPREADS: Final = 16
"""So many values say whether rewards differ."""
_WORD: Final = re.compile(r"[a-z]+|\d+")
_COEFFICIENTS: Final = frozenset({"coef", "coeff", "coefficient", "beta", "weight", "lambda"})
# Between the policy that acted and the one that learns: 0 in each first update of its batch.
_OF_OLD_POLICY: Final = frozenset({"approx", "old", "ppo", "early", "stop", "target", "clip"})
_SPREADS: Final = frozenset({"min", "std", "var"})
_BESIDE_RATIO: Final = frozenset(
    {
        "actor",
        "avg",
        "importance",
        "is",
        "loss",
        "losses",
        "mean",
        "metrics",
        "objective",
        "policy",
        "prob",
        "rollout",
        "sampling",
        "train",
        "val",
    }
)
_OF_TOTALS: Final = frozenset(
    {
        "all",
        "avg",
        "epoch",
        "eval",
        "loss",
        "losses",
        "mean",
        "metrics",
        "running",
        "step",
        "sum",
        "test",
        "total",
        "train",
        "val",
        "valid",
    }
)


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name: ``objective/kl_coef`` and ``klCoef`` have ``kl`` and ``coef``."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return frozenset(_WORD.findall(parted.lower()))


def is_kl(name: str) -> bool:
    """Say whether it is the divergence from a policy or prior that stays as it is."""
    words = words_of(name)
    return bool(words & {"kl", "kld"}) and not words & (_COEFFICIENTS | _OF_OLD_POLICY | _SPREADS)


def is_kl_coefficient(name: str) -> bool:
    """Say whether it is what a divergence is multiplied by."""
    words = words_of(name)
    return bool(words & _COEFFICIENTS) and (bool(words & {"kl", "kld"}) or words == {"beta"})


def is_ratio(name: str) -> bool:
    """Say whether it is the mean ratio of new to old probabilities."""
    words = words_of(name)
    return "ratio" in words and words - {"ratio"} <= _BESIDE_RATIO


def is_reward_spread(name: str) -> bool:
    """Say whether it is how much rewards or advantages differ."""
    words = words_of(name)
    return "std" in words and bool(words & {"reward", "rewards", "advantage", "advantages"})


def is_gradient_norm(name: str) -> bool:
    """Say whether it is the norm of gradients, and not what it is bounded by."""
    words = words_of(name)
    is_norm = {"grad", "norm"} <= words or {"gradient", "norm"} <= words or "gradnorm" in words
    return is_norm and not words & {"max", "clip", "threshold"}


def is_entropy(name: str) -> bool:
    """Say whether it is the entropy of what a policy or model predicts."""
    words = words_of(name)
    return "entropy" in words and not words & {"cross", "loss", "min", *_COEFFICIENTS}


def is_loss_term(name: str) -> bool:
    """Say whether it is one term of a loss: its name has more than that it is a loss."""
    words = words_of(name)
    is_loss = any(word.startswith("loss") for word in words)
    return is_loss and not words & _COEFFICIENTS and bool(words - _OF_TOTALS)


def named(series: SeriesByName, kind: Callable[[str], bool]) -> list[LoggedSeries]:
    """Return the series whose names are of a kind, which is one of the functions above."""
    return [each for name, each in series.items() if kind(name)]


def spread_of(series: SeriesByName) -> float | None:
    """Return by how much rewards or advantages mostly differ, None if it is not logged."""
    for each in named(series, is_reward_spread):
        if len(each.points) >= LEAST_SPREADS:
            values = sorted(each.values)
            return values[len(values) // 4]  # three of four are at least that
    return None
