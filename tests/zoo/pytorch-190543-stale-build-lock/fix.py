"""Train with an operator in C that the first process to come compiles."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.file_baton import FileBaton

BUILD = Path("build")
SOURCE = "float scale(float x) { return 0.5f * x; }"

# An earlier job on this machine, whose time was up while it compiled.
EARLIER_JOB = """
import os, signal, sys
from torch.utils.file_baton import FileBaton
FileBaton(sys.argv[1]).try_acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""

logger = logging.getLogger("extension")


def run_earlier_job() -> None:
    BUILD.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", EARLIER_JOB, str(BUILD / "lock")], check=False)


def compile_library(library: Path) -> None:
    source = library.with_suffix(".c")
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)


def load_operator() -> ctypes.CDLL:
    """Compile the library if nobody does, else wait for it."""
    library, lock = (BUILD / "scale.so").resolve(), BUILD / "lock"
    baton = FileBaton(str(lock))
    if baton.try_acquire():
        try:
            compile_library(library)
        finally:
            baton.release()
    else:
        baton.wait()
    operator = ctypes.CDLL(str(library))
    operator.scale.argtypes, operator.scale.restype = [ctypes.c_float], ctypes.c_float
    return operator


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)
    if rank == 0:
        run_earlier_job()
        (BUILD / "lock").unlink()  # no other job of this machine runs now
    dist.barrier()

    operator = load_operator()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=operator.scale(0.2))
    for _ in range(8):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
