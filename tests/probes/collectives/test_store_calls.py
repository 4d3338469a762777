from __future__ import annotations

import gc
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distdiag.events.base import CallSite
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.files import StoreAsked, StoreCall
from distdiag.probes.collectives.strict import StrictGate, own_store
from tests.probes.conftest import Observed


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture(autouse=True)
def _installed(observed: Observed) -> None:
    observed.install("store-calls")


def said(observed: Observed) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(call.action, call.keys, call.done) for call in observed.events(StoreCall)]


def test_what_publishes_is_written_before_and_what_learns_after(
    observed: Observed, store: dist.TCPStore
) -> None:
    store.set("k", "v")
    store.get("k")
    store.wait(["k"], timedelta(seconds=1))
    store.add("n", 3)
    store.compare_set("k", "v", "w")
    store.delete_key("k")

    assert said(observed) == [
        ("set", ("k",), False),
        ("get", ("k",), True),
        ("wait", ("k",), True),
        ("add", ("n",), False),
        ("add", ("n",), True),
        ("compare_set", ("k",), False),
        ("compare_set", ("k",), True),
        ("delete_key", ("k",), False),
    ]
    assert {call.store for call in observed.events(StoreCall)} == {f"127.0.0.1:{store.port}"}


def test_a_wait_is_written_before_it_begins_with_its_line(
    observed: Observed, store: dist.TCPStore
) -> None:
    prefixed = dist.PrefixStore("epoch", store)
    prefixed.set("a", "1")
    prefixed.get("a")
    with pytest.raises(dist.DistStoreError):
        store.wait(["epoch/b"], timedelta(milliseconds=20))
    prefixed.check(["a"])

    (put,) = [call for call in observed.events(StoreCall) if call.action == "set"]
    got, waited = observed.events(StoreAsked)
    assert (got.action, got.keys, got.thread) == ("get", ("epoch/a",), "MainThread")
    assert (waited.action, waited.keys) == ("wait", ("epoch/b",))
    assert [call.action for call in observed.events(StoreCall)] == ["set", "get", "check"]
    for event in (put, got, waited):
        assert (event.frames[0].file, event.frames[0].user) == (__file__, True)
        assert event.frames[0].function.startswith("test_a_wait")


def test_what_was_read_is_what_was_set(observed: Observed, store: dist.TCPStore) -> None:
    store.set("k", "text")
    store.get("k")
    store.set("k", "other")

    first, read, second = [call.value for call in observed.events(StoreCall)]
    assert first == read != second


def test_adding_tells_the_number(observed: Observed, store: dist.TCPStore) -> None:
    store.add("n", 3)
    store.add("n", 4)

    assert [call.value for call in observed.events(StoreCall) if call.done] == ["3", "7"]


def test_a_check_counts_when_all_keys_are_there(observed: Observed, store: dist.TCPStore) -> None:
    assert not store.check(["a"])
    store.set("a", "1")
    assert store.check(["a"])

    assert said(observed) == [("set", ("a",), False), ("check", ("a",), True)]


def test_several_keys_at_once(observed: Observed, store: dist.TCPStore) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    store.multi_get(["a", "b"])

    put, got = observed.events(StoreCall)
    assert (put.action, put.keys, put.done) == ("set", ("a", "b"), False)
    assert (got.action, got.keys, got.done) == ("get", ("a", "b"), True)
    assert put.value == got.value


def test_a_wait_in_vain_has_learnt_nothing(observed: Observed, store: dist.TCPStore) -> None:
    with pytest.raises(dist.DistStoreError):
        store.wait(["none"], timedelta(milliseconds=20))

    assert said(observed) == []


def test_prefixes_are_part_of_the_keys(observed: Observed, store: dist.TCPStore) -> None:
    inner = dist.PrefixStore("a", store)
    outer = dist.PrefixStore("b", inner)

    outer.set("k", "v")
    store.get("a/b/k")
    outer.clone().get("k")

    assert said(observed) == [
        ("set", ("a/b/k",), False),
        ("get", ("a/b/k",), True),
        ("get", ("a/b/k",), True),
    ]


def test_a_store_in_a_file_is_named_by_it(observed: Observed, tmp_path: Path) -> None:
    dist.FileStore(str(tmp_path / "store"), 1).set("k", "v")

    assert observed.events(StoreCall)[0].store == str(tmp_path / "store")


def test_a_store_in_memory_orders_nothing(observed: Observed) -> None:
    dist.PrefixStore("a", dist.HashStore()).set("k", "v")

    assert said(observed) == []


def test_what_we_do_ourselves_is_not_written(observed: Observed, store: dist.TCPStore) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    before = len(said(observed))
    gate = StrictGate(0, 0.01, own_store())
    gate.compare(ProcessGroup("g", "g", (0, 1), "gloo"), 1, Signature("barrier"), CallSite(()))
    after = said(observed)[before:]
    dist.destroy_process_group()

    assert after == []


def test_stores_are_not_kept_alive(observed: Observed, store: dist.TCPStore) -> None:
    (probe,) = observed.probes
    prefixed = dist.PrefixStore("a", store)
    prefixed.set("k", "v")
    known = len(probe._places)  # type: ignore[attr-defined]

    del prefixed
    gc.collect()

    assert len(probe._places) == known - 1  # type: ignore[attr-defined]


def test_errors_are_those_of_torch(observed: Observed, store: dist.TCPStore) -> None:
    with pytest.raises(TypeError):
        store.set("k")
    with pytest.raises(TypeError):
        store.get()
    with pytest.raises(TypeError):
        dist.PrefixStore(store)

    store.set("k", "v")
    assert said(observed)[-1] == ("set", ("k",), False)


def test_methods_are_as_before_afterwards(observed: Observed) -> None:
    observed.uninstall()

    assert type(vars(dist.Store)["get"]).__name__ == "instancemethod"
    assert pickle.loads(pickle.dumps(dist.Store)) is dist.Store
