"""A hook of a module that no copy of the module and no file keeps."""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn

# The names of modules and parameters as the user knows them.

# What wrappers put into the names of modules; the user never wrote it.
_WRAPPERS: Final = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)(?=\.|$)"
)


def clean_name(name: str) -> str:
    """Return the name of a module as the user knows it."""
    return _WRAPPERS.sub("", name).lstrip(".")


# What a module itself has, also where TorchScript keeps it.
#
# The tables of a scripted module are none of Python's: they can neither be walked over nor asked
# for what they do not have.


def class_name(module: nn.Module) -> str:
    """Return the class that the user wrote: FSDP2 makes one of its own from it."""
    return type(module).__name__.removeprefix("FSDP")


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that are parts of this one, without theirs."""
    return dict(module._modules.items())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return its own parameters, without those of its parts."""
    return dict(module._parameters.items())


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return its own buffers, without those of its parts."""
    return dict(module._buffers.items())


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled as a whole."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None


# The places in a module for which a checkpoint holds a tensor.

_COUNTER = "num_batches_tracked"  # old checkpoints lack it, and torch itself copes with that


class Slot(NamedTuple):
    """One parameter or persistent buffer, by the module that has it."""

    owner: weakref.ref[nn.Module]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells this place from others while the module lives."""
        return id(self.owner()), self.name

    def tensor(self) -> torch.Tensor | None:
        """Return what is there now."""
        module = self.owner()
        if module is None:
            return None
        found = own_parameters(module).get(self.name)
        return own_buffers(module).get(self.name) if found is None else found


def slots_of(root: nn.Module) -> Iterator[tuple[str, Slot, torch.Tensor]]:
    """Yield name, place and tensor of what a checkpoint of a module should hold."""
    for path, module in root.named_modules(remove_duplicate=False):
        here = weakref.ref(module)
        hidden = module._non_persistent_buffers_set
        named = [*own_parameters(module).items(), *own_buffers(module).items()]
        for name, tensor in named:
            if tensor is not None and name not in hidden and name != _COUNTER:
                yield f"{path}.{name}" if path else name, Slot(here, name), tensor


# The hook.


class ModuleHook:
    """Calls `tell` with what a hook is given, never while a graph is compiled.

    A copy of the module, also one in a file, gets a hook that does nothing and is Python's own.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        """Tell this; it raises nothing."""
        self._tell = tell

    def __call__(self, *args: object) -> None:
        """Tell of a forward pass."""
        if not torch.compiler.is_compiling():
            self._tell(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., Any]:
        """Let a copy do nothing."""
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        """Let what is read from a file do nothing."""
        return (getattr, (contextlib.nullcontext(), "__exit__"))
