from __future__ import annotations

import inspect
import linecache
import sys
import threading
from functools import cached_property
from pathlib import Path
from types import FrameType

from distdiag.probes.files.sites import FileSites
from tests.probes.conftest import Observed


def frame_here() -> FrameType:
    return sys._getframe(1)


def test_a_stack_ends_at_the_first_frame_of_the_user(observed: Observed) -> None:
    stack = FileSites(observed.recorder).stack(frame_here())

    assert stack is not None
    assert len(stack) == 1


def test_a_library_on_the_way_is_part_of_the_stack(observed: Observed) -> None:
    class Thing:
        @cached_property
        def frame(self) -> FrameType:
            return frame_here()

    of_library = Thing().frame.f_back
    stack = FileSites(observed.recorder).stack(of_library)

    assert of_library is not None
    assert of_library.f_code.co_filename.endswith("functools.py")
    assert stack is not None
    assert len(stack) == 2


def test_the_interpreters_own_reading_is_nobodys_access(observed: Observed, folder: Path) -> None:
    observed.install("files")
    (folder / "code.py").write_text("x = 1\n")

    linecache.getline(str(folder / "code.py"), 1)
    inspect.getsourcefile(frame_here)

    assert observed.said(folder) == [("write", "code.py")]


def test_the_same_code_at_two_lines_is_two_places(observed: Observed) -> None:
    sites = FileSites(observed.recorder)
    context = observed.recorder.here.context

    def site_of(frame: FrameType) -> int:
        stack = sites.stack(frame)
        assert stack is not None
        return sites.find(stack, frame, context).number

    places = [site_of(frame_here()) for _ in range(2)]
    other = site_of(frame_here())

    assert places[0] == places[1] != other


def test_a_thread_of_a_package_shows_who_lent_it_his_stack(observed: Observed) -> None:
    sites = FileSites(observed.recorder)
    sites.lend("some_package", frame_here())
    found = {}

    def work(package: str) -> None:
        code = compile("found = look()", f"/x/site-packages/torch/{package}.py", "exec")
        exec(code, {"__name__": f"{package}.inner", "look": lambda: look(package)})

    def look(package: str) -> None:
        frame = sys._getframe(2)
        stack = (1, -1) if package == "some_package" else (2, -1)
        site = sites.find(stack, frame, observed.recorder.here.context)
        found[package] = [each.function for each in site.frames]

    for package in ("some_package", "other_package"):
        thread = threading.Thread(target=work, args=(package,))
        thread.start()
        thread.join()

    here = "test_a_thread_of_a_package_shows_who_lent_it_his_stack"
    assert here in found["some_package"]
    assert here not in found["other_package"]
