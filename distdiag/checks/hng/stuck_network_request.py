"""HNG014: a rank waits for a network connection while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckNetworkRequest(StuckRank):
    """A rank waits for a network connection while the others wait for it.

    ## What you see
    The whole job waits for one network connection, which looks like a hang between the ranks. A
    request without a timeout waits as long as the server does not answer.

    ## Example
        # wrong: rank 0 waits for the server, and the others wait for rank 0
        if rank == 0:
            requests.post(tracker, json=metrics)

        # right
        if rank == 0:
            with suppress(requests.RequestException):
                requests.post(tracker, json=metrics, timeout=5)

    ## How to fix
    Pass a timeout to the request and handle its failure
    (`requests.post(url, json=metrics, timeout=5)` within `try`). Or move the request out of the
    training loop.

    Changes: A timeout turns a long wait into an error.

    Leaves: The server that does not answer.

    ## When it is not a defect
    The server answers and the rank is at another line now.

    To silence it, set `ignore = ["HNG014"]` in `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/socket.html#socket.setdefaulttimeout
    """

    code = "HNG014"
    name = "stuck-network-request"
    severity = Severity.WARNING
    activities = frozenset({Activity.NETWORK})
    instead = "waits for a network connection"
