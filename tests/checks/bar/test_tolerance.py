import pytest

from distdiag.checks.bar.races import tolerates_absence, tolerates_damage
from distdiag.events.base import CallSite, Frame
from tests.checks.streams import Program

CASES = {
    "bare": ("load()", False, False),
    "absence": ("try:\n    load()\nexcept FileNotFoundError:\n    pass", True, False),
    "one of several": ("try:\n    load()\nexcept (KeyError, OSError):\n    pass", True, False),
    "anything": ("try:\n    load()\nexcept Exception:\n    value = None", True, True),
    "all": ("try:\n    load()\nexcept:\n    value = None", True, True),
    "again": ("try:\n    load()\nexcept Exception:\n    log()\n    raise", False, False),
    "another": ("try:\n    load()\nexcept KeyError:\n    pass", False, False),
    "in the handler": ("try:\n    fetch()\nexcept OSError:\n    load()", False, False),
    "suppressed": ("with contextlib.suppress(OSError):\n    load()", True, False),
    "forgiving": ("load(cache, ignore_errors=True)", True, False),
    "strict": ("load(cache, ignore_errors=False)", False, False),
}


@pytest.mark.parametrize(("code", "absence", "damage"), CASES.values(), ids=CASES)
def test_what_a_line_copes_with(tmp_path, code, absence, damage):
    site = Program(tmp_path, code).site("load(")
    assert (tolerates_absence(site), tolerates_damage(site)) == (absence, damage)


def test_a_library_may_cope_with_it(tmp_path):
    library = Program(tmp_path, "try:\n    open(path)\nexcept OSError:\n    pass").frame("open")
    frame = Frame(library.file, library.line, library.function, user=False)
    assert tolerates_absence(CallSite((frame, Frame("train.py", 3, "main"))))


def test_a_handler_of_everything_far_outside_is_not_meant_for_the_access(tmp_path):
    program = Program(tmp_path, "try:\n    main()\nexcept Exception:\n    pass")
    inner = (Frame("a.py", 1, "read"), Frame("b.py", 2, "load"))
    assert not tolerates_absence(CallSite((*inner, program.frame("main()"))))
    assert tolerates_absence(CallSite((inner[0], program.frame("main()"))))


def test_what_calls_the_users_code_is_not_meant_for_the_access(tmp_path):
    runner = Program(
        tmp_path, "try:\n    test()\nexcept BaseException as error:\n    result = error"
    )
    frame = runner.frame("test()")
    outer = Frame(frame.file, frame.line, frame.function, user=False)
    site = CallSite((Frame("test_it.py", 3, "test"), outer))
    assert not tolerates_absence(site)
    assert not tolerates_damage(site)
    assert tolerates_damage(CallSite((outer,)))  # a thread of a library shows nothing of the user
