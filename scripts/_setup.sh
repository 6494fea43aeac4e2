# Sourced by the other scripts, never run by itself: prepares the virtual environment and sets
#   REPO_ROOT     the checkout
#   VENV_DIR      the environment; its bin/ is first on PATH afterwards
#
#   kvcache_setup quickstart|test
#
# Variables a user may set:
#   PYTHON                        interpreter the environment is made with        (default: python3)
#   KVCACHE_TORCH_VERSION         torch to install, before everything else        (default: 2.13.0)
#   KVCACHE_TRANSFORMERS_VERSION  transformers to install                         (default: 5.23.0)
#   KVCACHE_VENV                  directory of the environment                    (default: .venv, see below)
# Another version than the default gets an environment of its own (.venv-5.17.0), so that switching costs nothing.
# Where packages come from is pip's own configuration and not decided here.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

KVCACHE_DEFAULT_TORCH_VERSION="2.13.0"
KVCACHE_DEFAULT_TRANSFORMERS_VERSION="5.23.0"
TORCH_VERSION="${KVCACHE_TORCH_VERSION:-$KVCACHE_DEFAULT_TORCH_VERSION}"
TRANSFORMERS_VERSION="${KVCACHE_TRANSFORMERS_VERSION:-$KVCACHE_DEFAULT_TRANSFORMERS_VERSION}"

VENV_DIR="$REPO_ROOT/.venv"
if [[ "$TRANSFORMERS_VERSION" != "$KVCACHE_DEFAULT_TRANSFORMERS_VERSION" ]]; then
    VENV_DIR="$VENV_DIR-$TRANSFORMERS_VERSION"
fi
if [[ "$TORCH_VERSION" != "$KVCACHE_DEFAULT_TORCH_VERSION" ]]; then
    VENV_DIR="$VENV_DIR-torch-$TORCH_VERSION"
fi
if [[ -n "${KVCACHE_VENV:-}" ]]; then
    mkdir -p "$(dirname "$KVCACHE_VENV")"
    VENV_DIR="$(cd "$(dirname "$KVCACHE_VENV")" && pwd)/$(basename "$KVCACHE_VENV")"
fi

kvcache_say() { printf '==> %s\n' "$*" >&2; }
kvcache_die() { printf 'error: %s\n' "$*" >&2; exit 1; }

kvcache_python_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints the first interpreter that is new enough: $PYTHON, python3, then versioned names.
kvcache_find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        kvcache_python_is_new_enough "$PYTHON" || kvcache_die "PYTHON=$PYTHON is not a Python >= 3.10"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if kvcache_python_is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    kvcache_die "no Python >= 3.10 found; set the variable PYTHON to one"
}

kvcache_pip() { "$VENV_DIR/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# An environment made by hand is used as it is: what it already has is kept where the pins allow it.
kvcache_ensure_venv() {
    local python
    if [[ ! -e "$VENV_DIR" ]]; then
        python="$(kvcache_find_python)"
        kvcache_say "creating ${VENV_DIR#"$REPO_ROOT"/} with $("$python" --version 2>&1)"
        if ! "$python" -m venv "$VENV_DIR"; then
            rm -rf "$VENV_DIR" # it did not exist before this call, and half an environment would be taken for one
            kvcache_die "'$python -m venv' failed (some systems package the venv module apart, as python3-venv)"
        fi
    fi
    [[ -x "$VENV_DIR/bin/python" ]] \
        || kvcache_die "$VENV_DIR exists but has no bin/python; remove it or set KVCACHE_VENV to another directory"
    kvcache_python_is_new_enough "$VENV_DIR/bin/python" \
        || kvcache_die "$VENV_DIR is broken or older than Python 3.10; remove it and run again"
    if ! "$VENV_DIR/bin/python" -m pip --version > /dev/null 2>&1; then
        kvcache_say "adding pip to ${VENV_DIR#"$REPO_ROOT"/}"
        "$VENV_DIR/bin/python" -m ensurepip --upgrade > /dev/null \
            || kvcache_die "$VENV_DIR has neither pip nor ensurepip; remove it and run again"
    fi
}

# What the installation depends on, as one hash: the requirements, the pins, the interpreter, the place of the checkout.
kvcache_fingerprint() {
    "$VENV_DIR/bin/python" - "$REPO_ROOT" "$TORCH_VERSION" "$TRANSFORMERS_VERSION" << 'EOF'
import hashlib, pathlib, sys

root, *pins = sys.argv[1:]
digest = hashlib.sha256((pathlib.Path(root) / "pyproject.toml").read_bytes())
digest.update("\0".join([root, sys.version, *pins]).encode())
print(digest.hexdigest())
EOF
}

kvcache_setup() {
    local profile="$1" extras stamp_file stamp fingerprint
    case "$profile" in
        quickstart) extras="quanto,hqq,plots,eval" ;;
        test) extras="dev,quanto,hqq,plots,eval" ;;
        *) kvcache_die "kvcache_setup: unknown profile '$profile'" ;;
    esac

    kvcache_ensure_venv
    export VIRTUAL_ENV="$VENV_DIR" PATH="$VENV_DIR/bin:$PATH" # ninja, which native builds call, lives in bin/
    unset PYTHONHOME

    # One stamp for both profiles: "test" contains "quickstart", so either stamp serves the quickstart.
    stamp_file="$VENV_DIR/.kvcache_plugins-setup"
    fingerprint="$(kvcache_fingerprint)"
    stamp="$(cat "$stamp_file" 2> /dev/null || true)"
    if [[ "$stamp" == "$fingerprint test" || "$stamp" == "$fingerprint $profile" ]]; then
        return
    fi
    rm -f "$stamp_file" # an installation that is interrupted half-way must not look finished

    kvcache_say "installing torch $TORCH_VERSION (large; the first time takes minutes)"
    kvcache_pip "torch==$TORCH_VERSION"
    # The pin is repeated so that no requirement further down may replace the build that was just installed.
    kvcache_say "installing kvcache-plugins [$extras] with transformers $TRANSFORMERS_VERSION"
    kvcache_pip "torch==$TORCH_VERSION" "transformers==$TRANSFORMERS_VERSION" -e "$REPO_ROOT[$extras]"
    kvcache_say "environment ready: ${VENV_DIR#"$REPO_ROOT"/}"
    printf '%s %s\n' "$fingerprint" "$profile" > "$stamp_file"
}
