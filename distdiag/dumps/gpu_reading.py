"""One GPU as its driver sees it, read through NVML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import msgspec

from distdiag.dumps.xid_log import BusId, parse_bus_id
from distdiag.event import Value

MOST_LINKS: Final = 36

_LIMITS: Final = {
    0x2: "the application's clock setting",
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x10: "the clocks of other GPUs",
    0x20: "the temperature (software)",
    0x40: "the temperature (hardware)",
    0x80: "the power brake",
    0x100: "the display's clock setting",
}
"""The bits of NVML's clock event reasons; 0x1 is an idle GPU."""


class Gpu(msgspec.Struct, frozen=True):
    """One reading. `memory_by_pid` are bytes (0: not told). `error` says why there is no more."""

    index: int
    uuid: str = ""
    bus_id: BusId | None = None
    memory_by_pid: dict[int, int] = {}
    values: dict[str, Value] = {}
    error: str = ""


_Read = Callable[[Any, Any], Value]

_READS: Final[Mapping[str, _Read]] = {
    "name": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    "utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_activity_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "sm_clock_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "clocks_limited_by": lambda nvml, gpu: _limits(
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    ),
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "ecc_uncorrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "ecc_corrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "row_remap_pending": lambda nvml, gpu: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[2]),
    "row_remap_failed": lambda nvml, gpu: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[3]),
    "pcie_replays": lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
}
"""What a GPU or driver does not support is left out."""


def read_gpu(nvml: ModuleType, index: int) -> Gpu:
    """Read a GPU by the number that NVML gives it. A GPU that is lost has an `error`."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        bus_id = parse_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        values = {
            name: value
            for name, read in _READS.items()
            if (value := _try(nvml, read, handle)) != ""
        }
        values |= _links(nvml, handle)
        return Gpu(index, _text(uuid), bus_id, _processes(nvml, handle), values)
    except (nvml.NVMLError, ValueError) as error:
        return Gpu(index, error=str(error))


def _try(nvml: ModuleType, read: _Read, handle: object) -> Value:
    try:
        value = read(nvml, handle)
    except nvml.NVMLError as error:
        if isinstance(error, nvml.NVMLError_GpuIsLost):
            raise
        return ""
    return _text(value) if isinstance(value, bytes) else value


def _processes(nvml: ModuleType, handle: object) -> dict[int, int]:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory or 0 for process in processes}


def _links(nvml: ModuleType, handle: object) -> dict[str, Value]:
    """Return how many links of NVLink are up, and the numbers of those that are down."""
    up, down = 0, []
    for link in range(MOST_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:  # there is no such link
            continue
        if state:
            up += 1
        else:
            down.append(str(link))
    if not up and not down:
        return {}
    return {"nvlinks_up": up, "nvlinks_down": ",".join(down)}


def _limits(reasons: int) -> str:
    return ", ".join(name for bit, name in _LIMITS.items() if reasons & bit)


def _text(value: object) -> str:
    # Older bindings return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
