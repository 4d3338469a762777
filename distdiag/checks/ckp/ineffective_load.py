"""CKP004: a checkpoint was read, but the model that trains does not hold its values."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.checkpoints import Waste
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import LoadWastedView

_TEXTS: Final = {
    Waste.UNUSED: (
        "{api} read tensors for {names} of {target}, but the model still has the values from "
        "before",
        "The run trains with the weights from before the load. The tensors were read into memory "
        "that is not the model's, and nothing copied them into the model.",
        "After the read, call `model.load_state_dict(state)`, or `set_model_state_dict(model, "
        "state)` of torch.distributed.checkpoint.state_dict.",
    ),
    Waste.OVERWRITTEN: (
        "{target} was loaded, but {names} have different values when training begins",
        "The run trains with weights that are not those of the checkpoint. Something overwrote the "
        "loaded values before the first step, for example an initialisation.",
        "Load the checkpoint after the weights are initialised, moved and broadcast, not before.",
    ),
}


class IneffectiveLoad(Check[LoadWastedView]):
    """A checkpoint was read, but the model that trains does not hold its values.

    ## What you see
    The run seems to resume, but starts with other weights. The checkpoint was read into tensors
    that are not the model's, or something overwrote the loaded values.

    ## Example
        # wrong: a full state dict is a copy; the model never gets what was read
        state = get_model_state_dict(model, options=full)
        dcp.load(state, checkpoint_id=path)

        # right
        state = get_model_state_dict(model, options=full)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state, options=full)

    ## How to fix
    Load the checkpoint into the model after everything that initialises the model:
    `model.load_state_dict(state)`.

    Changes: The weights that training begins with.

    Leaves: Results of runs that began with other weights.

    ## When it is not a defect
    The program is intended to train from weights other than those that it has loaded.

    To silence it, set `ignore = ["CKP004"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "CKP004"
    name = "ineffective-load"
    severity = Severity.WARNING

    def check(self, alignment: LoadWastedView) -> Iterator[Finding]:
        """Name the ranks on which a load had no effect."""
        event = alignment.any_event
        message, why, fix = _TEXTS[event.waste]
        names = first_and_more(event.names)
        # What rank 0 holds is sent to the others: what these had loaded is replaced by it.
        is_first = 0 in alignment.by_rank or not alignment.missing_ranks
        is_sure = event.waste is Waste.UNUSED or is_first
        grade = Grade.PROVEN if event.waste is Waste.UNUSED else Grade.LIKELY
        yield self.finding(
            message.format(api=event.api, names=names, target=event.target),
            ranks=alignment.present_ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=event.names,
            grade=grade if is_sure else Grade.NOTE,
            confidence=0.9 if is_sure else 0.4,
            why=why,
            fix=fix,
            evidence=(
                f"none of {event.num_compared} tensors that were compared holds what was loaded"
            ),
        )
