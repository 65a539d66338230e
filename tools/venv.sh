# Sourced by tools/check and tools/demo: goes to the checkout's root and gives it a .venv.
# Installing is skipped while pyproject.toml is the one that was installed from.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv

say() { printf '== %s\n' "$*"; }

die() {
    printf '%s: error: %s\n' "$0" "$*" >&2
    exit 1
}

# The first Python that is new enough; PYTHON=/path/to/python decides instead.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    candidate=${PYTHON:-python3}
    die "loongd needs Python 3.11 or newer, and $candidate is $(
        "$candidate" --version 2>/dev/null || echo 'not there'
    ): install one, or name one with PYTHON=/path/to/python"
}

# What the stamp must say for an install to be up to date.
fingerprint() { printf '%s %s\n' "$torch" "$("$venv/bin/python" -c '
import hashlib, pathlib
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes()).hexdigest())')"; }

# install_once NAME PIP_ARGUMENTS...: one `pip install`, stamped.
install_once() {
    local name=$1 stamp=$venv/installed-$1
    shift
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$(fingerprint)" ]]; then
        return
    fi
    say "installing $name into .venv (the first time takes minutes)"
    # Twice quiet: errors only.
    "$venv/bin/pip" install --quiet --quiet --disable-pip-version-check "$@"
    fingerprint >"$stamp"
}

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" ||
        die "$python cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)"
fi
# Where there is no NVIDIA GPU, the version that the tests of the CPU path are known to pass with.
if command -v nvidia-smi >/dev/null; then torch=torch; else torch=torch==2.13.0; fi

# Older pips do not know --group.
install_once pip --upgrade 'pip>=25.1'
install_once loongd "$torch" --editable .
export PATH=$venv/bin:$PATH
