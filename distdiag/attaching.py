"""Start and stop the agent from within a script that runs already."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from distdiag.agent import RankAgent
from distdiag.config import KEYS, load_config
from distdiag.errors import UsageError
from distdiag.run_dir import read_launch


def attach_agent(options: Mapping[str, Any]) -> None:
    """Start the agent of this process, if there is none.

    Raises:
        UsageError: an option is wrong, or the run directory cannot be used.

    """
    if RankAgent.current is not None:
        return
    unknown = sorted(set(options) - set(KEYS) - {"config"})
    if unknown:
        raise UsageError(f"attach() has no option {unknown[0]!r}")
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    agent = RankAgent(
        read_launch(os.environ),
        load_config(options),
        tuple(sys.argv),
        main_script=os.path.abspath(path) if path else None,
    )
    RankAgent.current = agent
    agent.start()
    agent.exceptions.watch_excepthook()


def detach_agent() -> None:
    """Stop the agent of this process, if there is one."""
    agent, RankAgent.current = RankAgent.current, None
    if agent is not None:
        agent.stop()
