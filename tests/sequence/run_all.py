"""Verifies all implementations in one process group, and says by rank 0 what was found.

On GPUs: ``torchrun --nproc-per-node 2 -m tests.sequence.run_all --device cuda --dtype bfloat16``.
"""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist

from distdiag import sequence
from tests.sequence import blocks
from tests.sequence.implementations import RIGHT, WRONG, options


def verdict_of(case, dtype):
    split, gather, *attention = case.functions
    chosen = dict(case.options or options())
    if dtype is not None and chosen.get("heads") != 0:
        chosen["dtypes"] = (dtype,)
    return sequence.verify(
        split,
        gather,
        attention=attention[0] if attention else None,
        group=dist.group.WORLD,
        **chosen,
    )


def is_as_expected(case, faults):
    kinds = {fault["kind"] for fault in faults}
    ranks = {rank for fault in faults for rank in fault["ranks"]}
    if not case.kinds:
        return not faults
    # What is added up in a coarse dtype is not always distinguished from what is no number at all.
    is_kind = bool(kinds) and kinds <= {kind.value for kind in case.kinds}
    return is_kind and ranks == case.culprits(blocks.size())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name))
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    found = {}
    for case in (*RIGHT, *WRONG):
        verdict = verdict_of(case, args.dtype)
        found[case.name] = [
            {
                "kind": fault.kind.value,
                "stage": fault.stage,
                "ranks": fault.ranks,
                "tokens": fault.tokens,
                "grade": fault.grade.value,
                "said": str(fault),
            }
            for fault in verdict.faults
        ]
    if dist.get_rank() == 0:
        wrong = [c.name for c in (*RIGHT, *WRONG) if not is_as_expected(c, found[c.name])]
        print(f"{len(RIGHT)} right, {len(WRONG)} wrong; otherwise than expected: {wrong}")
        print("FOUND " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit
