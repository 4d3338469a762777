"""Watches the ranks of one node: ``python -m distdiag.monitor RUN_DIR ATTEMPT``."""

import sys

from distdiag.monitor.monitor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
