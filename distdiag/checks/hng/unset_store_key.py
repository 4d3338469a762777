"""HNG020: a rank waits for a key of the job's store that nobody sets."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnsetStoreKey(StuckRank):
    """A rank waits for a key of the job's store that nobody sets.

    ## What you see
    The rank waits in `store.get` or `store.wait` for a key that no rank has set, until the timeout
    of the store. The rank that should set the key took another branch, or set it under a different
    name (another step, another prefix).

    ## Example
        # wrong: the address is published only when the server was started anew
        if step % 4 == 0:
            store.set(f"server/{step}", address)
        address = store.get(f"server/{step}")

        # right: published under the name that the others ask for
        store.set(f"server/{step}", address)
        address = store.get(f"server/{step}")

    ## How to fix
    Call `store.set(key, value)` on every path of the rank that has the value, under exactly the
    name that the other ranks wait for. Or give the wait its own limit:
    `store.wait([key], timedelta(seconds=60))`.

    Changes: The wait ends as soon as the key is there.

    Leaves: Whatever kept the rank from setting the key.

    ## When it is not a defect
    Another rank is about to set the key.

    To silence it, set `ignore = ["HNG020"]` in `distdiag.toml`.

    ## References
    - https://github.com/meta-pytorch/torchcomms/issues/294
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Store.get
    """

    code = "HNG020"
    name = "unset-store-key"
    severity = Severity.ERROR
    activities = frozenset({Activity.STORE})
    instead = "waits for a key of the store"
