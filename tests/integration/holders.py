"""A rank that waits for something that somebody holds: ``holders.py KIND [PATH]``.

Rank 1 never comes to the last all_reduce. What it waits for is in another process, in a file that
is left over, in the store, in a thread, or with the person at the keyboard.
"""

import fcntl
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.file_baton import FileBaton


def flock(rank: int, path: Path) -> None:
    """Lock a file that a process outside of the job has locked."""
    if rank == 1:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def inherited_lock(rank: int, path: Path) -> None:
    """Lock a file whose lock lives on in a process that was forked while it was locked."""
    if rank == 0:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            context = multiprocessing.get_context("fork")
            context.Process(target=time.sleep, args=(60,), daemon=True).start()
    dist.barrier()
    flock(rank, path)


def record_lock(rank: int, path: Path) -> None:
    """Lock a file that the other rank has locked until it comes back from a collective."""
    with path.open("a") as file:
        if rank == 1:
            dist.barrier()
        fcntl.lockf(file, fcntl.LOCK_EX)
        if rank == 0:
            dist.barrier()
            dist.all_reduce(torch.ones(1))


def polled_lock(rank: int, path: Path) -> None:
    """Poll for a lock that a process outside of the job has."""
    from filelock import FileLock

    if rank == 1:
        with FileLock(path):
            pass


def soft_lock(rank: int, path: Path) -> None:
    """Wait for a lock file whose process has died."""
    from filelock import SoftFileLock

    if rank == 1:
        with SoftFileLock(path):
            pass


def baton(rank: int, path: Path) -> None:
    """Wait for a build that was killed."""
    if rank == 1:
        FileBaton(str(path)).wait()


def store_key(rank: int) -> None:
    """Wait for a key that the other rank has set for another step."""
    store = dist.PrefixStore("weights", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.set("ready/4", "1")
    else:
        store.get("ready/5")


def group_order(rank: int) -> None:
    """Create two groups in another order on each rank, each in a thread of its own."""

    def create(ranks: list[int]) -> None:
        dist.new_group(ranks, backend="gloo")

    orders = ([[0], [0, 1]], [[0, 1], [0]])
    for ranks in orders[rank]:
        thread = threading.Thread(target=create, args=(ranks,), name=f"groups-of-{len(ranks)}")
        thread.start()
        time.sleep(0.5)
    thread.join()


def question(rank: int) -> None:
    """Ask whether to overwrite what is there."""
    if rank == 1:
        _, terminal = os.openpty()
        os.dup2(terminal, 0)
        input("Overwrite the checkpoint? [y/n] ")


def question_in_library(rank: int) -> None:
    """Read the answer from the standard input."""
    if rank == 1:
        end, _ = os.pipe()
        os.dup2(end, 0)
        sys.stdin.readline()


class Locked(Dataset):
    """Images behind a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return torch.ones(1)


def forked_lock(rank: int) -> None:
    """Fork the worker of a data loader while a thread holds a lock."""
    images = Locked()
    if rank == 1:
        taken = threading.Event()

        def hold() -> None:
            with images.lock:
                taken.set()
                time.sleep(1)

        threading.Thread(target=hold).start()
        taken.wait()
    for _ in DataLoader(images, num_workers=1):
        pass


def answer(lock: threading.Lock, results: multiprocessing.Queue) -> None:
    """Put something into the queue."""
    with lock:
        results.put(1)


def forked_process(rank: int) -> None:
    """Fork a process while a thread holds a lock."""
    lock, context = threading.Lock(), multiprocessing.get_context("fork")
    results = context.Queue()
    if rank == 1:
        with lock:
            worker = context.Process(target=answer, args=(lock, results))
            worker.start()
        worker.join()


def child(rank: int) -> None:
    """Wait for a command that does not end."""
    if rank == 1:
        subprocess.run(["sleep", "987"], check=True)


SERVE = """import socket

def serve():
    socket.create_server(("", 0)).accept()

serve()
"""


def python_child(rank: int) -> None:
    """Wait for a script that does not end."""
    if rank == 1:
        script = Path("serve_me.py")
        script.write_text(SERVE)
        subprocess.run([sys.executable, str(script)])


def die(results: multiprocessing.Queue) -> None:
    """Die without an answer."""
    os.kill(os.getpid(), signal.SIGKILL)


def dead_worker(rank: int) -> None:
    """Wait for the answer of a process that was killed."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    if rank == 1:
        context.Process(target=die, args=(results,)).start()
        results.get()


def square(number: int) -> int:
    """Die at one of the numbers."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def dead_pool_worker(rank: int) -> None:
    """Wait for the result of a worker that was killed."""
    if rank == 1:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(square, range(6), chunksize=1)


def thread_lock(rank: int) -> None:
    """Wait for a lock that a thread holds, which waits for an answer."""
    lock, answers = threading.Lock(), queue.Queue()
    taken = threading.Event()

    def write() -> None:
        with lock:
            taken.set()
            answers.get()

    if rank == 1:
        threading.Thread(target=write, name="writer", daemon=True).start()
        taken.wait()
        with lock:  # nobody else has it for long
            answers.put(1)


def released(rank: int, path: Path) -> None:
    """Wait for a moment for each of these: somebody lets it go."""
    store = dist.PrefixStore("weights", dist.distributed_c10d._get_default_store())
    lock, taken = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock, path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            taken.set()
            time.sleep(0.5)
            store.set("ready", "1")

    if rank == 0:
        store.get("ready")
        return
    threading.Thread(target=hold).start()
    taken.wait()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    with lock:
        subprocess.run(["sleep", "1"], check=True)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(abs, [1])


def main() -> None:
    kind, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    globals()[kind](dist.get_rank(), *map(Path, rest))
    dist.all_reduce(torch.ones(1))
    print("done", flush=True)


if __name__ == "__main__":
    main()
