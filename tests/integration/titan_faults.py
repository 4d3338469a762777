"""The training of torchtitan's experts, wrong in one way: ``titan_faults.py FAULT --out FILE``."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

sys.path.append(str(Path(__file__).with_name("programs")))

import titan_experts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def balance_alone() -> None:
    """Let each rank balance its own tokens."""
    alone = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=True, tp=1)
    register = titan_experts.register_moe_load_balancing_hook
    titan_experts.register_moe_load_balancing_hook = lambda hooks, parts, _: register(
        hooks, parts, alone
    )


def miscount() -> None:
    """Let rank 0 expect one row more of rank 1 than it sends."""
    count = AllToAllTokenDispatcher._sync_token_count_exchange

    def counted(*args: object) -> tuple[object, list[int], list[int]]:
        counts, sent, came = count(*args)
        if dist.get_rank() == 0:
            came[1] += 1
        return counts, sent, came

    AllToAllTokenDispatcher._sync_token_count_exchange = counted


if __name__ == "__main__":
    {"biased": balance_alone, "splits": miscount}[sys.argv.pop(1)]()
    titan_experts.main()
