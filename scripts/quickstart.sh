#!/usr/bin/env bash
# Installs what is needed into .venv and compares the cache backends on the bundled model, offline.
# Arguments go to examples/quickstart.py (try --help). Variables: see scripts/_setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
kvcache_setup quickstart

# The bundled model and text need no network. A hub id given with --model does, so only the default is kept offline.
case " $* " in
    *" --model"*) ;;
    *) export HF_HUB_OFFLINE=1 ;;
esac
exec "$VENV_DIR/bin/python" "$REPO_ROOT/examples/quickstart.py" "$@"
