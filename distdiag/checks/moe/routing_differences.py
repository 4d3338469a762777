"""How findings describe two runs of one script that route differently."""

from distdiag.events.comparisons import Cause, Flip, MarginBin, Nature, Origin, RoutingDifference

_WHAT = {
    Origin.DATA: "the data of the model",
    Origin.WEIGHTS: "the weights",
    Origin.TIE: "the order of equal scores in {name}",
    Origin.GRADIENT: "the gradient of {name}",
    Origin.UNKNOWN: "something that was not recorded",
}


def place_phrase(event: RoutingDifference) -> str:
    """Say when and where the runs differ."""
    parts = [f"step {event.step}"]
    if event.micro:
        parts.append(f"micro-step {event.micro}")
    parts += [f"layer {event.layer}", *(f"call {event.call}" for _ in "1" if event.call)]
    if event.flip is not None:
        parts.append(f"token {event.flip.token}")
    again = " in a repeated forward pass" if event.is_recompute else ""
    return ", ".join(parts) + again


def flip_phrase(flip: Flip, dtype: str) -> str:
    """Say where one token was sent, and how close that was."""
    experts, again = (", ".join(map(str, each)) for each in (flip.experts, flip.experts_again))
    return (
        f"experts {experts} in one run and {again} in the other, chosen by a margin of "
        f"{flip.margin:.3g} ({roundings_phrase(flip.roundings)} of {dtype})"
    )


def roundings_phrase(number: float) -> str:
    """Say how many roundings a margin is."""
    shown = f"{number:.0f}" if number >= 1 else f"{number:.2g}"
    return f"{shown} rounding{'' if shown == '1' else 's'}"


def cause_phrase(cause: Cause) -> str:
    """Say what differs first, and of what kind it is."""
    class_ = f" ({cause.kind})" if cause.kind else ""
    if cause.origin is Origin.DRAW:
        return f"{cause.name}{class_} draws random numbers, different ones in each run"
    if cause.origin is Origin.MODULE:
        what = f"the output of {cause.name}{class_}, whose input is the same"
    else:
        what = _WHAT[cause.origin].format(name=cause.name + class_)
    size = ""
    if cause.size >= 0:
        dtype = f" in {cause.dtype}" if cause.dtype else ""
        size = f", by {cause.size:.2g} of the largest value{dtype}"
    ops = f"; it calls {', '.join(cause.ops)}, which torch lists as not deterministic on GPUs"
    return f"what differs first is {what}{size}{ops if cause.ops else ''}"


def nature_phrase(nature: Nature) -> str:
    """Say what a nature means."""
    return {
        Nature.NUMERIC: "of the size of rounding: the same numbers in another order",
        Nature.LOGIC: "no rounding: different numbers went in",
        Nature.MEANT: "the options of the router ask for noise, which is not seeded",
    }[nature]


def bin_label(each: MarginBin) -> str:
    """Name the margins of one row of a histogram."""
    if each.up_to == 0.0:
        return "equal scores"
    if each.up_to == float("inf"):
        return "more"
    return f"up to {roundings_phrase(each.up_to)}"


def flips_by_nature(margins: tuple[MarginBin, ...]) -> tuple[int, int]:
    """Return how many flips of the first step rounding may explain by their margins, and not."""
    numeric = sum(each.num_flipped_first for each in margins if each.is_numeric)
    return numeric, sum(each.num_flipped_first for each in margins) - numeric
