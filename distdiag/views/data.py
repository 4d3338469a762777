"""Views of what models are fed over ranks: the same backward passes side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

from distdiag.events.data import ModelFed
from distdiag.events.ranks import RankSet
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class FeedView(View):
    """What all ranks that train one model together were given, for several backward passes.

    `is_shared_work`: some ranks exchange more than gradients and parameters (activations, rewards
    of what they did with the samples), so that they may be
    meant to work on the same samples.
    """

    model: str
    ranks: RankSet
    passes: tuple[Mapping[int, ModelFed], ...]
    is_shared_work: bool


class NormalisedFeeds(FeedView):
    """The same of models with a layer that normalises by the statistics of one rank's batch."""

    __slots__ = ()
