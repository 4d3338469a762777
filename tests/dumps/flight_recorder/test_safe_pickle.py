"""Pickles of strangers: plain values come out, nothing is run, and bombs do not go off."""

import gc
import os
import pickle
import pickletools
import resource
import struct
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.dumps.flight_recorder.reader import UnsafePickleError, load_plain

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Shell:
    """What a hostile pickle would run when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@unhurried
@given(value=plain, protocol=st.integers(0, 5))
def test_plain_values_come_back(value, protocol):
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(tmp_path, protocol):
    witness = tmp_path / "was-run"
    data = pickle.dumps({"entries": [Shell(f"touch {witness}")]}, protocol)
    with pytest.raises(UnsafePickleError, match=r"asks for posix\.system, and nothing is ever"):
        load_plain(data)
    assert not witness.exists()


def place_of_memo(number):
    return b"\x80\x02]r" + struct.pack("<I", number) + b"."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no whole pickle"),
        (b"hello, world", "no whole pickle"),
        (pickle.dumps({"a": [1, 2]})[:-4], "no whole pickle"),
        (b"(S'id'\nios\nsystem\n.", "asks for os.system"),
        (b"cbuiltins\neval\n.", "asks for builtins.eval"),
        (b"Pabc\n.", "refers to an object outside"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "refers to an object outside"),
        (b"\x82\x01.", "no whole pickle: unregistered extension"),
        (b"\x80\x02]}b.", "no whole pickle"),
        (b"\x80\x02}]]s.", "no whole pickle: unhashable"),
        (b"\x80\x05\x97.", "no whole pickle"),
        (b"L" + b"9" * 100_000 + b"L\n.", "no whole pickle: Exceeds the limit"),
        (place_of_memo(0xFFFFFFF0), "wants more than 512 MiB"),
        (b"]p4000000000\n.", "wants more than 512 MiB"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.", "wants more than 512 MiB"),
    ],
)
def test_hostile_or_damaged_bytes_are_one_reason(data, reason):
    with pytest.raises(UnsafePickleError, match=reason):
        load_plain(data)


def test_a_far_place_of_the_memo_is_no_harm_while_it_fits():
    assert load_plain(place_of_memo(1_000_000)) == []


def test_the_limit_on_memory_is_lifted_again():
    before = resource.getrlimit(resource.RLIMIT_AS)
    for data in (pickle.dumps([1]), place_of_memo(0xFFFFFFF0)):
        with suppress(UnsafePickleError):
            load_plain(data)
        assert resource.getrlimit(resource.RLIMIT_AS) == before
        assert gc.isenabled()


@unhurried
@given(st.binary(max_size=300))
def test_any_bytes_are_a_value_or_a_reason(data):
    try:
        load_plain(data)
    except UnsafePickleError as error:
        assert str(error)


opcodes = [code.code.encode("latin-1") for code in pickletools.opcodes]


@unhurried
@given(st.lists(st.sampled_from(opcodes) | st.binary(max_size=3), max_size=60))
def test_any_opcodes_are_a_value_or_a_reason(parts):
    try:
        load_plain(b"".join(parts) + b".")
    except UnsafePickleError as error:
        assert str(error)
