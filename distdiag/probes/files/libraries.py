"""Functions of libraries that read and write files in C++ or Rust, where no `open` is seen.

Measured: torch.save to a path, torch.jit, torch.export, safetensors, h5py and pyarrow open files by
themselves. torch.load, distributed checkpoints, numpy (its memmap too), zip and tar archives and
huggingface_hub open, rename and lock theirs by the functions of Python.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple

from distdiag.events.files import FileAction
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.call_sites import caller
from distdiag.probes.files.log import Access, Attempt, FileLog
from distdiag.probes.files.open_files import IsOpen, file_is_open
from distdiag.probes.files.opens import mode_of
from distdiag.probes.files.paths import as_text

# A patch for a class of C that nobody can derive from, so that its objects are made by us.
#
# Functions of C are wrapped where they are (`in_place.py`), and classes of Python by their methods.


class ClassPatch:
    """Is called in place of a class, and looks like it: it is equal, though it is not the same."""

    __wrapped__: AnyCallable

    def __init__(self, original: AnyCallable) -> None:
        functools.update_wrapper(self, original)
        with suppress(ValueError, TypeError):  # since Python 3.12 classes are not looked behind
            self.__signature__ = inspect.signature(original)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Be of the type that the class has."""
        return type(self.__wrapped__)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call what each patch has in its place."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> object:
        """Have what the class has."""
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        """Be found where the class is."""
        return hash(self.__wrapped__)

    def __instancecheck__(self, instance: object) -> bool:
        """Have the objects of the class."""
        return isinstance(instance, self.__wrapped__)  # type: ignore[arg-type]

    def __subclasscheck__(self, kind: type) -> bool:
        """Have no class below but the class."""
        return self == kind or issubclass(kind, self.__wrapped__)  # type: ignore[arg-type]

    def __reduce_ex__(self, _: object) -> str:
        """Be pickled by name, as a class is."""
        return self.__wrapped__.__qualname__


def patch_class(original: AnyCallable, call: AnyCallable) -> ClassPatch:
    """Return what is to be put in place of `original`; it calls `call`."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    kind = type("ClassPatch", (ClassPatch,), {"__call__": staticmethod(call)})
    made: ClassPatch = kind(original)
    return made


# The table of libraries, and the probe that wraps their functions.


class Library(NamedTuple):
    """A function, or a class that opens a file when it is made, and which argument is the path.

    `place` counts from 0, without `self`. `has_mode`: the argument behind it, `mode`, is as that of
    `open` and overrules `action`; ``"r"`` if it is left out.
    """

    module: str
    name: str
    api: str
    action: FileAction
    place: int
    parameter: str
    has_mode: bool = False


_READ: Final = FileAction.READ
_WRITE: Final = FileAction.WRITE

LIBRARIES: Final = (
    Library("torch.serialization", "save", "torch.save", _WRITE, 1, "f"),
    Library("torch.jit._serialization", "save", "torch.jit.save", _WRITE, 1, "f"),
    Library("torch.jit._serialization", "load", "torch.jit.load", _READ, 0, "f"),
    Library("torch.export", "save", "torch.export.save", _WRITE, 1, "f"),
    Library("safetensors", "serialize_file", "safetensors.save_file", _WRITE, 1, "filename"),
    Library("safetensors", "safe_open", "safetensors.safe_open", _READ, 0, "filename"),
    Library("h5py._hl.files", "File", "h5py.File", _READ, 0, "name", has_mode=True),
    Library("pyarrow.lib", "OSFile", "pyarrow.OSFile", _READ, 0, "path", has_mode=True),
    Library("pyarrow.lib", "memory_map", "pyarrow.memory_map", _READ, 0, "path", has_mode=True),
    Library("pyarrow.parquet.core", "write_table", "pyarrow.parquet", _WRITE, 1, "where"),
    Library("pyarrow.parquet.core", "read_table", "pyarrow.parquet", _READ, 0, "source"),
)

_DCP: Final = "torch.distributed.checkpoint"

LENDERS: Final = (
    (f"{_DCP}.state_dict_saver", "save", _DCP),
    (f"{_DCP}.state_dict_saver", "async_save", _DCP),
    (f"{_DCP}.state_dict_loader", "load", _DCP),
    ("datasets.load", "load_from_disk", "datasets"),
)
"""Functions that let threads of their package do the work, on behalf of the code that called them:
the module, the name, and the package."""

MODULES: Final = frozenset({row.module for row in LIBRARIES} | {module for module, _, _ in LENDERS})


def replace_in(module_name: str, log: FileLog, patches: Patches) -> None:
    """Put the functions of a module that has just been imported under observation."""
    module = sys.modules[module_name]
    for row in LIBRARIES:
        if row.module == module_name:
            found = vars(module).get(row.name)
            if inspect.isclass(found) and "__init__" in vars(found):
                patches.wrap(found, "__init__", partial(_writing_method, row=row, log=log))
            else:
                patches.wrap_everywhere(module, row.name, partial(_function, row=row, log=log))
    for owner, name, package in LENDERS:
        if owner == module_name:
            patches.wrap_everywhere(module, name, partial(_lending, package=package, log=log))


def _function(original: AnyCallable, row: Library, log: FileLog) -> AnyCallable:
    def call(*args: object, **kwargs: object) -> object:
        return _observed(log, row, caller(), original, args, kwargs)

    is_class = inspect.isclass(original)
    return patch_class(original, call) if is_class else wrap_like(original)(call)


def _writing_method(original: AnyCallable, row: Library, log: FileLog) -> AnyCallable:
    @wrap_like(original)
    def method(self_: object, *args: object, **kwargs: object) -> None:
        def create(*args: object, **kwargs: object) -> object:
            original(self_, *args, **kwargs)
            return self_

        _observed(log, row, caller(), create, args, kwargs)

    return method


def _observed(
    log: FileLog,
    row: Library,
    frame: FrameType,
    original: AnyCallable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    if log.probe.off or log.recorder.closed:
        return original(*args, **kwargs)
    access = None
    with log.guard:
        attempt = _attempt(row, args, kwargs)
        access = None if attempt is None else log.begin(attempt, frame)
    if access is None:
        return original(*args, **kwargs)
    return log.carry_out(access, log.hiding(original), (args, kwargs), partial(_returned, log))


def _attempt(row: Library, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt | None:
    place = row.place
    path = as_text(args[place] if place < len(args) else kwargs.get(row.parameter))
    if path is None:
        return None
    action, is_exclusive = row.action, False
    if row.has_mode:
        mode = args[place + 1] if place + 1 < len(args) else kwargs.get("mode")
        action, is_exclusive, _ = mode_of(mode if isinstance(mode, str) else "r")
        action = _READ if action is _READ else _WRITE  # none of them only appends
    return Attempt(action, path, row.api, "", is_exclusive, has_end=action is _WRITE)


def _returned(log: FileLog, access: Access, result: object) -> None:
    if access.key[0].action is _READ:
        log.succeeded(access)
        return
    is_open = _handle(result)
    if is_open is None:
        log.ended(access, has_content=True)
    else:
        log.opened(access, is_open, has_content=False)


def _handle(result: object) -> IsOpen | None:
    """Return what tells whether a library's file object is open; None if this is none."""
    if isinstance(getattr(result, "closed", None), bool):
        return file_is_open(result)
    if not hasattr(type(result), "swmr_mode"):
        return None
    reference = weakref.ref(result)  # an HDF5 file is true while it is open

    def is_open() -> bool:
        living = reference()
        return living is not None and bool(living)

    return is_open


def _lending(original: AnyCallable, package: str, log: FileLog) -> Callable[..., Any]:
    @wrap_like(original)
    def function(*args: object, **kwargs: object) -> object:
        if not log.probe.is_off:
            with log.guard:
                log.sites.lend(package, caller())
        return original(*args, **kwargs)

    return function
