"""Two real ranks on gloo, whose flight recorders are dumped while one waits for the other."""

import os
import subprocess
import sys

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def train():
    dist.all_reduce(torch.ones(4))

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store",
                        rank=int(sys.argv[2]), world_size=2)
rank = dist.get_rank()
for _ in range(3):
    train()
pair = dist.new_group([0, 1], group_desc="mine")
dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), group=pair)
dist.barrier()
if rank == 0:
    dist.all_reduce(torch.ones(5), async_op=True)
open(f"{sys.argv[1]}/trace_{rank}", "wb").write(c10d._dump_fr_trace())
open(f"{sys.argv[1]}/trace_{rank}.json", "wb").write(c10d._dump_fr_trace_json())
open(f"{sys.argv[1]}/done_{rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/done_{1 - rank}"):
    time.sleep(0.01)
os._exit(0)
"""


def dump_two_ranks(folder):
    """Run the program; leave ``trace_<rank>`` and ``trace_<rank>.json`` in the folder."""
    (folder / "train.py").write_text(PROGRAM)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, folder / "train.py", folder, str(rank)], env=environ)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder
