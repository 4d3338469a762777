"""Builds what the engine would show of exchanges of tokens between the ranks of a group."""

from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.routing import TokensExchanged
from distdiag.views.routing import Exchange, RoundTrip, UnfitExchange
from tests.checks.streams import event_of, plain_site

WIDTH = 8


def exchange(rank=0, sent=(4, 4), came=(4, 4), *, seq_id=7, even=False, **values):
    """A rank of two gives each rank so many rows and makes room for so many."""
    width = values.pop("width", WIDTH)
    call = event_of(
        Collective,
        rank,
        group=ProcessGroup("ep", "ep", (0, 1), "gloo"),
        collective_seq_id=seq_id,
        signature=Signature(
            "all_to_all_single",
            input_sizes=((sum(sent), width),),
            output_sizes=((sum(came), width),),
            dtypes=(values.pop("dtype", "float32"),),
            input_splits=() if even else sent,
            output_splits=() if even else came,
        ),
        site=plain_site(10),
    )
    fields = {
        "model": "Net",
        "layer": "layers.0.moe",
        "ordinal": 0,
        "is_recompute": False,
        "num_tokens": 32,
        "num_experts": 4,
        "k": 2,
    }
    event = event_of(TokensExchanged, rank, call=call.seq, **{**fields, **values})
    return Exchange(event, call)


def unfit(*parts):
    return UnfitExchange({part.call.rank: part for part in parts})


def trip(there, back, **values):
    return RoundTrip(
        exchange(sent=there[0], came=there[1], **values),
        exchange(sent=back[0], came=back[1], **values),
    )
