#!/usr/bin/env bash
# What a workflow does on a pull request, each step with its status: ./steps.sh PYTHON
# A first run finds a fault that is there already; it is accepted; a change brings another one.
set -u
python=$1
distdiag() { "$python" -m distdiag.cli "$@"; }
step() {
    echo "step: $1"
    shift
    "$@"
    echo "status: $?"
}
step "first run" distdiag check --run-dir first train.py
step "accept" distdiag baseline first -o baseline.json
step "same fault" distdiag check --baseline baseline.json --run-dir same --report sarif,junit train.py
step "new fault" distdiag check --baseline baseline.json --run-dir new train.py --accuracy
step "upload" distdiag report new --format sarif -o report.sarif
