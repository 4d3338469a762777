"""DAT013: the same random numbers are drawn for different samples."""

from collections.abc import Iterable, Iterator

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import AugmentationView, Axis


class RepeatedAugmentation(Check[AugmentationView]):
    """Workers of data loaders draw the same random numbers for different samples.

    ## What you see
    Samples that are read at the same time get the same crops, flips and masks, so the training has
    fewer random variants than it seems to. The random generators of several workers have the same
    state: a function seeds them with the same number, or each worker holds a copy of one generator.

    ## Example
        def seed_worker(number):
            np.random.seed(number)                  # wrong: the same on all ranks
            np.random.seed(1000 * rank + number)    # right

        class Images(Dataset):
            def __init__(self):
                self.rng = np.random.default_rng(0) # wrong: each worker has a copy of it

    ## How to fix
    Call `torch.manual_seed(seed + rank)` before the loader is created, and seed other generators in
    the worker from `torch.initial_seed()`, for example
    `numpy.random.default_rng([torch.initial_seed(), rank])` in `worker_init_fn`. Create generators
    in the worker, not in the data set.

    Changes: The random numbers of the samples.

    Leaves: Which samples are read, and in which order.

    ## When it is not a defect
    The samples are intended to be changed in the same way, for example the frames of one video.

    If so, add `ignore = ["DAT013"]` to `distdiag.toml`. What follows from ranks that are seeded
    alike for their weights is a note.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
    - https://tanelp.github.io/posts/a-bug-that-plagues-thousands-of-open-source-ml-projects/
    """

    code = "DAT013"
    name = "repeated-augmentation"
    severity = Severity.WARNING

    def check(self, view: AugmentationView) -> Iterator[Finding]:
        """Say who shares the numbers of which generator."""
        first = view.fetches[0]
        if view.axis is Axis.WORKER:
            who = f"workers {_listed(first)} of {view.ranks.phrase()} draw"
        else:
            worker = next(iter(first.values())).worker
            what = "" if worker < 0 else f"worker {worker} of "
            who = f"{what}{view.ranks.phrase()} draw{'s' if worker >= 0 else ''}"
        yield self.finding(
            f"{who} the same numbers from {_generator(view.use.name)} for different samples of "
            f"{view.stream.partition(' by ')[0]}, in {_fetches(len(view.fetches))}{view.doubt}",
            ranks=view.ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=(view.stream.partition(" ")[0],),
            grade=Grade.NOTE if view.doubt else Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(_evidence(view)),
        )


def _generator(name: str) -> str:
    named = {"python": "Python's generator", "numpy": "numpy's", "torch": "torch's"}
    return named.get(name, f"the generator {name}")


def _fetches(count: int) -> str:
    return f"{count} {'fetches that were' if count > 1 else 'fetch that was'} compared"


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def _evidence(view: AugmentationView) -> Iterator[Evidence]:
    use = view.use
    for by_place in view.fetches:
        one = next(iter(by_place.values()))
        sizes = sorted({each.num_samples for each in by_place.values()})
        yield Evidence(
            ranks=view.ranks,
            summary=f"fetch {one.number}: {len(by_place)} batches of {', '.join(map(str, sizes))} "
            "different samples, the generator has the same states before and after each",
        )
    count = "a number of" if use.num_drawn < 0 else use.num_drawn
    yield Evidence(
        ranks=view.ranks,
        summary=f"the first of them took {count} raw numbers: {view.cell.reason}",
        values={"before": use.before, "after": use.after},
    )
