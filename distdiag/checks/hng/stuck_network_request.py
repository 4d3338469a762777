"""HNG014: a rank waits for a network connection while the others wait for it."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckNetworkRequest(StuckRank):
    """A rank waits for a network connection while the others wait for it.

    ## What it detects
    The ranks that the job waits for are blocked on a socket (a download, a tracker, a key-value
    store) and have not moved for the hang threshold.

    ## Why it matters
    A server that does not answer holds up the whole job, and looks like a hang of the network
    between the ranks.

    ## Example
    Only rank 0 talks to the experiment tracker, whose server is down, and the others wait in
    the next all_reduce.

    ## How to fix
    Look at the line and the address in the evidence. Give the request a timeout, or make it on
    a thread that the training does not wait for.

    ## References
    - `socket.setdefaulttimeout`
    - `torch.distributed.Store.set_timeout`
    """

    code = "HNG014"
    name = "stuck-network-request"
    severity = Severity.WARNING
    activities = frozenset({Activity.NETWORK})
    instead = "waits for a network connection"

    why = "A connection without a timeout waits for as long as the other side says nothing."
    fix = "Give the request a timeout and handle its failure, or take it off the training loop."
    fix_changes = "A timeout turns a long wait into an error."
    fix_leaves = "The server that does not answer."
    disproof = "The server answers and the rank has moved since."
