"""Where the user's code made what findings name: models, optimizers, data loaders, meshes."""

import inspect
from types import CodeType, FrameType
from typing import Any

from distdiag.events.base import Frame
from distdiag.events.models import ObjectCreated, ObjectKind
from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers
from distdiag.record.recorder import Recorder
from distdiag.record.user_code import is_user_file


class Creations:
    """Takes note of objects as they are made, and writes down those that events name."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: WeakMap[Any, Frame] = WeakMap()
        self._told: dict[tuple[ObjectKind, str], WeakMembers[Any]] = {}

    def note(self, new: object, frame: FrameType) -> None:
        """Remember which line of the user's code makes an object; `frame` is in its constructor."""
        found = creator(type(new), frame, self._recorder.main_script)
        if found is not None:
            self._known[new] = found

    def tell(self, kind: ObjectKind, name: str, *objects: object) -> None:
        """Write down, once, where what events call so was made: the first of these that is known.

        Written, too, where that is not known: another object may have the same name.
        """
        told = self._told.setdefault((kind, name), WeakMembers())
        if objects[0] in told:
            return
        told.add(objects[0])
        places = (self._known.get(each) for each in objects)
        place = next((each for each in places if each is not None), None)
        self._recorder.event(ObjectCreated, object_kind=kind, name=name, place=place)


def creator(kind: type, frame: FrameType | None, main_script: str | None) -> Frame | None:
    """Return the innermost line of the user's code outside of the constructors of a class."""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename, main_script) and not _constructs(kind, code):
            return Frame(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name)
        frame = frame.f_back
    return None


def _constructs(kind: type, code: CodeType) -> bool:
    """Say whether this is the code of a constructor of a class, or of one that it inherits from."""
    if code.co_name != "__init__":
        return False
    own = (vars(each).get("__init__") for each in kind.__mro__)
    return any(getattr(inspect.unwrap(each), "__code__", None) is code for each in own if each)
