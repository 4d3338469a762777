#!/usr/bin/env python3
"""Say what the losses of a run tell: ``distdiag metrics`` for losses alone.

    python scripts/analyze_loss_curve.py LOG... [--picture FILE.png] [--format json]

All options of ``distdiag metrics`` are taken. Exits as it does: 1 if a loss shows an error.
"""

import sys

from distdiag.cli import main

if __name__ == "__main__":
    main(["metrics", "--series", "loss", "--series", "val_loss", *sys.argv[1:]])
