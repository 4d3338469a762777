"""Whoever subscribes is notified, in turn, until he does not want to know any more."""

from __future__ import annotations

import dataclasses

from distdiag.record.signals import Signal, Signals


def test_all_subscribers_are_reported_in_their_order() -> None:
    signal: Signal[int] = Signal()
    received: list[tuple[str, int]] = []
    signal.subscribe(lambda value: received.append(("first", value)))
    signal.subscribe(lambda value: received.append(("second", value)))
    signal.emit(7)
    assert received == [("first", 7), ("second", 7)]


def test_who_unsubscribes_is_reported_no_more_and_the_others_are() -> None:
    signal: Signal[int] = Signal()
    one: list[int] = []
    other: list[int] = []
    unsubscribe = signal.subscribe(one.append)
    signal.subscribe(other.append)
    signal.emit(1)
    unsubscribe()
    unsubscribe()
    signal.emit(2)
    assert (one, other) == ([1], [1, 2])


def test_a_function_is_reported_once_however_often_it_subscribes() -> None:
    class Listener:
        def __init__(self) -> None:
            self.received: list[int] = []

        def hear(self, value: int) -> None:
            self.received.append(value)

    signal: Signal[int] = Signal()
    listener = Listener()
    signal.subscribe(listener.hear)
    signal.subscribe(listener.hear)
    signal.emit(1)
    assert listener.received == [1]


def test_who_subscribes_or_leaves_while_all_are_reported_changes_nothing_for_the_others() -> None:
    signal: Signal[[]] = Signal()
    received: list[str] = []

    def leaving() -> None:
        received.append("leaving")
        leave()
        signal.subscribe(lambda: received.append("late"))

    leave = signal.subscribe(leaving)
    signal.subscribe(lambda: received.append("staying"))
    signal.emit()
    assert received == ["leaving", "staying"]
    signal.emit()
    assert received == ["leaving", "staying", "staying", "late"]


def test_nobody_is_reported_while_a_signal_is_muted() -> None:
    signal: Signal[int] = Signal()
    received: list[int] = []
    signal.subscribe(received.append)
    with signal.muted():
        assert not signal.subscribers
        signal.emit(1)
        other: list[int] = []
        signal.subscribe(other.append)
    signal.emit(2)
    assert (received, other) == ([2], [2])


def test_each_run_has_signals_of_its_own() -> None:
    one, other = Signals(), Signals()
    for field in dataclasses.fields(Signals):
        assert getattr(one, field.name) is not getattr(other, field.name)
        assert not getattr(one, field.name).subscribers
