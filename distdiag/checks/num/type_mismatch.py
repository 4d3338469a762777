"""NUM012: gradients or optimizer state of one parameter have different types on ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import TensorUpdate
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import UpdateView

_MOST_NAMED: Final = 8


class TypeMismatch(Check[UpdateView]):
    """The gradient or the optimizer state of one parameter has different types on the ranks.

    ## What you see
    Copies of the parameter drift apart because each rank rounds differently, or a later collective
    over gradients or state fails or hangs because its messages differ in size. The ranks hold the
    gradient or the optimizer state in different dtypes.

    ## Example
        if torch.cuda.get_device_capability()[0] >= 8:   # wrong: ranks on older devices go on
            model.bfloat16()                             # in another type
        dtype = agreed_dtype()                           # right: one decision for all ranks

    ## How to fix
    Choose the dtype from the configuration, the same on all ranks (not from the hardware or the
    data of the rank). Or let rank 0 choose it and broadcast the choice with
    `dist.broadcast_object_list([dtype], src=0)`.

    Changes: The ranks in the minority compute in the dtype of the others.

    Leaves: The ranks in the majority.

    ## When it is not a defect
    The ranks train different models that happen to have the same names.

    If so, add `ignore = ["NUM012"]` to `distdiag.toml`.

    ## References
    - https://github.com/modelscope/ms-swift/issues/3955
    """

    code = "NUM012"
    name = "type-mismatch"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Compare the types of what the ranks hold under one name."""
        by_rank = {
            rank: {each.name: each for each in looks[-1].tensors}
            for rank, looks in view.by_rank.items()
        }
        if len(by_rank) < 2 or not view.any_look.model:
            return
        shared = set.intersection(*map(set, by_rank.values()))
        differing = [
            name
            for name in by_rank[min(by_rank)]
            if name in shared and _differ([each[name] for each in by_rank.values()])
        ]
        if differing:
            yield self._finding(view, differing, by_rank)

    def _finding(
        self,
        view: UpdateView,
        names: list[str],
        by_rank: Mapping[int, Mapping[str, TensorUpdate]],
    ) -> Finding:
        groups: dict[str, list[int]] = {}
        for rank, tensors in by_rank.items():
            groups.setdefault(_types(tensors[names[0]]), []).append(rank)
        by_size = sorted((len(ranks), ranks) for ranks in groups.values())
        is_tie = by_size[0][0] == by_size[-1][0]
        odd = RankSet(by_rank) if is_tie else RankSet(by_size[0][1])
        held = [f"{what} on {RankSet(ranks).phrase()}" for what, ranks in groups.items()]
        look = view.by_rank[min(odd)][-1]
        return self.finding(
            f"{names[0]} in {view.title} has {' and '.join(held)}"
            + (f"; so do {len(names) - 1} more parameters" if len(names) > 1 else ""),
            ranks=odd,
            step=look.step,
            location=user_location(look.site.frames),
            subjects=tuple(names[:_MOST_NAMED]),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(ranks=RankSet(ranks), summary=f"holds {what}")
                for what, ranks in groups.items()
            ),
        )


def _differ(held: Sequence[TensorUpdate]) -> bool:
    """Say whether ranks hold the same thing in different types.

    One rank may have a gradient or a state that another has not: its part may be empty.
    """
    kinds: dict[str, set[str]] = {}
    for one in held:
        kinds.setdefault("parameter", set()).add(one.dtype)
        kinds.setdefault("gradient", set()).add(one.gradient_dtype)
        for key, dtype in one.state:
            kinds.setdefault(f"state {key}", set()).add(dtype)
    return any(len(found - {""}) > 1 for found in kinds.values())


def _types(one: TensorUpdate) -> str:
    state = "".join(f", {key} in {dtype}" for key, dtype in one.state)
    return f"a parameter in {one.dtype} with a gradient in {one.gradient_dtype}{state}"
