"""Writes down in which surroundings a rank runs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import torch

from distdiag.events.environment import Fact, FactKind, Surroundings
from distdiag.probes.base import Probe
from distdiag.probes.guard import guarded
from distdiag.record.environment import shortened, variables_of
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_PACKAGES: Final = (
    "accelerate",
    "apex",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flash_attn",
    "lightning",
    "liger_kernel",
    "megatron.core",
    "numpy",
    "peft",
    "pytorch_lightning",
    "safetensors",
    "tokenizers",
    "torchao",
    "torchdata",
    "torchtitan",
    "torchtune",
    "torchvision",
    "transformer_engine",
    "transformers",
    "triton",
    "trl",
    "vllm",
    "xformers",
)
"""What a training is made with, as far as it is imported: looking for others costs time."""

_cuda: Any = torch.cuda  # much of it has no types


class SurroundingsProbe(Probe):
    """Looks once, at the first collective: scripts set variables before they join the others."""

    name: ClassVar[str] = "surroundings"

    def __init__(self, recorder: Recorder, recorded: Signal[int, str]) -> None:
        super().__init__(recorder)
        self._recorded = recorded
        self._is_done = False

    def _install(self) -> None:
        self._subscribe(self._recorded, self._on_collective)

    @guarded
    def _on_collective(self, *_: object) -> None:
        self._look()

    @guarded
    def flush(self) -> None:
        """Look now, if there was no collective."""
        self._look()

    def _look(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        while self._to_undo:
            self._to_undo.pop()()
        self.recorder.event(Surroundings, facts=tuple(_facts()))


def _facts() -> Iterator[Fact]:
    for name, value in variables_of(os.environ):
        yield Fact(FactKind.VARIABLE, name, value)
    for name, value in _versions():
        yield Fact(FactKind.VERSION, name, shortened(value))
    for name, value in _devices():
        yield Fact(FactKind.DEVICE, name, shortened(value))
    for name, value in _settings():
        yield Fact(FactKind.SETTING, name, value)
    yield Fact(FactKind.SEED, "torch", str(torch.initial_seed()))


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "system", f"{platform.system()} {platform.release()}"
    yield "torch", str(torch.__version__)
    yield "CUDA of torch", str(torch.version.cuda)
    for package in _PACKAGES:
        found = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(found, str):
            yield package, found
    if _cuda.is_initialized():
        yield "NCCL", ".".join(map(str, _cuda.nccl.version()))
        yield "cuDNN", str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def _devices() -> Iterator[tuple[str, str]]:
    yield "host", platform.node()
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores"
    if _cuda.is_initialized():
        device = _cuda.current_device()
        yield "GPU", _cuda.get_device_name(device)
        yield "number of the GPU", str(device)


def _settings() -> Iterator[tuple[str, str]]:
    yield "default dtype", str(torch.get_default_dtype()).removeprefix("torch.")
    yield "threads", str(torch.get_num_threads())
    yield "deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())
    yield "float32 matmul precision", torch.get_float32_matmul_precision()
    yield "cudnn.benchmark", str(torch.backends.cudnn.benchmark)
    yield "cudnn.allow_tf32", str(torch.backends.cudnn.allow_tf32)
