"""Write down how attributes look that the agent has wrapped: looks.py LIST OUTPUT.

In a checked process LIST is written first, from the patches that are in place.
"""

import contextlib
import copy
import gc
import importlib
import inspect
import json
import pickle
import re
import sqlite3
import sys
import types
from pathlib import Path

import safetensors.torch

KINDS = (
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    type,
)
QUESTIONS = (
    "isroutine",
    "isbuiltin",
    "isfunction",
    "ismethod",
    "ismethoddescriptor",
    "isclass",
)
NAMES = ("__name__", "__qualname__", "__module__", "__doc__", "__text_signature__")


def wrapped():
    from distdiag.probes.base import Patches

    for patches in gc.get_objects():
        if type(patches) is Patches:
            for owner, name in patches.wrapped:
                if isinstance(owner, types.ModuleType):
                    yield f"{owner.__name__}:{name}"
                else:
                    yield f"{owner.__module__}:{owner.__qualname__}.{name}"


def load(place):
    module, _, names = place.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def said(action):
    """Return what an action returns or raises, without what differs from process to process."""
    try:
        return re.sub(r"0x[0-9a-f]+", "", str(action()))
    except Exception as error:  # noqa: BLE001 (the error is the answer)
        return re.sub(r"0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")


def looks(attribute):
    found = {kind.__name__: isinstance(attribute, kind) for kind in KINDS}
    found |= {name: getattr(inspect, name)(attribute) for name in QUESTIONS}
    found |= {name: said(lambda name=name: getattr(attribute, name)) for name in NAMES}
    found["repr"] = said(lambda: repr(attribute))
    found["signature"] = said(lambda: inspect.signature(attribute))
    if not isinstance(attribute, type):
        found["type"] = str(type(attribute))
        found["is decorated"] = hasattr(attribute, "__wrapped__")
        found["arguments"] = said(lambda: inspect.getfullargspec(attribute))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found[f"pickle {protocol}"] = said(
            lambda protocol=protocol: pickle.loads(pickle.dumps(attribute, protocol)) == attribute
        )
    for how in (copy.copy, copy.deepcopy):
        found[how.__name__] = said(lambda how=how: how(attribute) == attribute)
    with contextlib.suppress(Exception):
        found["pickled"] = pickle.dumps(attribute).hex()
    return found


def main(listed, output):
    if "distdiag.agent.agent" in sys.modules and (found := sorted(set(wrapped()))):
        Path(listed).write_text(json.dumps(found))
    places = json.loads(Path(listed).read_text())
    Path(output).write_text(json.dumps({place: looks(load(place)) for place in places}))


assert sqlite3 and safetensors.torch  # imported so that they are wrapped
main(*sys.argv[1:])
