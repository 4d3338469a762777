"""HNG014: a rank waits for a network connection while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckNetworkRequest(StuckRank):
    """A rank waits for a network connection while the others wait for it.

    ## What you see
    A connection without a timeout waits for as long as the other side says nothing. A download or a
    tracker that does not answer holds up the whole job, and looks like a hang between the ranks.

    ## Example
        # wrong: rank 0 waits for the server, and the others wait for rank 0
        if rank == 0:
            requests.post(tracker, json=metrics)

        # right
        if rank == 0:
            with suppress(requests.RequestException):
                requests.post(tracker, json=metrics, timeout=5)

    ## How to fix
    Give the request a timeout and handle its failure, or take it off the training loop.

    Changes: A timeout turns a long wait into an error.

    Leaves: The server that does not answer.

    ## When it is not a defect
    The server answers and the rank has moved since.

    To silence it, set `ignore = ["HNG014"]` in `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/socket.html#socket.setdefaulttimeout
    """

    code = "HNG014"
    name = "stuck-network-request"
    severity = Severity.WARNING
    activities = frozenset({Activity.NETWORK})
    instead = "waits for a network connection"
