"""Builds what the engine would show of loads and saves."""

from distdiag.events.checkpoints import (
    LoadWasted,
    StateEntry,
    StateRestored,
    StateSaved,
    TrainingResumed,
    Waste,
    WeightsLoaded,
)
from tests.checks.streams import event_of, plain_site


def _event(kind, rank, **values):
    return event_of(kind, rank, site=plain_site(60), **values)


def loaded(rank=0, **values):
    """A load of ten tensors of which two, a tenth of all bytes, were left out."""
    standing = {
        "target": "Net",
        "num_tensors": 10,
        "num_bytes": 1000,
        "num_given": 8,
        "num_loaded": 8,
        "missing": ("head.weight", "head.bias"),
        "num_missing": 2,
        "missing_bytes": 100,
        "num_untouched": 2,
        "num_unknown": 0,
        "unexpected": (),
        "num_unexpected": 0,
        "given_prefix": "",
        "wanted_prefix": "",
        "num_renamed": 0,
        "renamed_bytes": 0,
        "holes": (),
        "is_refused": False,
        "at_step": 0,
    }
    return _event(WeightsLoaded, rank, **standing | values)


def wasted(rank=0, waste=Waste.UNUSED):
    """A load that came to nothing."""
    names = ("0.weight", "1.weight")
    return _event(
        LoadWasted, rank, api="dcp.load", waste=waste, target="Net", names=names, num_compared=2
    )


def entry(key, value, *, kind="int", is_stateful=True):
    """One value of a state."""
    return StateEntry(key, kind, f"digest of {value}", str(value), is_stateful)


def saved(rank, *entries, checkpoint="/step-1"):
    """What a rank of two gave to a checkpoint."""
    return _event(
        StateSaved, rank, number=1, members=(0, 1), checkpoint=checkpoint, entries=entries
    )


def restored(rank, *entries):
    """What came back to a rank otherwise than it had saved it."""
    return _event(StateRestored, rank, checkpoint="/step-1", entries=entries)


def resumed(rank=0, **values):
    """An optimizer without state, all of whose weights and whose schedule were loaded."""
    standing = {
        "optimizer": "AdamW",
        "num_parameters": 6,
        "num_loaded": 6,
        "num_stateless": 6,
        "was_restored": False,
        "num_lost": 0,
        "offered": 6,
        "schedule_step": 3,
    }
    return _event(TrainingResumed, rank, **standing | values)
