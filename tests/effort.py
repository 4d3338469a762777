"""How much Python does for a call, in lines: the same on a busy machine as on an idle one."""

import sys


def lines_run(call):
    """Return how many lines of distdiag run while a function does.

    A loop or comprehension that stands in one line counts once for each round.
    """
    count = 0

    def in_function(frame, event, argument):
        nonlocal count
        count += event == "line"
        return in_function

    def on_call(frame, event, argument):
        nonlocal count
        if "/distdiag/" not in frame.f_code.co_filename:
            return None
        count += 1
        return in_function

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def is_linear(call, size):
    """Say whether four times as much takes at most five times as many lines; `call` gets a size."""
    call(1)  # what is loaded and compiled once
    return lines_run(lambda: call(4 * size)) <= 5 * lines_run(lambda: call(size))
