"""SEQ006: ranks that share sequences draw different samples."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import are_mixed, members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import ModelEquality, SequenceView

_FEWEST: Final = 2
_IN_ORDER: Final = ("SequentialSampler", "shuffle=False")


class MixedSamples(Check[SequenceView]):
    """Ranks that share sequences draw different samples from the data set.

    ## What you see
    The loss falls, but attention joins parts of different samples as if they were one text. The
    sampler gives different samples to ranks that share one sequence.

    ## Example
        # wrong: each rank has samples of its own
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
        # right: the ranks of one group draw the same samples
        sampler = DistributedSampler(
            data, num_replicas=world_size // sp_size, rank=rank // sp_size
        )

    ## How to fix
    Divide the data by groups that share a sequence, not by ranks:
    `DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank)`. Or gather the samples within
    the group.

    Changes: What the ranks read: fewer samples in a step, each of them whole.

    Leaves: The model, and the number of tokens on each rank.

    ## When it is not a defect
    The samples on the ranks of a group are parts of one text, or are intended to attend to one
    another.

    If so, add `ignore = ["SEQ006"]` to `distdiag.toml`. It is a note without shuffling, and where
    keys and values are gathered.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "SEQ006"
    name = "mixed-samples"
    severity = Severity.ERROR

    def check(self, view: SequenceView) -> Iterator[Finding]:
        """Compare the samples of the ranks that share sequences."""
        if view.is_fed_by_others or view.equality is ModelEquality.OTHER_MODELS:
            return
        for members in members_of(view):
            mixed = [each for each in view.feeds if are_mixed(each, members)]
            if len(mixed) < _FEWEST or len(mixed) < len(view.feeds):
                continue
            last = mixed[-1]
            first = last[members[0]]
            use = view.passes[-1][members[0]].uses[0]
            is_ordered = any(word in first.stream for word in _IN_ORDER)
            doubt = ""
            if is_ordered:
                doubt = "; they are read in order, so they may be parts of one text"
            elif view.how == "all_gather":
                doubt = ", unless samples are meant to attend to those of other ranks"
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)}, but draw "
                f"different samples in {len(mixed)} of {len(view.feeds)} steps: the same samples "
                f"were expected on all of these ranks{doubt}",
                ranks=RankSet(members),
                step=first.step,
                location=user_location(first.site.frames),
                grade=Grade.NOTE if doubt else Grade.LIKELY,
                confidence=0.5 if doubt else 0.85,
                evidence=tuple(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"backward pass {fed.number}: {fed.num_batch} of {fed.num_samples} "
                        f"samples from {fed.stream}",
                        location=user_location(use.site.frames),
                        values={"indices": fed.batch, "sample": fed.samples[0]},
                    )
                    for rank, fed in last.items()
                ),
            )
