"""Which modules of a model are read, the hooks that they have meanwhile, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from distdiag.probes.models.modules import (
    ModuleHook,
    class_name,
    clean_name,
    is_compiled,
    own_buffers,
    own_modules,
    own_parameters,
)
from distdiag.probes.models.registry import ModelNames
from distdiag.probes.models.wrappers import sharded_parameters, walk
from distdiag.probes.numerics.ranges import Reading

_MOST_MODULES: Final = 4096
"""Of a model with more modules the first ones are read: hooks of all would take milliseconds."""

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
_WORDS: Final = {"gradient": "the gradient of its", "weight-gradient": "the gradient of its"}


class Watched(NamedTuple):
    """A module with its path in the model and its class, and the same of what contains it."""

    module: nn.Module
    name: str
    kind: str
    parent: str
    parent_kind: str
    is_block: bool = False


def all_modules(root: nn.Module) -> list[Watched]:
    """Return the modules below the root whose forward passes can be seen, in their order."""
    return list(_walk(root, lambda _: True))[:_MOST_MODULES]


def block_modules(root: nn.Module) -> list[Watched]:
    """Return the modules that together are the model: layers of lists, and what stands beside.

    A list of layers is looked into, however deep it stands; a layer is not.
    """
    blocks = [each._replace(is_block=True) for each in _walk(root, _holds_list)]
    return blocks[:_MOST_MODULES]


def computing_modules(root: nn.Module) -> list[Watched]:
    """Return the blocks, and in them the modules with parameters of their own, in their order.

    Others compute on single elements as a rule: what they make of finite numbers is finite.
    """
    blocks = {id(each.module) for each in block_modules(root)}
    found = [
        each._replace(is_block=id(each.module) in blocks)
        for each in all_modules(root)
        if id(each.module) in blocks or own_parameters(each.module)
    ]
    return found


def _holds_list(module: nn.Module) -> bool:
    """Say whether a module is to be looked into: it is a list of layers or holds one."""
    return any(_is_list(part) for part in module.modules())


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return any(own_modules(part) for part in module.children())
    return isinstance(module, _CONTAINERS)


def _walk(root: nn.Module, is_open: Callable[[nn.Module], bool]) -> Iterator[Watched]:
    """Yield modules whose own are yielded too where `is_open`; those that are compiled are not."""
    seen = {id(root)}
    waiting = [("", root, "", class_name(root))]
    while waiting:
        name, module, parent, parent_kind = waiting.pop(0)
        is_root = module is root
        clean = clean_name(name)
        if not is_root and not isinstance(module, _CONTAINERS):
            yield Watched(module, clean, class_name(module), parent, parent_kind)
            parent, parent_kind = clean, class_name(module)
        if not is_root and not is_open(module):
            continue
        below = []
        for key, child in own_modules(module).items():
            if child is None or id(child) in seen or _is_closed(child):
                continue
            seen.add(id(child))
            below.append((f"{name}.{key}" if name else key, child, parent, parent_kind))
        waiting[:0] = below


def _is_closed(module: nn.Module) -> bool:
    """Say whether a module runs as one piece, into which no hook must come."""
    return is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


Before = Callable[[Watched, object], None]
After = Callable[[Watched, object], None]


class ForwardHooks:
    """Hooks of modules that are there for one forward pass of the training only.

    In evaluation some modules of torch compute in another way where any module has a hook.
    """

    def __init__(self, before: Before, after: After) -> None:
        """Call these, which raise nothing, with what a module is given and has returned."""
        self._before = before
        self._after = after
        self._handles: list[Any] = []

    def add(self, modules: Sequence[Watched], *, with_inputs: bool) -> None:
        """Put hooks on these modules, in front of which they see inputs only where wanted."""
        for watched in modules:
            module = watched.module
            if with_inputs:
                hook = ModuleHook(self._entering(watched))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            hook = ModuleHook(self._leaving(watched))
            self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Take all hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _entering(self, watched: Watched) -> Callable[..., None]:
        before = self._before

        def enter(_: nn.Module, args: object, kwargs: object) -> None:
            before(watched, (args, kwargs))

        return enter

    def _leaving(self, watched: Watched) -> Callable[..., None]:
        after = self._after

        def leave(_: nn.Module, __: object, output: object) -> None:
            after(watched, output)

        return leave


class TensorNames:
    """Names what models hold."""

    def __init__(self, roots: Callable[[], Sequence[nn.Module]], models: ModelNames) -> None:
        """`roots` returns the models that there are."""
        self._roots = roots
        self._models = models

    def name(self, reading: Reading) -> None:
        """Say in a reading of a parameter which one it is."""
        if reading.parameter is None:
            return
        tensor, reading.parameter = reading.parameter(), None
        word = _WORDS.get(reading.stage, "its")
        reading.what = f"{word} parameter"
        for root in self._roots() if tensor is not None else ():
            for module, name, held in _held(root):
                if held is tensor:
                    reading.model = self._models.name(root)
                    reading.module, reading.kind = module
                    reading.what = f"{word} {name}"
                    return


def _held(root: nn.Module) -> Iterator[tuple[tuple[str, str], str, torch.Tensor]]:
    """Yield each tensor of a model: path and class of the module, its name in it, itself."""
    tree = list(walk(root))
    sharded = sharded_parameters(tree)
    for path, module, _ in tree:
        place = (clean_name(path), class_name(module))
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            record = sharded.get((id(module), name))
            if record is not None:
                yield place, name, record.sharded_param
            if tensor is not None:
                yield place, name, tensor
