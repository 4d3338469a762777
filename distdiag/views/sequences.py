"""A view of what ranks that share sequences exchange around attention, over several passes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from distdiag.events.data import ModelFed
from distdiag.events.losses import LossWeights
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SequenceUse, UseKind
from distdiag.views.base import View

Uses = Mapping[int, SequenceUse]
Feeds = Mapping[int, ModelFed]
Losses = Mapping[int, LossWeights]


class ModelEquality(Enum):
    """How the models of ranks resemble one another when their training begins."""

    UNKNOWN = auto()
    EQUAL = auto()
    OTHER_VALUES = auto()
    OTHER_MODELS = auto()


@dataclass(frozen=True, slots=True)
class SequenceView(View):
    """The same forward passes on all ranks of one group.

    `feeds` are what models were given for them, `losses` what these passes led to, as far as that
    is known of all ranks. `is_fed_by_others`: ranks exchange integers or objects before their
    forward passes, such as the samples. `is_reduced`: after the first step something larger than
    some figures was reduced or sent round among them, or it is not known yet. `equality` compares
    the models of the ranks.
    """

    how: UseKind
    ranks: RankSet
    passes: tuple[Uses, ...]
    feeds: tuple[Feeds, ...] = ()
    losses: tuple[Losses, ...] = ()
    is_fed_by_others: bool = False
    is_reduced: bool = True
    equality: ModelEquality = ModelEquality.UNKNOWN

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.how, self.ranks


class PositionedSequences(SequenceView):
    """The same where positions of tokens were given to a module with shared attention."""

    __slots__ = ()


class MaskedSequences(SequenceView):
    """The same where a mask, causality or lengths hide tokens from shared attention."""

    __slots__ = ()
