"""What the driver says of the GPUs of this node, and which rank is on which."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import msgspec

from distdiag.dumps.base import DumpSource
from distdiag.dumps.gpu.xid_log import BusId, Xid, parse_bus_id, parse_xids, read_kernel_log
from distdiag.dumps.process.proc import proc_text, read_process
from distdiag.events.base import Value
from distdiag.events.stacks import Observed

# One GPU as its driver sees it, read through NVML.

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


def gpu_names() -> list[str]:
    """Return the kinds of all GPUs that the driver knows; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


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


# The source: which rank is on which GPU, and what the driver says of it.


class Nvml(DumpSource):
    """Read all GPUs once, and tell each rank's own."""

    name = "nvml"

    def __init__(self, module: ModuleType | None = None) -> None:
        """Use this module in the place of `pynvml`."""
        self._module = module or _pynvml()

    def observe(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Observed, ...]:
        """Tell of the GPU that each rank uses, and of those it uses besides."""
        nvml = self._module
        if nvml is None:
            return self.failed(pids, "nvidia-ml-py is not installed")
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return self.failed(pids, "no NVIDIA driver here")
        except nvml.NVMLError as error:
            return self.failed(pids, f"NVML cannot be used: {error}")
        try:
            gpus = [read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            return self.failed(pids, f"NVML cannot be used: {error}")
        finally:
            nvml.nvmlShutdown()
        xids = parse_xids(read_kernel_log())
        return tuple(self._tell(rank, pids, gpus, xids) for rank in pids)

    def _tell(
        self, rank: int, pids: Mapping[int, int], gpus: Sequence[Gpu], xids: Sequence[Xid]
    ) -> Observed:
        pid = pids[rank]
        used = sorted(
            (gpu for gpu in gpus if pid in gpu.memory_by_pid),
            key=lambda gpu: -gpu.memory_by_pid[pid],
        )
        assigned = _assigned(pid, gpus)
        gpu = used[0] if used else assigned
        lost = [gpu for gpu in gpus if gpu.error]
        if gpu is None or gpu.error:
            broken = gpu or (lost[0] if lost else None)
            if broken is not None:
                return self.observed(rank, error=f"GPU {broken.index}: {broken.error}")
            return self.observed(rank, error="no GPU is known to be used by this process")
        values: dict[str, Value] = {"gpu": gpu.index, "uuid": gpu.uuid, **gpu.values}
        if not used:
            values["gpu_known_from"] = "CUDA_VISIBLE_DEVICES and LOCAL_RANK"
        if used[1:]:
            values["also_on_gpus"] = ",".join(str(other.index) for other in used[1:])
        values["processes"] = _processes_on(gpu, {pid: rank for rank, pid in pids.items()})
        xid = _last_xid(gpu, pid, xids)
        if xid is not None:
            values |= {"xid": xid.number, "xid_text": xid.text}
        return self.observed(rank, _summary(gpu, xid), values)


def _pynvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    module: ModuleType = pynvml
    return module


def _summary(gpu: Gpu, xid: Xid | None) -> str:
    values = gpu.values
    parts = [f"GPU {gpu.index} ({values.get('name', 'unknown')})"]
    if "utilization_percent" in values:
        parts[0] += f" is {values['utilization_percent']} % busy"
    used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
    if isinstance(used, int) and isinstance(total, int):
        parts.append(f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB in use")
    if values.get("clocks_limited_by"):
        parts.append(f"its clocks are limited by {values['clocks_limited_by']}")
    if values.get("ecc_uncorrected"):
        parts.append(f"{values['ecc_uncorrected']} memory errors could not be corrected")
    if values.get("row_remap_failed"):
        parts.append("a memory row could not be remapped")
    if values.get("nvlinks_down"):
        parts.append(f"these links of NVLink are down: {values['nvlinks_down']}")
    if xid is not None:
        parts.append(f"its last error is {xid}")
    return "; ".join(parts)


def _processes_on(gpu: Gpu, ranks: Mapping[int, int]) -> str:
    """Return who uses a GPU: ``rank 0: 31.2 GiB, process 77: 1.0 GiB``."""
    return ", ".join(
        (f"rank {ranks[pid]}" if pid in ranks else f"process {pid}") + f": {used / 2**30:.1f} GiB"
        for pid, used in sorted(gpu.memory_by_pid.items())
    )


def _assigned(pid: int, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that a rank should be on: within containers NVML may not know our pids."""
    pairs = (pair.partition("=") for pair in proc_text(pid, "environ").split("\0"))
    environment = {name: value for name, _, value in pairs}
    local_rank = environment.get("LOCAL_RANK", "")
    if not local_rank.isdigit():
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [gpu.index for gpu in gpus] if visible is None else visible.split(",")
    if int(local_rank) >= len(names):
        return None
    wanted = str(names[int(local_rank)]).strip()
    return next(
        (
            gpu
            for gpu in gpus
            if wanted == str(gpu.index)
            or (wanted.startswith("GPU-") and gpu.uuid.startswith(wanted))
        ),
        None,
    )


def _last_xid(gpu: Gpu, pid: int, xids: Sequence[Xid]) -> Xid | None:
    """Return the last error of a GPU since the process began."""
    process = read_process(pid)
    begun_s = process.start_ticks / os.sysconf("SC_CLK_TCK") if process else time.monotonic()
    own = [xid for xid in xids if xid.bus_id == gpu.bus_id and xid.time_s >= begun_s]
    return own[-1] if own else None
