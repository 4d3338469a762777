"""The exceptions of distdiag.

DistdiagError
├── UsageError            the command line, the configuration or the run directory is wrong: exit 2
├── RankError             it is not known which rank a process is, or it is that of another process
├── DamagedFileError      a file of a run cannot be read; the rest of the run still can
├── CollectiveMismatchError  raised at the user's line by the active mode ``--strict``
└── SequenceFaultError    raised on request where sequence parallelism loses or moves tokens
"""

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be: text that is no UTF-8 and deep
nesting are no `MsgspecError`."""


class DistdiagError(Exception):
    """Anything that distdiag raises on purpose."""


class UsageError(DistdiagError):
    """The user asked for something that cannot be done; the message is one line that says what."""


class RankError(DistdiagError):
    """A process cannot be observed as a rank of its run; its script goes on all the same."""


class DamagedFileError(DistdiagError):
    """A file of a run is damaged or foreign."""


class CollectiveMismatchError(DistdiagError):
    """The ranks are about to issue collectives that contradict one another (``--strict``)."""


class SequenceFaultError(DistdiagError):
    """Tokens did not come through split, attention and gather as they should."""
