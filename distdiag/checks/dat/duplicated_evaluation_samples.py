"""DAT005: samples that fill up the last batch are evaluated as if they were further ones."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.base import CallSite
from distdiag.events.data import RowsGathered
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import is_readable, module_of, nodes_around
from distdiag.views.alignment import GatheredRowsView

# Whether code may drop rows of what it has gathered, as far as its text shows.

_DROPPING: Final = re.compile(
    r"remainder|samples_seen|seen_samples|dup|dedup|unique|truncate|narrow|islice|^set$|^head$"
    r"|num_pad|padded|^keep$|is_real|real_mask|first_seen",
    re.IGNORECASE,
)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def may_drop(site: CallSite) -> bool:
    """Say whether the functions around a call may drop some of the rows that it returns.

    These are the functions of the stack, those that the innermost one calls by name, and the other
    methods of its class. Where the text cannot be read they may.
    """
    frames = site.user_frames
    if not frames or not all(is_readable(frame) for frame in frames):
        return True
    bodies = [nodes[0] for frame in frames if (nodes := nodes_around(frame))]
    tree = module_of(frames[0])
    near = list(_near(bodies[0], tree)) if bodies and tree is not None else []
    return any(_drops(node) for body in (*bodies, *near) for node in ast.walk(body))


def _near(function: ast.AST, tree: ast.Module) -> Iterator[ast.AST]:
    called = {
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name in called:
            yield node
        elif isinstance(node, ast.ClassDef) and function in node.body:
            yield from (each for each in node.body if isinstance(each, _FUNCTIONS))


def _drops(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(slice=ast.Slice(upper=upper)) if upper is not None:
            return True
        case ast.Subscript(slice=ast.Tuple(elts=[ast.Slice(upper=upper), *_])):
            return upper is not None
        case ast.Subscript(slice=index, ctx=ast.Store()):
            return not isinstance(index, ast.Constant)  # results[number] = answer
        case ast.Subscript(slice=ast.UnaryOp(op=ast.Invert())):
            return True
        case ast.Call(func=ast.Name(id="dict"), args=[ast.Call(func=ast.Name(id="zip"))]):
            return True
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Name(id="zip")))]):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_DROPPING.search(name))
        case _:
            return False


# The check.


class DuplicatedEvaluationSamples(Check[GatheredRowsView]):
    """Samples that only fill up the last batch are counted in the evaluation.

    ## What you see
    Some samples count twice, so that the metric is not that of the data set and changes with the
    number of ranks and the batch size. A last batch that is too small is filled up with samples
    from the beginning of the data.

    ## Example
        for batch in prepared_loader:
            answers = model(batch).argmax(-1)
            # wrong: 64 answers for 50 samples in batches of 2 x 8
            metric.add(accelerator.gather(answers))
            # right
            metric.add(accelerator.gather_for_metrics(answers))

    ## How to fix
    Gather everything that a metric is made of with `gather_for_metrics`, or cut what was gathered
    to the length of the data set.

    Changes: The metric: each sample counts once.

    Leaves: The training, and metrics that are gathered in another way.

    ## When it is not a defect
    What was gathered in the whole pass has, in the end, as many rows as the data set has samples.

    If so, add `ignore = ["DAT005"]` to `distdiag.toml`.

    ## References
    - https://huggingface.co/docs/accelerate/package_reference/accelerator
    """

    code = "DAT005"
    name = "duplicated-evaluation-samples"
    severity = Severity.WARNING

    def check(self, view: GatheredRowsView) -> Iterator[Finding]:
        """Judge what was gathered of one last batch."""
        first = view.any_event
        num_extra = first.num_rows - first.num_real
        is_proven = _is_of_samples(first) and _is_called_by_user(first) and not may_drop(first.site)
        ranks = RankSet(view.by_rank)
        yield self.finding(
            f"the evaluation {'counts' if is_proven else 'may count'} {num_extra} of the "
            f"{first.num_samples} samples of {first.dataset} twice: the last batch is filled up "
            f"with samples from the beginning, and what is gathered here has them too "
            f"({', '.join(map(_with_sizes, first.tensors))} on each rank)",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(first.dataset,),
            grade=Grade.LIKELY if is_proven else Grade.NOTE,
            confidence=0.95 if first.is_dropped_elsewhere else 0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{first.num_rows} rows are gathered of the last batch, and "
                    f"{first.num_real} of them are samples that no batch had before"
                    + _ELSEWHERE
                    * first.is_dropped_elsewhere,
                    location=user_location(first.site.frames),
                    values={
                        "num_rows": first.num_rows,
                        "num_real": first.num_real,
                        "num_samples": first.num_samples,
                    },
                ),
            ),
        )


_ELSEWHERE = "; another call gathers only these of the same batch"


def _with_sizes(tensor: str) -> str:
    """Return ``int64 [8, 2]`` for ``int64 8 x 2``."""
    dtype, _, sizes = tensor.partition(" ")
    return f"{dtype} [{', '.join(sizes.split(' x '))}]"


def _is_of_samples(gathered: RowsGathered) -> bool:
    """Say whether a number or an answer of each sample was gathered, not features of it."""
    return any(
        " x " not in tensor or tensor.startswith(("int", "uint", "bool"))
        for tensor in gathered.tensors
    )


def _is_called_by_user(gathered: RowsGathered) -> bool:
    frames = gathered.site.frames
    return bool(frames) and frames[0].user
