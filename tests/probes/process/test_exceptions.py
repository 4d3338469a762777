from __future__ import annotations

import signal
import sys
import threading
import traceback
from types import FrameType

import pytest
import torch

from distdiag.events.lifecycle import Raised, Signalled
from distdiag.probes.process.exceptions import (
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    ExceptionProbe,
    strip_own_frames,
)
from distdiag.record.status_page import read_status
from tests.probes.conftest import Observed


@pytest.fixture
def watch(observed: Observed) -> ExceptionProbe:
    made = ExceptionProbe(observed.recorder, after_raise=lambda: None)
    made.install()
    observed.probes.append(made)
    return made


def _fail() -> None:
    raise KeyError("model.weight")


def test_what_ends_the_rank_is_recorded_with_its_frames(
    observed: Observed, watch: ExceptionProbe
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


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")

    __repr__ = __str__


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(5)


class Shouting(str):
    def __str__(self) -> str:
        raise AssertionError

    encode = None  # type: ignore[assignment]


class Lying(type):
    __name__ = property(lambda kind: 1 / 0)  # type: ignore[assignment]
    __module__ = property(lambda kind: 1 / 0)  # type: ignore[assignment]


class Lie(Exception, metaclass=Lying):
    pass


def _recorded(observed: Observed, watch: ExceptionProbe, error: BaseException) -> Raised:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 (of any kind)
        watch.raised(raised, raised.__traceback__)
    (event,) = observed.events(Raised)
    assert not watch.is_off
    return event


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Silent(), "(its message cannot be shown: __str__ raised RuntimeError)"),
        (Leaving(), "(its message cannot be shown: __str__ raised SystemExit)"),
        (ValueError("caf\udce9"), "caf\\udce9"),
        (ValueError(Shouting("a")), "(its message cannot be shown: __str__ raised AssertionError)"),
        (Lie("a"), "a"),
        (KeyError(Silent()), "(its message cannot be shown: __str__ raised RuntimeError)"),
    ],
)
def test_an_exception_is_recorded_whatever_its_class_does(
    observed: Observed, watch: ExceptionProbe, error: BaseException, message: str
) -> None:
    event = _recorded(observed, watch, error)
    assert event.message == message
    assert event.type.rpartition(".")[2] == type.__dict__["__name__"].__get__(type(error))
    assert event.frames[0].function == "_recorded"
    assert "in _recorded" in event.traceback


def test_notes_that_cannot_be_shown_do_not_hide_the_frames(
    observed: Observed, watch: ExceptionProbe
) -> None:
    error = ValueError("a")
    error.__notes__ = [Silent()]  # type: ignore[list-item]
    assert "in _recorded" in _recorded(observed, watch, error).traceback


@pytest.mark.parametrize("message", ["x" * 200_000, "a line\n" * 50_000, "é\n" * 100_000])
def test_a_huge_message_hides_neither_the_frames_nor_its_own_end(
    observed: Observed, watch: ExceptionProbe, message: str
) -> None:
    event = _recorded(observed, watch, ValueError(f"{message}the end"))
    assert event.traceback.startswith("Traceback (most recent call last)")
    assert "in _recorded" in event.traceback
    assert event.traceback.rstrip().endswith("the end")
    assert event.message.endswith("the end")
    assert len(event.message) <= LONGEST_MESSAGE
    assert len(event.traceback) <= LONGEST_TRACEBACK


def test_a_recursion_and_a_group_with_causes_keep_their_ends(
    observed: Observed, watch: ExceptionProbe
) -> None:
    def fall(depth: int) -> None:
        fall(depth + 1)

    inner: list[Exception] = []
    for number in range(30):
        try:
            raise KeyError(f"{number} " * 500)
        except KeyError as error:
            inner.append(error)
    try:
        try:
            fall(0)
        except RecursionError as deep:
            raise ExceptionGroup("many", inner) from deep
    except ExceptionGroup as group:
        event = _recorded(observed, watch, group)
    assert "more times]" in event.traceback
    assert "in _recorded" in event.traceback
    assert "ExceptionGroup: many (30 sub-exceptions)" in event.traceback
    assert len(event.traceback) <= LONGEST_TRACEBACK


def test_an_exit_is_read_with_its_line_and_its_reason(
    observed: Observed, watch: ExceptionProbe
) -> None:
    try:
        sys.exit("no data\udce9")
    except SystemExit as error:
        frames, reason = watch.read_exit(error)
    assert frames[0].function == "test_an_exit_is_read_with_its_line_and_its_reason"
    assert reason == "no data\\udce9"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_a_thread_does_not_end_the_rank(
    observed: Observed, watch: ExceptionProbe
) -> None:
    thread = threading.Thread(target=_fail, name="loader")

    thread.start()
    thread.join()

    (event,) = observed.events(Raised)
    assert event.thread == "loader"
    assert not read_status(observed.folder / "rank-0.status").raised


def test_a_signal_handler_of_the_script_runs_and_is_recorded(
    observed: Observed, watch: ExceptionProbe
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


def test_default_dispositions_pass_through(observed: Observed, watch: ExceptionProbe) -> None:
    for default in (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler):
        before = signal.signal(signal.SIGUSR2, default)
        try:
            assert signal.getsignal(signal.SIGUSR2) is default
        finally:
            signal.signal(signal.SIGUSR2, before)


def test_the_frames_of_the_tool_do_not_show_in_a_traceback(
    observed: Observed, watch: ExceptionProbe
) -> None:
    observed.install("save")
    with pytest.raises(FileNotFoundError) as caught:
        torch.load(observed.folder / "no-such-model.pt")
    assert any("distdiag/probes" in entry.filename for entry in traceback.extract_tb(caught.tb))

    trace = strip_own_frames(caught.tb)

    assert "torch" in traceback.extract_tb(trace)[-1].filename
    assert not any("distdiag/" in frame.filename for frame in traceback.extract_tb(trace))


class Sharded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def refuse(self, _: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("way", "unhooked"),
    [("encode", "Sharded.encode"), ("registered", ""), ("forward", ""), ("refuse", "")],
)
def test_a_method_in_which_a_model_is_still_sharded_is_reported(
    way: str, unhooked: str, observed: Observed, watch: ExceptionProbe
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = Sharded()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if way == "registered":
        register_fsdp_forward_method(model, "encode")
    call = {"registered": model.encode, "forward": model}.get(way) or getattr(model, way)
    try:
        call(torch.ones(1, 3 if way in ("registered", "forward") else 2))
    except (RuntimeError, ValueError) as error:
        watch.raised(error, error.__traceback__)
    (event,) = observed.events(Raised)
    assert event.unhooked == unhooked
