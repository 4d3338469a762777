"""What one thread of a rank is in the middle of, so that one probe can tell another."""

import threading

Calls = list[tuple[int, bool]]


class ThreadContext:
    """What one thread is in the middle of, so that one probe can tell another.

    `is_recorded`: the call on its way to the backend has been written down. `coalesced` collects
    the calls of a coalescing block, each with whether the user's own code made it. `awaited` is the
    call that has returned and will wait, with the id of its Work. `module` is the FQN of the
    module that is being worked for. `is_functional`: a functional collective runs, with the
    operator `reduce_op`. `name` is the thread's, None in the main thread; `is_native`: C++ started
    it. `in_file_call`: what is done with files now is our own doing, or a part of a call that is
    written down already.
    """

    __slots__ = (
        "awaited",
        "backward_depth",
        "coalesced",
        "in_file_call",
        "is_functional",
        "is_native",
        "is_recorded",
        "module",
        "name",
        "reduce_op",
    )

    def __init__(self) -> None:
        # Not current_thread(): that would register a dummy for a thread of C++.
        thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        self.is_native = thread is None
        self.name = None if thread is threading.main_thread() else _name(thread)
        self.reduce_op: str | None = None
        self.coalesced: Calls | None = None
        self.awaited: tuple[int, Calls] = (0, [])
        self.module: str | None = None
        self.is_recorded = False
        self.is_functional = False
        self.in_file_call = False
        self.backward_depth = 0


class Here(threading.local):
    """The context of the thread that asks: one look-up where several things are needed."""

    def __init__(self) -> None:
        self.context = ThreadContext()


def _name(thread: threading.Thread | None) -> str:
    return "native" if thread is None else thread.name
