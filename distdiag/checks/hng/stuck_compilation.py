"""HNG008: a rank compiles, or waits for somebody who does, while the others wait for it."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCompilation(StuckRank):
    """A rank compiles, or waits for somebody who does, while the others wait for it.

    ## What it detects
    The ranks that the others wait for are inside Dynamo, Inductor, Triton or the build of an
    extension, or wait for the lock file of a build, and have not moved for the hang threshold.

    ## Why it matters
    A rank that compiles anew holds up all others. A lock file that a killed build has left
    behind holds up every later start for ever.

    ## Example
    The lock of an extension build was left by a job that was killed: each rank waits in
    `FileBaton.wait`.

    ## How to fix
    If the stack shows `FileBaton.wait`, delete the file `lock` in the build folder
    (`TORCH_EXTENSIONS_DIR`). Otherwise make the ranks compile the same at the same time: equal
    shapes, `mark_dynamic`, a warm cache.

    ## References
    - `torch.utils.cpp_extension.load`, `TORCH_EXTENSIONS_DIR`
    - `TORCH_LOGS=recompiles`
    """

    code = "HNG008"
    name = "stuck-compilation"
    severity = Severity.WARNING
    activities = frozenset({Activity.COMPILATION})
    instead = "is compiling or waits for a build"

    why = (
        "Compiling takes from seconds to minutes, and the others wait in a collective meanwhile; "
        "a lock file without an owner is never released."
    )
    fix = (
        "If it waits for a lock file, make sure that no build runs and delete the file. Otherwise "
        "find out why this rank compiles alone: TORCH_LOGS=recompiles names the guard that "
        "failed."
    )
    fix_changes = "The extension is built again by the first rank that comes."
    fix_leaves = "Other stale locks in the same folder."
    disproof = "The compilation ends by itself and the job goes on."
