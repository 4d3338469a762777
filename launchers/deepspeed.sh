#!/usr/bin/env bash
# One node under DeepSpeed's launcher; --module says that distdiag.check is a module.
#   NPROC=8 launchers/deepspeed.sh train.py --deepspeed_config ds.json
set -euo pipefail
exec deepspeed --num_gpus "${NPROC:-2}" --module distdiag.check "$@"
