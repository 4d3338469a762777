"""HNG006: native code holds the GIL of a rank, so that none of its Python threads runs."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class HeldGil(StuckRank):
    """Native code holds the GIL of a rank, so that none of its Python threads runs.

    ## What you see
    The rank hangs, and watchdogs, signal handlers and Ctrl-C no longer work in it. Native code
    blocks without releasing the GIL, which stops every Python thread of the process, also the
    thread that could end the wait.

    ## Example
        # wrong: PyDLL keeps the GIL during the call
        library = ctypes.PyDLL("libreader.so")
        library.read_from_pipe(fd)

        # right: CDLL releases it
        library = ctypes.CDLL("libreader.so")
        library.read_from_pipe(fd)

    ## How to fix
    Release the GIL around the native call at this line: `Py_BEGIN_ALLOW_THREADS` in C,
    `py::gil_scoped_release` in pybind11, or `ctypes.CDLL` in place of `ctypes.PyDLL`.

    Changes: Other Python threads run during the call, and may see its data half done.

    Leaves: The call itself may still block for ever.

    ## When it is not a defect
    The heartbeat of the rank continues, so its background thread still runs.

    To silence it, set `ignore = ["HNG006"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/109074
    - https://docs.python.org/3/c-api/init.html#thread-state-and-the-global-interpreter-lock
    """

    code = "HNG006"
    name = "held-gil"
    severity = Severity.ERROR
    activities = frozenset({Activity.HELD_GIL})
    instead = "holds the GIL in native code, so that no Python thread runs,"
