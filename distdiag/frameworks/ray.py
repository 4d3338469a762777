"""Processes of Ray, in which actors run: it ends them when it likes, and not through Python."""

import sys

from distdiag.probes.untyped import Untyped


def is_worker() -> bool:
    """Whether this process is a worker of Ray."""
    ray: Untyped = sys.modules.get("ray._private.worker")
    return ray is not None and bool(ray.global_worker.mode == ray.WORKER_MODE)
