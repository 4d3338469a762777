"""Reads its input and the environment."""

import os
import sys

print("stdin", sys.stdin.read().split())
print("environment", sorted(name for name in os.environ if not name.startswith("DISTDIAG_")))
