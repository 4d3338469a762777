"""In which states the random number generators of a process are; reading them draws nothing."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from distdiag.events.random import GeneratorState

_MASK = (1 << 63) - 1


def generator_states() -> Iterator[GeneratorState]:
    """Yield the default generators of this process."""
    cpu = torch.default_generator
    digest = digest_of(cpu.get_state())
    if digest:
        yield GeneratorState("cpu", digest, cpu.initial_seed() & _MASK)
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and not torch.cuda.is_current_stream_capturing():
        # Its state is kept by the host: nothing waits for the device.
        cuda = torch.cuda.default_generators[torch.cuda.current_device()]
        digest = digest_of(cuda.get_state())
        if digest:
            yield GeneratorState("cuda", digest, cuda.initial_seed() & _MASK)
    yield GeneratorState("python", _digest(repr(random.getstate()).encode()))
    if "numpy.random" in sys.modules:
        state = sys.modules["numpy.random"].get_state(legacy=False)
        yield GeneratorState("numpy", _digest(repr(sorted(_plain(state))).encode()))


def _plain(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield key, repr(sorted(_plain(value)))
        else:
            # The repr of a long array leaves out its middle.
            yield key, repr(value.tolist() if hasattr(value, "tolist") else value)


def digest_of(state: object) -> str:
    """Return the digest of a state of torch, an empty string if it is no plain tensor."""
    if type(state) is not torch.Tensor or state.device.type != "cpu":
        return ""  # under tracing
    return _digest(state.numpy().tobytes())


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))
