#!/usr/bin/env bash
# One node under accelerate; -m says that distdiag.check is a module.
#   NPROC=8 launchers/accelerate.sh train.py --lr 3e-4
set -euo pipefail
exec accelerate launch --num_processes "${NPROC:-2}" -m distdiag.check "$@"
