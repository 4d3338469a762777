#!/usr/bin/env bash
# One node: torchrun as always, with distdiag in front of the script.
#   NPROC=8 launchers/torchrun.sh train.py --lr 3e-4
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${NPROC:-2}" -m distdiag.check "$@"
