#!/usr/bin/env python3
"""Count the parameters of a model by module, and name the largest tensors. No weights are loaded.

    python scripts/count_parameters.py MODULE:FACTORY [--depth 2]
    python scripts/count_parameters.py model.safetensors | FOLDER | checkpoint.pt

MODULE:FACTORY is imported from the current folder, called without arguments and built on torch's
meta device. Of safetensors files the headers are read; a checkpoint of torch is opened with
weights_only=True, on the meta device. Exits with 2 if the model cannot be found.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

from distdiag.events.errors import DistdiagError, UsageError
from distdiag.metrics.parameters import Parameters, Shape, count_parameters, shapes_in_safetensors

MOST_ROWS = 20


def main() -> int:
    """Print the modules and the largest tensors with their shares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODULE:FACTORY|CHECKPOINT")
    parser.add_argument("--depth", type=int, default=2, help="parts of a name that are a module")
    given = parser.parse_args()
    try:
        shapes = shapes_of(given.model)
    except DistdiagError as error:
        print(f"count_parameters: {error}", file=sys.stderr)
        return 2
    print(table(count_parameters(shapes, depth=max(given.depth, 1))))
    return 0


def shapes_of(model: str) -> dict[str, Shape]:
    """Return the shapes of a model's tensors, by where it is."""
    path = Path(model)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{path}: holds no safetensors file")
        return shapes_in_safetensors(files)
    if path.suffix == ".safetensors":
        return shapes_in_safetensors([path])
    if path.is_file():
        return shapes_in_checkpoint(path)
    module, colon, factory = model.partition(":")
    if not colon:
        raise UsageError(f"{model}: neither a file nor MODULE:FACTORY")
    return shapes_of_factory(module, factory)


def shapes_in_checkpoint(path: Path) -> dict[str, Shape]:
    """Return the shapes of the state dict in a checkpoint of torch."""
    import torch

    try:
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError, OSError, EOFError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"{path}: cannot be read without running its code: {first}") from None
    shapes = _tensors(content)
    if not shapes:
        raise UsageError(f"{path}: holds no state dict")
    return shapes


def _tensors(content: object) -> dict[str, Shape]:
    """Return the tensors of the first dict that holds some: a state dict, or one level below."""
    import torch

    if not isinstance(content, Mapping):
        return {}
    found = {
        str(name): tuple(value.shape)
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }
    below = (_tensors(value) for value in content.values() if isinstance(value, Mapping))
    return found or max(below, key=len, default={})


def shapes_of_factory(module: str, factory: str) -> dict[str, Shape]:
    """Return the shapes of the parameters of the module that a function makes."""
    import torch

    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{module}:{factory}: {error}") from None
    with torch.device("meta"):
        model = make()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{module}:{factory}: makes a {type(model).__name__}, not a Module")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def table(counted: Parameters) -> str:
    """Return the text that is printed."""
    lines = [f"{counted.total:,} parameters in {len(counted.tensors)} tensors"]
    for title, counts in (("modules", counted.modules), ("largest tensors", counted.tensors)):
        lines += ["", title]
        lines += [f"  {c.number:>16,}  {c.share:6.1%}  {c.name}" for c in counts[:MOST_ROWS]]
        if len(counts) > MOST_ROWS:
            lines.append(f"  and {len(counts) - MOST_ROWS} more")
    if counted.tensors:
        largest = counted.tensors[0]
        lines += ["", f"{largest.share:.0%} of the parameters are in {largest.name}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
