"""How a rank ends that `distdiag.check` does not run: told by Python, or by `multiprocessing`."""

import sys
from typing import Final

from distdiag.agent.agent import RankAgent
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard, guarded, warn

_FIRST: Final = 1 << 30
"""Before the finalizers of the program, which may stop what peers wait for."""


def watch_end(agent: RankAgent) -> None:
    """Let the agent see with what this process ends."""
    guarded(agent.exceptions.watch_excepthook, "watching sys.excepthook")
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        # Called while what the function of the process has raised is still on its way.
        Finalize(None, _note_end, args=(agent,), exitpriority=_FIRST)


def _note_end(agent: RankAgent) -> None:
    with Guard(lambda error: warn(f"at the end of a rank: {error}")):
        error = sys.exc_info()[1]
        if error is None:
            return
        if isinstance(error, SystemExit):
            cause = error.__context__
            if cause is None or not _comes_from_torch(error):
                agent.will_exit(error)
                return
            error = cause
        agent.exit_status = 1
        agent.exceptions.raised(error, error.__traceback__)
        agent.wait_for_last_words()


def _comes_from_torch(error: SystemExit) -> bool:
    """Whether `torch.multiprocessing` exits for an exception that it passes on to the parent."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module: Untyped = sys.modules.get("torch.multiprocessing.spawn")
    if trace is None or module is None:
        return False
    return trace.tb_frame.f_code is module._wrap.__code__
