"""What is told of GPUs. There is none here: a small driver is played, and its names are checked."""

import os
import re
import types
from pathlib import Path

import pynvml
import pytest

from distdiag.dumps.gpu import nvml
from distdiag.dumps.gpu import nvml as gpu_reading
from distdiag.dumps.gpu.nvml import Nvml
from distdiag.dumps.gpu.xid_log import parse_bus_id, parse_xids, read_kernel_log
from tests.dumps.programs import running

SLEEP = "import time; print('ready', flush=True); time.sleep(100)"


class Driver(types.SimpleNamespace):
    """GPUs as dictionaries; what a GPU lacks is not supported."""

    def __init__(self, *gpus):
        super().__init__(**{name: getattr(pynvml, name) for name in dir(pynvml)})
        self.gpus = gpus
        self.is_open = False
        self.nvmlDeviceGetHandleByIndex = self._handle
        self.nvmlDeviceGetCount = lambda: len(gpus)
        self.nvmlInit = lambda: setattr(self, "is_open", True)
        self.nvmlShutdown = lambda: setattr(self, "is_open", False)
        for function in (name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")):
            if function not in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCount"):
                setattr(self, function, self._reading(function.removeprefix("nvmlDeviceGet")))

    def _handle(self, index):
        if self.gpus[index] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def _reading(self, name):
        def read(gpu, *arguments):
            assert self.is_open
            value = gpu.get((name, *arguments), gpu.get(name))
            if value is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value

        return read


def gpu(index=0, processes=(), **more):
    some = types.SimpleNamespace
    return {
        "Name": "NVIDIA H100",
        "UUID": f"GPU-aaaa-{index}",
        "PciInfo": some(busId=f"00000000:{index + 0x3B:02X}:00.0"),
        "UtilizationRates": some(gpu=100, memory=3),
        "MemoryInfo": some(used=70 << 30, total=80 << 30),
        "ComputeRunningProcesses": [some(pid=pid, usedGpuMemory=used) for pid, used in processes],
        **more,
    }


def tell(driver, pids):
    assert not driver.is_open
    observed = Nvml(driver).observe(pids, 5.0)
    assert not driver.is_open
    return observed


def test_each_rank_is_reported_its_own_gpu_and_who_else_is_on_it():
    me = os.getpid()
    driver = Driver(gpu(0, [(me, 1 << 30), (77, 2 << 30)]), gpu(1, [(me, 60 << 30)]))
    (observed,) = tell(driver, {5: me})
    assert (observed.rank, observed.source, observed.error) == (5, "nvml", "")
    assert observed.summary == "GPU 1 (NVIDIA H100) is 100 % busy; 70.0 of 80.0 GiB in use"
    assert observed.values["processes"] == "rank 5: 60.0 GiB"
    # A context on another rank's GPU is a classic.
    assert observed.values["also_on_gpus"] == "0"
    assert "ecc_uncorrected" not in observed.values
    assert "nvlinks_up" not in observed.values


def test_what_is_wrong_with_a_gpu_is_in_the_summary():
    me = os.getpid()
    sick = gpu(
        2,
        [(me, None)],
        CurrentClocksThrottleReasons=0x40 | 0x4 | 0x1,
        RemappedRows=(0, 1, 1, 1),
        PowerUsage=120_000,
    )
    sick |= {("TotalEccErrors", 1, 0): 2, ("TotalEccErrors", 0, 0): 0}
    sick |= {("NvLinkState", 0): 1, ("NvLinkState", 1): 0}
    (observed,) = tell(Driver(sick), {0: me})
    assert observed.summary == (
        "GPU 0 (NVIDIA H100) is 100 % busy; 70.0 of 80.0 GiB in use; "
        "its clocks are limited by the power limit, the temperature (hardware); "
        "2 memory errors could not be corrected; a memory row could not be remapped; "
        "these links of NVLink are down: 1"
    )
    assert observed.values["nvlinks_up"] == 1
    assert observed.values["power_w"] == 120.0
    assert observed.values["row_remap_pending"] is True
    assert (observed.values["ecc_uncorrected"], observed.values["ecc_corrected"]) == (2, 0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,0"}, 0),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-aaaa-1"}, 1),
        ({"LOCAL_RANK": "2"}, None),
        ({}, None),
    ],
)
def test_where_processes_are_hidden_the_environment_tells_the_gpu(environment, expected):
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
    with running(SLEEP, env=env | environment) as process:
        (observed,) = tell(Driver(gpu(0), gpu(1)), {0: process.pid})
    assert observed.values.get("gpu") == expected
    if expected is None:
        assert observed.error == "no GPU is known to be used by this process"


def test_a_gpu_that_is_lost_is_reported():
    with running(SLEEP, env={**os.environ, "LOCAL_RANK": "1"}) as process:
        (observed,) = tell(Driver(gpu(0), None), {0: process.pid})
    assert observed.error == "GPU 1: GPU is lost"


def test_without_a_driver_this_is_said():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert {event.error for event in Nvml().observe({0: 1, 1: 2}, 5.0)} == {
            "no NVIDIA driver here"
        }
    else:
        pynvml.nvmlShutdown()
        assert {event.error for event in Nvml().observe({0: 1}, 5.0)} == {
            "no GPU is known to be used by this process"
        }


def test_another_failure_of_the_driver_is_reported():
    driver = Driver()

    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    driver.nvmlInit = fail
    (observed,) = tell(driver, {0: 1})
    assert observed.error == "NVML cannot be used: RM has detected an NVML/RM version mismatch."


def test_every_name_that_is_asked_for_exists():
    sources = (Path(module.__file__).read_text() for module in (nvml, gpu_reading))
    names = {name for source in sources for name in re.findall(r"\bnvml\.([Nn]\w+)", source)}
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []


XIDS = [
    "6,100,1000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n",
    "4,101,9000000000000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python, MMU Fault\n",
    " SUBSYSTEM=pci\n",
    "4,102,9000000000001,-;NVRM: Xid (PCI:0000:3c:00): 79, pid='<unknown>', GPU has fallen\n",
    "4,103,9000000000002,-;NVRM: Xid (PCI:0000:3b:00.0): 9999, odd\n",
    "nonsense",
]


def test_errors_are_found_in_the_kernels_log():
    first, second, third = parse_xids(XIDS)
    assert (first.bus_id, first.number, first.time_s) == ((0, 0x3B, 0), 31, 9e6)
    assert str(second) == "Xid 79 (the GPU has fallen off the bus)"
    assert str(third) == "Xid 9999"
    assert second.text.startswith("NVRM: Xid (PCI:0000:3c:00): 79")
    assert parse_bus_id("00000000:3B:00.0") == first.bus_id


def test_the_last_error_of_the_ranks_gpu_since_it_began_is_reported(monkeypatch):
    me = os.getpid()
    monkeypatch.setattr(nvml, "read_kernel_log", lambda: XIDS[:4])
    (observed,) = tell(Driver(gpu(0, [(me, 1)])), {0: me})
    assert observed.summary.endswith("its last error is Xid 31 (a memory access that faulted)")
    assert observed.values["xid"] == 31
    old = [record.replace("9000000000000", "1") for record in XIDS[:4]]
    monkeypatch.setattr(nvml, "read_kernel_log", lambda: old)
    (observed,) = tell(Driver(gpu(0, [(me, 1)])), {0: me})
    assert "xid" not in observed.values


def test_the_kernels_log_is_read_as_far_as_it_is_allowed(tmp_path):
    assert all(";" in record for record in read_kernel_log())
    assert read_kernel_log(str(tmp_path / "none")) == []
    (tmp_path / "log").write_text(XIDS[1])
    assert read_kernel_log(str(tmp_path / "log")) == [XIDS[1]]
