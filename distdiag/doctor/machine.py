"""Looks at one machine: what it has for a training, and for those who have to find a fault."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import psutil

from distdiag.doctor.answers import Answer, State
from distdiag.dumps.gpu.nvml import Gpu, read_gpu
from distdiag.dumps.gpu.xid_log import parse_xids, read_kernel_log
from distdiag.dumps.stacks.py_spy import PySpy
from distdiag.events.errors import UNDECODABLE

_TORCH_S: Final = 120.0
"""The import of torch from a cold network disk takes a minute."""
_SPY_S: Final = 20.0
_CONNECT_S: Final = 5.0
_LEAST_SHM: Final = 1 << 30
"""NCCL takes some 10 MiB for each pair of GPUs, and each worker of a loader its batches; Docker's
default of 64 MiB is too small for both."""
_LEAST_FILES: Final = 4096
"""NCCL and loaders with workers open hundreds of descriptors for each rank."""
_LEAST_DISK: Final = 1 << 30
"""Event files of eight ranks take up to 512 MiB."""
_NETWORK_DISKS: Final = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "smb", "cifs", "wekafs")
_RECORDER_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ASK_TORCH: Final = """
import json, torch
cuda, dist = torch.cuda, torch.distributed
nccl = dist.is_available() and dist.is_nccl_available()
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": cuda.device_count()}
found["is_usable"] = cuda.is_available()
found["nccl"] = ".".join(map(str, cuda.nccl.version())) if nccl and cuda.is_available() else ""
pairs = [(a, b) for a in range(found["gpus"]) for b in range(found["gpus"]) if a < b]
found["no_peers"] = [p for p in pairs if not cuda.can_device_access_peer(*p)] if pairs else []
print(json.dumps(found))
"""


class _Torch(msgspec.Struct, frozen=True):
    torch: str
    cuda: str
    gpus: int
    is_usable: bool
    nccl: str
    no_peers: tuple[tuple[int, int], ...]


def look_at_machine(environ: Mapping[str, str], folder: Path) -> Iterator[Answer]:
    """Yield an answer for each thing; `folder` is where runs will be kept."""
    looks: tuple[Callable[[], Iterator[Answer]], ...] = (
        _torch,
        lambda: _gpus(read_kernel_log()),
        _stacks,
        lambda: _recorder(environ),
        _shared_memory,
        _limits,
        lambda: _disk(folder),
        lambda: _network(environ),
        lambda: _master(environ),
    )
    for look in looks:
        yield from look()


# torch and the GPUs


def _torch() -> Iterator[Answer]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TORCH_S,
            check=True,
        )
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=_Torch)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        seen = f"cannot be imported: {' '.join(last)}"
        yield Answer("torch", State.BAD, seen, "install torch into this environment")
        return
    except (OSError, IndexError, subprocess.TimeoutExpired, *UNDECODABLE) as error:
        yield Answer("torch", State.UNKNOWN, f"it gave no answer: {type(error).__name__}")
        return
    cuda = f", CUDA {found.cuda}" if found.cuda else ""
    nccl = f", NCCL {found.nccl}" if found.nccl else ""
    yield Answer("torch", State.GOOD, f"{found.torch}{cuda}{nccl}")
    if found.cuda and not found.is_usable:
        seen = f"built for CUDA {found.cuda}, and no GPU can be used"
        yield Answer("CUDA", State.BAD, seen, "compare the driver (nvidia-smi) with torch's CUDA")
    if found.no_peers:
        pairs = ", ".join(f"{a} and {b}" for a, b in found.no_peers[:4])
        advice = "transfers go through the host; look at nvidia-smi topo -m, ACS and the IOMMU"
        yield Answer("peer access", State.DOUBTFUL, f"none between GPUs {pairs}", advice)


def _gpus(kernel_log: list[str]) -> Iterator[Answer]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Answer("GPUs", State.UNKNOWN, f"no driver of NVIDIA: {error}")
        return
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = [read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        yield Answer("GPUs", State.BAD, str(error), "look at nvidia-smi; the driver may be hung")
        return
    finally:
        pynvml.nvmlShutdown()
    names = sorted({str(gpu.values.get("name", "?")) for gpu in gpus})
    yield Answer("GPUs", State.GOOD, f"{len(gpus)} x {', '.join(names)}, driver {driver}")
    for gpu in gpus:
        yield from _gpu(gpu)
    for xid in parse_xids(kernel_log)[-4:]:
        advice = "look it up in NVIDIA's list of Xid errors; drain the node if it comes again"
        yield Answer("kernel log", State.DOUBTFUL, xid.text, advice)


def _gpu(gpu: Gpu) -> Iterator[Answer]:
    subject = f"GPU {gpu.index}"
    if gpu.error:
        yield Answer(subject, State.BAD, gpu.error, "reset it, or drain the node")
    if gpu.values.get("ecc_uncorrected"):
        seen = f"{gpu.values['ecc_uncorrected']} uncorrected memory errors"
        yield Answer(subject, State.BAD, seen, "drain the node; its results cannot be trusted")
    if gpu.values.get("row_remap_failed") or gpu.values.get("row_remap_pending"):
        yield Answer(subject, State.DOUBTFUL, "memory rows are to be remapped", "reset the GPU")
    limited = gpu.values.get("clocks_limited_by")
    if limited and any(word in str(limited) for word in ("hardware", "temperature", "brake")):
        yield Answer(subject, State.DOUBTFUL, f"clocks limited by {limited}", "look at its cooling")
    if gpu.memory_by_pid:
        used = sum(gpu.memory_by_pid.values()) >> 20
        seen = f"{len(gpu.memory_by_pid)} processes use {used:,} MiB"
        advice = "end what an earlier job has left (nvidia-smi names the processes)"
        yield Answer(subject, State.DOUBTFUL, seen, advice)


# What a hang needs


def _stacks() -> Iterator[Answer]:
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        error = PySpy(None).dump(child.pid, 0, _SPY_S).error
    finally:
        child.kill()
        child.communicate()
    if not error:
        yield Answer("stacks", State.GOOD, "py-spy can read those of other processes")
        return
    advice = "without it ranks write their Python stacks themselves, and none of C and C++"
    yield Answer("stacks", State.DOUBTFUL, error, advice)


def _recorder(environ: Mapping[str, str]) -> Iterator[Answer]:
    name = next((each for each in _RECORDER_VARIABLES if environ.get(each)), "")
    if name:
        yield Answer("flight recorder", State.GOOD, f"{name}={environ[name]}")
    else:
        advice = f"export {_RECORDER_VARIABLES[1]}=2000: a job that dies by NCCL leaves its calls"
        yield Answer("flight recorder", State.DOUBTFUL, "its size is not set", advice)


# The system


def _shared_memory() -> Iterator[Answer]:
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Answer("/dev/shm", State.BAD, f"{error.strerror}", "NCCL and loaders need it")
        return
    seen = f"{size.free >> 20:,} of {size.total >> 20:,} MiB free"
    state = State.GOOD if size.free >= _LEAST_SHM else State.DOUBTFUL
    yield Answer("/dev/shm", state, seen, "docker run --shm-size=16g, or --ipc=host")


def _limits() -> Iterator[Answer]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    state = State.GOOD if is_enough else State.DOUBTFUL
    yield Answer("open files", state, _amount(files), "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_need = Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY
    advice = "ulimit -l unlimited: InfiniBand registers memory that stays in place"
    state = State.DOUBTFUL if has_need else State.GOOD
    yield Answer("locked memory", state, _amount(locked), advice)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}"


def _disk(folder: Path) -> Iterator[Answer]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    kind = _file_system_of(folder)
    if any(word in kind for word in _NETWORK_DISKS):
        advice = "give --run-dir a folder on a local disk: event files are mapped into memory"
        yield Answer("run directory", State.DOUBTFUL, f"{folder} is on {kind}", advice)
        return
    state = State.GOOD if free >= _LEAST_DISK else State.DOUBTFUL
    seen = f"{folder}: {free >> 20:,} MiB free on {kind or 'an unknown disk'}"
    yield Answer("run directory", state, seen, "free some, or give another --run-dir")


def _file_system_of(folder: Path) -> str:
    real = folder.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    inside = [mount for mount in mounts if real.is_relative_to(mount)]
    return mounts[max(inside, key=lambda mount: len(mount.parts))] if inside else ""


# The network


def _network(environ: Mapping[str, str]) -> Iterator[Answer]:
    found = psutil.net_if_stats()
    up = sorted(name for name, each in found.items() if each.isup and name != "lo")
    state = State.GOOD if up else State.DOUBTFUL
    yield Answer("interfaces", state, ", ".join(up) or "only lo is up", "other nodes need one")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(name, "")
        words = [word.strip().lstrip("=") for word in wanted.split(",") if word.strip()]
        if not words or wanted.startswith("^"):
            continue
        missing = [w for w in words if not any(each.startswith(w) for each in (*up, "lo"))]
        state = State.BAD if len(missing) == len(words) else State.GOOD
        seen = f"{wanted}" + (", which is not there or down" if missing else "")
        yield Answer(name, state, seen, f"name one of: {', '.join(up)}")


def _master(environ: Mapping[str, str]) -> Iterator[Answer]:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host:
        return
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError as error:
        advice = "use the address itself, or put the name into DNS or /etc/hosts of all nodes"
        yield Answer("MASTER_ADDR", State.BAD, f"{host} has no address: {error}", advice)
        return
    seen = f"{host} is {', '.join(sorted(map(str, addresses)))}"
    if not port.isdecimal():
        yield Answer("MASTER_ADDR", State.GOOD, seen)
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except ConnectionRefusedError:
        yield Answer("MASTER_ADDR", State.GOOD, f"{seen}; nobody listens at {port} yet")
    except OSError as error:
        advice = f"open port {port} between the nodes; look at firewalls and routes"
        yield Answer("MASTER_ADDR", State.BAD, f"{seen}, port {port}: {error}", advice)
    else:
        yield Answer("MASTER_ADDR", State.GOOD, f"{seen}; port {port} answers")
