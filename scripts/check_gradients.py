#!/usr/bin/env python3
"""Say what the gradient norms of a run tell: ``distdiag metrics`` for gradient norms alone.

    python scripts/check_gradients.py LOG... [--picture FILE.png] [--format json]

All options of ``distdiag metrics`` are taken. Exits as it does: 1 if gradients explode or end as
NaN.
"""

import sys

from distdiag.cli import main

if __name__ == "__main__":
    main(["metrics", "--series", "grad_norm", *sys.argv[1:]])
