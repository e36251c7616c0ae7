#!/usr/bin/env bash
# ./run.sh [PRESET] [NAME=value …] [--name=value …]   set up, get the data, train; --dry-run prints the plan only
# ./run.sh PRESET --proxy[=WIDTH]                     the recipe scaled down to a smaller width: docs/proxy.md
# ./run.sh [PRESET] --script                          train with `./run.sh script PRESET`'s output, as records do
# ./run.sh [PRESET] --help                            lists every constant, with its unit and range
# ./run.sh setup | data [ARG …] | test [ARG …] | bench [ARG …] | static [ARG …] | record ARG … | board --html
# ./run.sh sample RUN ["PROMPT" …]                    sample from a run's model
# ./run.sh gpu-report [PRESET …] [--toy]              check this GPU and suggest constants for it
# ./run.sh script PRESET                              print train_gpt.py with that recipe only
# data: the embedded corpus; --text PATH --name NAME: your own text; sp1024 | sp8192 | gpt2 [-n SHARDS]: published
# tokens; climbmix | fineweb-edu [-n SHARDS]: published text, tokenized here; core: the CORE tasks.
# PYTHON=path uses that interpreter as is: no virtual environment, nothing installed.
set -u
# The checkout's folder, also where a link leads to this file or CDPATH names other places: `python -m` finds our
# modules there, unless PYTHONSAFEPATH is set
unset CDPATH PYTHONSAFEPATH
here=${BASH_SOURCE[0]:-$0}
cd -- "$(dirname -- "$(readlink -f -- "$here" 2>/dev/null || echo "$here")")" || exit 1

refuse() { echo "run.sh: $*" >&2; exit 2; }

# Sets PYTHON to an interpreter that has the packages
setup() {
    # What would be kept in a home that cannot be written
    if [ ! -w "${HOME:-}" ]; then
        export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv-cache/matplotlib}" PIP_NO_CACHE_DIR=1
        export UV_CACHE_DIR="${UV_CACHE_DIR:-$PWD/.venv-cache/uv}"
    fi
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is no program"
        case $("$PYTHON" -V 2>&1) in
            "Python 2."* | "Python 3."[0-9].* | "Python 3.10."*)
                refuse "Python 3.11 or newer is needed; PYTHON=$PYTHON is $("$PYTHON" -V 2>&1)" ;;
        esac
        return
    fi
    local candidate found=""
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            found=$candidate
            break
        fi
    done
    [ -f requirements.txt ] || refuse "there is no requirements.txt in $PWD: run.sh works from its checkout"
    candidate=$(python3 -V 2>/dev/null)
    [ -n "$found" ] || refuse "Python 3.11, 3.12 or 3.13 is needed; ${candidate:-no python3} is here"
    install "$found" .venv "$(cat requirements.txt)"
}

# PyPI's CUDA build of torch, 6 GB: for `static`, which needs no GPU. TORCH=2.11.0 asks for that version in place
# of the one in requirements.txt. `===` takes no build of another index, such as 2.13.0+cpu, where pip knows one.
static_setup() {
    [ -z "${PYTHON:-}" ] || { setup; return; }
    local folder=.venv-static torch
    torch=$(sed -n 's/^torch==//p' requirements.txt)
    if [ -n "${TORCH:-}" ] && [ "$TORCH" != "$torch" ]; then
        torch=$TORCH
        folder=.venv-torch-$TORCH
    fi
    DEVICE=cpu setup
    install "$PYTHON" "$folder" "$(sed "s/^torch==.*/torch===$torch/" requirements.txt)"
}

# install PYTHON FOLDER REQUIREMENTS: a virtual environment that has them; sets PYTHON to its interpreter
install() {
    local folder=$2 make=("$1" -m venv "$2") why
    PYTHON=$folder/bin/python
    if [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$3" ] || ! check "$folder" --ready >/dev/null; then
        [ "$folder" != .venv ] || driver_fits "$3"     # `static` compiles for a GPU and uses none
        remove_broken "$folder"
        if command -v uv >/dev/null; then
            make=(uv venv -q --clear --python "$1" "$folder")
        else
            "$1" -c 'import venv, ensurepip' 2>/dev/null || refuse "Python's venv module is missing: install" \
                "the package python3-venv (Debian, Ubuntu) or uv, or set PYTHON=path"
            # What was whole once and broke is made anew; uv does so anyway
            [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$3" ] || make+=(--clear)
        fi
        echo "setting up $folder: installs $(echo "$3" | grep '^torch') and the rest of requirements.txt, once"
        "${make[@]}" >/dev/null || refuse "could not create $folder: is the disk full, or may you not write?"
        echo "$3" >"$folder/requirements.txt"
        "$PYTHON" tools/run/install.py "$folder/requirements.txt" || exit $?
        why=$(check "$folder" --imports) || refuse "pip has ended, but in $folder ${why:-no Python runs}: remove" \
            "$folder and try again; $folder/install.log has the details"
        echo "$3" >"$folder/installed.txt"
    fi
    without_spaces "$folder"
}

# check FOLDER --ready | --imports: has its interpreter what was asked for? Says what is missing
check() { "$1/bin/python" tools/run/install.py "$2" requirements.txt 2>/dev/null; }

# remove_broken FOLDER: what would stop venv from making it, such as an interpreter that is gone
remove_broken() {
    [ -e "$1" ] || [ ! -L "$1" ] || refuse "$1 is a link to nowhere ($(readlink "$1")): make that folder," \
        "or remove the link"
    [ ! -e "$1" ] || [ -d "$1" ] || refuse "$1 is a file, but packages are to be installed there: move it away"
    "$1/bin/python" -c '' 2>/dev/null || rm -f "$1"/bin/python*
}

# PyPI's torch is a CUDA 13 build, which needs NVIDIA's driver 580 or newer; CUDA 12 runs from 525 on
# (docs.nvidia.com/deploy/cuda-compatibility). Asked before the gigabytes are fetched.
driver_fits() {
    local driver torch
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null) || return 0
    [[ $driver =~ ^[0-9]+ ]] && [ "${driver%%.*}" -lt 580 ] && [ "${DEVICE:-}" != cpu ] || return 0
    torch=$(echo "$1" | grep '^torch==')
    [ "${driver%%.*}" -ge 525 ] || refuse "the NVIDIA driver $driver is too old for $torch, whose CUDA 13 build" \
        "needs 580 or newer: update it"
    refuse "the NVIDIA driver $driver runs CUDA 12, but PyPI's $torch is built for CUDA 13, which needs driver" \
        "580 or newer: update the driver, or install the CUDA 12 build by 'python3 -m venv mine && mine/bin/pip" \
        "install $torch --index-url https://download.pytorch.org/whl/cu126 && mine/bin/pip install -r" \
        "requirements.txt' and put PYTHON=mine/bin/python before ./run.sh; with DEVICE=cpu before ./run.sh, the" \
        "GPU is not used"
}

# without_spaces FOLDER: torch's compiler would take a path apart that has spaces or quotes: PYTHON gets none
without_spaces() {
    local folder=$(pwd -P)/$1 link=${TMPDIR:-/tmp} odd='*[!A-Za-z0-9_./+@%:,=~-]*'
    case $folder in $odd) ;; *) return ;; esac
    case $link in $odd) link=/tmp ;; esac
    link+=/train_gpt_$UID
    mkdir -m 700 "$link" 2>/dev/null
    [ -O "$link" ] && [ ! -L "$link" ] || return
    link+=/$(echo "$folder" | cksum | tr ' ' _)
    [ "$(readlink "$link")" = "$folder" ] || ln -sfn "$folder" "$link"
    PYTHON=$link/bin/python
}

build=""
case "${1:-}" in
    -h | --help | help) sed -n '2,12s/^# //p' run.sh; exit ;;
    setup) setup; exit ;;
    data) case "${2:-}" in "" | -*) program=data.prepare ;; *) program=data.download ;; esac ;;
    test)
        program=tools.dev.test
        [ -z "${TORCH:-}" ] && [ "${2:-} ${3:-}" != "-m static" ] || build=static_ ;;
    static) program=tools.gpu.static build=static_ ;;
    bench) program=tools.dev.bench ;;
    gpu-report) program=tools.gpu.report ;;
    script) program=tools.run.script ;;
    sample) program=tools.run.sample ;;
    record) program=records.record ;;
    board) program=records.record; set -- record "$@" ;;
    *) program=tools.run.launch; set -- train "$@" ;;
esac
shift
"${build}setup" >&2
exec "$PYTHON" -m "$program" "$@"
