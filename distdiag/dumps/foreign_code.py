"""Whether a file that a dump names is the user's own, when the dump was made on another machine."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Final

from distdiag.user_code import FRAMEWORKS, LIBRARIES, is_user_file

_STDLIB: Final = re.compile(r"/(?:lib|lib64|Lib)/python3\.\d+t?/(?!site-packages/|dist-packages/)")
_FOREIGN: Final = FRAMEWORKS | LIBRARIES | sys.stdlib_module_names | {"distdiag"}


@lru_cache(maxsize=4096)
def is_foreign_user_file(path: str) -> bool:
    """Whether frames of this file are the user's own, judged by the path alone.

    A path that is not absolute begins with the name of a module, as py-spy shortens it.
    """
    if not path.startswith("/"):
        first = PurePosixPath(path).parts[:1]
        if not first or first[0].removesuffix(".py") in _FOREIGN:
            return False
    return _STDLIB.search(path) is None and is_user_file(path, None)
