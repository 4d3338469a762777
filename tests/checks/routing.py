"""Builds what the engine would show of the routing of tokens to experts."""

from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss, Choice, CounterWritten, Load, Routing
from distdiag.views.routing import Divergence, Rerouting, RoutingView
from tests.checks.streams import event_of, plain_site


def routing(rank=0, step=0, **values):
    """A gate sends each of 64 tokens to two of four experts; tokens differ between ranks."""
    choice = Choice(
        "topk",
        values.pop("num_tokens", 64),
        values.pop("num_experts", 4),
        values.pop("k", 2),
        values.pop("dtype", "float32"),
    )
    fields = {
        "model": "Net",
        "layer": "layers.0.gate",
        "members": (0, 1),
        "call": 0,
        "number": 0,
        "is_recompute": False,
        "is_random": False,
        "choice": choice,
        "given": f"tokens {rank} {step}",
        "scores": f"scores {rank} {step}",
        "chosen": f"experts {rank} {step}",
        "tie_share": 0.0,
        "near_share": 0.0,
        "load": Load(1.2, 0.0),
        "site": plain_site(10),
    }
    return event_of(Routing, rank, step=step, **{**fields, **values})


def rerouting(rank=0, **values):
    """A repeated pass has chosen other experts for the same tokens."""
    values.setdefault("chosen", "other experts")
    return Rerouting(routing(rank, is_recompute=True, **values), (routing(rank),))


def divergence(**values):
    """Two ranks have chosen different experts for the same tokens."""
    values.setdefault("given", "the same tokens")
    return Divergence({rank: routing(rank, **values) for rank in (0, 1)})


def view(
    *choices, reroutings=(), divergences=(), recounts=(), aux=(), num_steps=0, kind=RoutingView
):
    return kind(
        model="Net",
        ranks=RankSet([0, 1]),
        reroutings=tuple(reroutings),
        num_repeated=8,
        divergences=tuple(divergences),
        num_compared=8,
        choices=choices,
        recounts=tuple(recounts),
        aux=tuple(aux),
        num_steps=num_steps,
    )


def counter(rank=0, **values):
    """A pass has counted tokens."""
    fields = {
        "model": "Net",
        "layer": "layers.0",
        "name": "tokens_per_expert",
        "call": 0,
        "is_recompute": False,
        "after": "counted once",
        "site": plain_site(12),
    }
    return event_of(CounterWritten, rank, step=0, **{**fields, **values})


def aux_loss(rank=0, step=0, **values):
    """A gate has computed an auxiliary loss that no backward pass has reached."""
    fields = {
        "model": "Net",
        "layer": "layers.0.gate",
        "num_passes": 2,
        "num_computed": 2,
        "num_injected": 0,
        "num_used": 0,
        "coefficient": "",
        "site": plain_site(14),
    }
    return event_of(AuxLoss, rank, step=step, **{**fields, **values})
