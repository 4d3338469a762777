"""HNG006: native code holds the GIL of a rank, so that none of its Python threads runs."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class HeldGil(StuckRank):
    """Native code holds the GIL of a rank, so that none of its Python threads runs.

    ## What it detects
    The rank's own background thread has not run for several seconds while the process lives,
    and the job stands still. The stack shows the Python line that called into native code.

    ## Why it matters
    No Python thread of the process can do anything, watchdogs and signal handlers included; the
    process cannot even be interrupted with Ctrl-C.

    ## Example
    An extension reads from a pipe without releasing the GIL, and the thread that should write
    into the pipe needs it.

    ## How to fix
    Release the GIL around the blocking call (`Py_BEGIN_ALLOW_THREADS`,
    `py::gil_scoped_release`, `ctypes.CDLL` instead of `ctypes.PyDLL`).

    ## References
    - Python/C API: thread state and the global interpreter lock
    """

    code = "HNG006"
    name = "held-gil"
    severity = Severity.ERROR
    activities = frozenset({Activity.HELD_GIL})
    instead = "holds the GIL in native code, so that no Python thread runs,"

    why = (
        "Native code that blocks without releasing the GIL stops every thread of its process, "
        "also the one that it waits for."
    )
    fix = (
        "Release the GIL around the native call at this line, or call it through an interface "
        "that does (ctypes.CDLL instead of ctypes.PyDLL)."
    )
    fix_changes = "Other Python threads run during the call, and may see its data half done."
    fix_leaves = "The call itself may still block for ever."
    disproof = "The heartbeat of the rank goes on: its background thread still runs."
