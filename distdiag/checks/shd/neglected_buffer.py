"""SHD025: a buffer is left out of what is done with the same buffer of like modules."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.base import View


class Neglect(StrEnum):
    """What is not done with a buffer."""

    UPDATED = "updated"  # it never changes, the others do every time
    RESET = "reset"  # it grows, the others begin anew or keep their sum
    REDUCED = "reduced"  # ranks have different values of it, and the same of the others


@dataclass(frozen=True, slots=True)
class NeglectedBuffers(View):
    """Buffers of a model that live otherwise than the same buffers of its other like modules.

    Like modules hold tensors of the same names, shapes and types, and train the same. `siblings`
    are those that live alike. All was seen on all of these ranks at the sampled `steps`.
    """

    model: str
    ranks: RankSet
    buffers: Mapping[str, Neglect]
    siblings: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def supersedes(self) -> Hashable:
        """What was said after fewer steps."""
        return "buffers", self.model, self.ranks


_SEEN: Final = {
    Neglect.UPDATED: "keeps its first value",
    Neglect.RESET: "only grows",
    Neglect.REDUCED: "differs between the ranks",
}
_OTHERS: Final = {
    Neglect.UPDATED: "change each time",
    Neglect.RESET: "are reset each time",
    Neglect.REDUCED: "are the same on all ranks",
}


class NeglectedBuffer(Check[NeglectedBuffers]):
    """A buffer is not updated, reset or reduced as the same buffer of like modules is.

    ## What you see
    Nothing fails, but one module runs on a buffer that the program forgot: a bias that balances
    experts stays zero, a counter grows for ever, or each rank has its own numbers. The same buffer
    of similar modules is updated, reset or reduced.

    ## Example
        # wrong: the modules of the extra head are no layers of `model.layers`
        for layer in model.layers:
            update_bias(layer.moe)
        # right
        for moe in (m for m in model.modules() if isinstance(m, MoE)):
            update_bias(moe)

    ## How to fix
    Let the code that updates, resets or reduces the buffer loop over all modules of this class:
    `for module in model.modules(): if isinstance(module, Router): ...`.

    Changes: The results of these modules, for example which experts are chosen.

    Leaves: Weights that were trained while the buffer was wrong.

    ## When it is not a defect
    These modules are intended to be without the update, or get it at steps other than those named.

    If so, add `ignore = ["SHD025"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/torchtitan/issues/4494
    """

    code = "SHD025"
    name = "neglected-buffer"
    severity = Severity.WARNING

    def check(self, view: NeglectedBuffers) -> Iterator[Finding]:
        """Name the buffers, and what the others have that they lack."""
        if not view.buffers:
            return
        names = tuple(view.buffers)
        lacks = ", ".join(
            f"{name} is not {neglect}" for name, neglect in list(view.buffers.items())[:3]
        )
        steps = ", ".join(map(str, view.steps))
        yield self.finding(
            f"{lacks} in {view.model}, unlike those of similar modules "
            f"({first_and_more(view.siblings)}), at steps {steps}",
            ranks=view.ranks,
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=view.ranks,
                    summary=f"at {len(view.steps)} sampled steps {name} {_SEEN[neglect]}; "
                    f"those of similar modules {_OTHERS[neglect]}",
                )
                for name, neglect in view.buffers.items()
            ),
        )
