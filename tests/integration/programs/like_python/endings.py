"""Ends in the way that its argument names."""

import atexit
import os
import signal
import sys
import threading
import time


def leave_by_return() -> None:
    print("returning")


def leave_by_status() -> None:
    sys.exit(3)


def leave_by_message() -> None:
    raise SystemExit("the data folder is missing")


def leave_by_true() -> None:
    sys.exit(True)


def leave_by_none() -> None:
    sys.exit()


def leave_by_exception() -> None:
    raise ValueError("learning rate must be positive")


def leave_by_chained_exception() -> None:
    try:
        leave_by_exception()
    except ValueError as error:
        raise RuntimeError("training failed") from error


def leave_by_interrupt() -> None:
    raise KeyboardInterrupt


def leave_by_own_hook() -> None:
    sys.excepthook = lambda kind, value, _traceback: print("hook", kind.__name__, value)
    leave_by_exception()


def leave_by_os_exit() -> None:
    os._exit(4)


def leave_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def leave_with_thread() -> None:
    def work() -> None:
        time.sleep(0.5)
        print("thread is done; main thread alive:", threading.main_thread().is_alive())

    threading.Thread(target=work).start()
    print("main is done")


def leave_with_failed_thread() -> None:
    thread = threading.Thread(target=leave_by_exception, name="loader")
    thread.start()
    thread.join()
    print("main goes on")


def leave_by_failing_handler() -> None:
    atexit.register(leave_by_exception)


ENDINGS = {name: value for name, value in globals().items() if name.startswith("leave_")}

if __name__ == "__main__":
    atexit.register(print, "first handler registered")
    atexit.register(print, "second handler registered")
    print("signals", signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    ENDINGS[sys.argv[1]]()
