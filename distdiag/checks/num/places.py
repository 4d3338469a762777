"""How places of numbers that are not finite read in a message."""

from __future__ import annotations

from distdiag.events.numerics import NonFinite, NonFinitePlace

_VALUES = {"nan": "NaN", "inf": "infinity", "-inf": "minus infinity"}
_CAME = {
    "stepped": "an optimizer stepped with it",
    "masked": "the loss and the gradients were finite",
    "dropped": "the program went on without that pass",
    "skipped": "no optimizer stepped",
    "ended": "the rank ended in that step",
    "": "",
}


def value_phrase(place: NonFinitePlace) -> str:
    """Return NaN or infinity."""
    return _VALUES[place.value]


def what_came_of(event: NonFinite) -> str:
    """Say what became of the step."""
    return _CAME[event.outcome]


def module_phrase(place: NonFinitePlace) -> str:
    """Return the module by its path and class, or the model where it is the whole of it."""
    if not place.module:
        return f"the {place.kind or 'model'} itself"
    kind = f" ({place.kind})" if place.kind else ""
    return f"{place.module}{kind}"


def subject_of(place: NonFinitePlace) -> str:
    """Return what a finding is about: the module, or the loss."""
    if place.stage == "loss" or (place.stage == "backward" and not place.module):
        return "the loss"
    return place.module or place.model


def place_phrase(place: NonFinitePlace) -> str:
    """Return where it is, as in ``the output of layers.1 (Block) in the forward pass``."""
    where = module_phrase(place)
    inside = "" if place.is_exact else ", or code in it or right before it"
    match place.stage:
        case "loss":
            return "the loss, computed outside of all modules from finite outputs"
        case "input":
            return f"an input of the {place.kind}"
        case "parameter" | "buffer":
            return f"{_named(place)} of {where}, before the forward pass"
        case "forward" if place.what == "its output":
            return f"the output of {where}{inside}, in the forward pass"
        case "forward":
            return f"{place.what}, computed in the forward pass of {where}"
        case "backward" if not place.module:
            return f"{place.what}, computed outside of all modules in the backward pass"
        case "backward":
            return f"{place.what}, computed in the backward pass of {where}"
        case "weight-gradient":
            return f"{_named(place)} of {where}, in this rank's own backward pass"
        case "gradient":
            return f"{_named(place)} of {where}, as the optimizer finds it"
    return f"{_named(place)} of {where}, after the step of its optimizer"


def _named(place: NonFinitePlace) -> str:
    """Return the tensor that a module has, without the word that stands for the module."""
    return place.what.replace("its ", "")
