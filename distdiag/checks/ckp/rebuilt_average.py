"""CKP010: a training is resumed, and the running average of its weights begins anew."""

import re
from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.checkpoints import AverageSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity

_MOST_OF_FILE: Final = 0.1
_LEAST_OF_START: Final = 0.7
"""An average that still keeps so much of the first weights remembers at least 0.7 times as many
steps as there were since. One that was loaded would keep exp(-1 / 0.7) = 0.24 of what it was."""
_MOST_ALIKE: Final = 0.8
"""Above this square of the cosine, rounding and chance decide which of two directions it was."""
_AVERAGE: Final = re.compile(
    r"(^|[._])(ema|swa|polyak|shadow|slow|momentum|teacher)($|[._])|averag|(^|[._])avg|ema_|_ema"
)
"""How programs name running averages. Others may begin anew: the best weights, or a target network,
which may be a copy that is made every so often."""


class RebuiltAverage(Check[AverageSaved]):
    """A training is resumed, and the running average of its weights begins anew.

    ## What you see
    After each resume the averaged weights are as noisy as the trained weights. The checkpoint
    contains the running average, but the program does not load it and builds a new average as a
    copy of the model.

    ## Example
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        # wrong: the average in the checkpoint is not used
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        # right
        ema.load_state_dict(state["ema"])

    ## How to fix
    Load the average from the checkpoint, after the average is created:
    `ema.load_state_dict(checkpoint["ema"])`.

    Changes: The averaged weights from the resumed step on.

    Leaves: The weights that are trained, and the state of their optimizer.

    ## When it is not a defect
    The average is intended to begin again, although the state of the optimizer is resumed.

    If so, add `ignore = ["CKP010"]` to `distdiag.toml`. Other weights beside those of the model,
    such as the best ones or those of a target network, are a note. An average that is meant to
    begin at a later step looks the same if the training is resumed just before.

    ## References
    - https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """

    code = "CKP010"
    name = "rebuilt-average"
    severity = Severity.WARNING

    def check(self, view: AverageSaved) -> Iterator[Finding]:
        """Judge what is saved after a resume."""
        is_anew = view.share_of_file <= _MOST_OF_FILE and view.share_of_start >= _LEAST_OF_START
        if not is_anew or view.likeness > _MOST_ALIKE:
            return
        of_file = max(view.share_of_file, 0.0)
        is_named = _AVERAGE.search(view.path.lower()) is not None
        yield self.finding(
            f"{view.path} of the checkpoint was not loaded: the average that is now saved there "
            f"began as a new copy of {view.first_path}",
            ranks=RankSet([view.rank]),
            step=view.step,
            location=user_location(view.site.frames),
            subjects=(view.path,),
            grade=Grade.LIKELY if is_named else Grade.NOTE,
            confidence=0.85,
            evidence=f"over {view.num_tensors} tensors it keeps {view.share_of_start:.0%} of the "
            f"{view.first_path} that was read, and {of_file:.0%} of the {view.path}",
        )
