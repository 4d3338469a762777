from __future__ import annotations

import signal
import threading
import traceback
from types import FrameType

import pytest
import torch

from distdiag.event import Raised, Signalled
from distdiag.probes.exceptions import ExceptionWatch, strip_own_frames
from distdiag.status_page import read_status
from tests.probes.conftest import Observed


@pytest.fixture
def watch(observed: Observed) -> ExceptionWatch:
    made = ExceptionWatch(observed.recorder, after_raise=lambda: None)
    made.install()
    observed.probes.append(made)
    return made


def _fail() -> None:
    raise KeyError("model.weight")


def test_what_ends_the_rank_is_recorded_with_its_frames(
    observed: Observed, watch: ExceptionWatch
) -> None:
    try:
        _fail()
    except KeyError as error:
        watch.raised(error, error.__traceback__)

    (event,) = observed.events(Raised)
    assert (event.type, event.message, event.thread) == ("KeyError", "'model.weight'", "MainThread")
    assert event.frames[0].function == "_fail"
    assert event.frames[0].user
    assert "model.weight" in event.traceback
    assert read_status(observed.folder / "rank-0.status").raised


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_a_thread_does_not_end_the_rank(
    observed: Observed, watch: ExceptionWatch
) -> None:
    thread = threading.Thread(target=_fail, name="loader")

    thread.start()
    thread.join()

    (event,) = observed.events(Raised)
    assert event.thread == "loader"
    assert not read_status(observed.folder / "rank-0.status").raised


def test_a_signal_handler_of_the_script_runs_and_is_recorded(
    observed: Observed, watch: ExceptionWatch
) -> None:
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert signal.getsignal(signal.SIGUSR1) is handler
        signal.raise_signal(signal.SIGUSR1)
        assert signal.signal(signal.SIGUSR1, handler) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert received == [signal.SIGUSR1]
    assert [event.signal for event in observed.events(Signalled)] == [signal.SIGUSR1]


def test_default_dispositions_pass_through(observed: Observed, watch: ExceptionWatch) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_frames_of_the_tool_do_not_show_in_a_traceback(
    observed: Observed, watch: ExceptionWatch
) -> None:
    observed.install("save")
    with pytest.raises(FileNotFoundError) as caught:
        torch.load(observed.folder / "no-such-model.pt")
    assert any("distdiag/probes" in entry.filename for entry in traceback.extract_tb(caught.tb))

    trace = strip_own_frames(caught.tb)

    assert "torch" in traceback.extract_tb(trace)[-1].filename
    assert not any("distdiag/" in frame.filename for frame in traceback.extract_tb(trace))
