#!/usr/bin/env bash
# Installs what is needed into .venv and runs the test suite. Arguments go to pytest, for example
#   ./scripts/test.sh tests/cli -k estimate
#   ./scripts/test.sh -n 0 --pdb
#   KVCACHE_TRANSFORMERS_VERSION=5.17.0 ./scripts/test.sh
# Other variables: see scripts/_setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
kvcache_setup test

export HF_HUB_OFFLINE=1 # no test may depend on a download
unset PYTHONDONTWRITEBYTECODE # every module would be compiled anew, assertions and all, by each of many processes
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two processes with two threads each would fight for the cores
# worksteal: each worker starts on a contiguous share, so fixtures of a module are rarely built twice, and an idle
# worker takes over from a busy one; the conformance module alone is too long to be given to one worker whole.
cd "$REPO_ROOT"
exec "$VENV_DIR/bin/python" -m pytest -n 2 --dist worksteal "$@"
