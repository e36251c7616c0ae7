#!/usr/bin/env bash
# ./run.sh [PRESET] [NAME=value …] [--name=value …]   set up, get data, train; --dry-run: print the plan only
# ./run.sh PRESET --proxy[=WIDTH]                     the recipe at another width, for any machine: docs/proxy.md
# ./run.sh [PRESET] --script                          train by what `./run.sh script PRESET` prints, for a record
# ./run.sh [PRESET] --help                            every constant, with its unit and the presets' values
# ./run.sh setup | data [ARG …] | test [ARG …] | bench [ARG …] | static [ARG …] | record ARG … | board --html
# ./run.sh gpu-report [PRESET …] [--toy]              is this GPU ready, and which constants should change?
# ./run.sh script PRESET                              train_gpt.py with that recipe only, to the terminal
# ./run.sh depths [--name=value …]                    what the depth dial makes of depths 4 to 32
# data: the embedded corpus; --text PATH --name NAME: your own text; sp1024 | sp8192 | gpt2 [-n SHARDS]: published
# tokens; data climbmix | fineweb-edu [-n SHARDS]: published text, tokenized here; data core: the tasks of CORE.
# PYTHON=path uses that interpreter as it is: no virtual environment, no installation.
set -u
# The checkout's folder, also where a link leads to this file or CDPATH names other places
unset CDPATH
here=${BASH_SOURCE[0]:-$0}
cd -- "$(dirname -- "$(readlink -f -- "$here" 2>/dev/null || echo "$here")")" || exit 1

refuse() { echo "run.sh: $*" >&2; exit 2; }

# Of a path: all but these characters might be taken apart by torch's compiler
odd_path='*[!A-Za-z0-9_./+@%:,=~-]*'

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
    without_spaces .venv
}

# without_spaces FOLDER: sets PYTHON to a path of FOLDER's interpreter without spaces or quotes
without_spaces() {
    local folder=$(pwd -P)/$1 link=${TMPDIR:-/tmp}
    case $folder in $odd_path) ;; *) return ;; esac
    case $link in $odd_path) link=/tmp ;; esac
    link+=/train_gpt_$UID
    mkdir -m 700 "$link" 2>/dev/null
    [ -O "$link" ] && [ ! -L "$link" ] || return
    link+=/$(echo "$folder" | cksum | tr ' ' _)
    [ "$(readlink "$link")" = "$folder" ] || ln -sfn "$folder" "$link"
    PYTHON=$link/bin/python
}

# PyPI's torch is a CUDA 13 build, which needs NVIDIA's driver 580 or newer; CUDA 12 runs from 525 on
# (docs.nvidia.com/deploy/cuda-compatibility). Asked before the gigabytes are fetched.
driver_fits() {
    local driver torch
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null) || return 0
    [[ $driver =~ ^[0-9]+ ]] && [ "${driver%%.*}" -lt 580 ] || return 0
    [ "${DEVICE:-}" != cpu ] || return 0
    torch=$(echo "$1" | grep '^torch==')
    [ "${driver%%.*}" -ge 525 ] ||
        refuse "the NVIDIA driver $driver is too old for $torch, whose CUDA 13 build needs 580 or newer: update it"
    refuse "the NVIDIA driver $driver runs CUDA 12, but PyPI's $torch is built for CUDA 13, which needs driver 580 or" \
        "newer: update the driver, or install the CUDA 12 build by 'python3 -m venv mine && mine/bin/pip install" \
        "$torch --index-url https://download.pytorch.org/whl/cu126 && mine/bin/pip install -r requirements.txt' and" \
        "put PYTHON=mine/bin/python before ./run.sh; with DEVICE=cpu before ./run.sh, the GPU is not used"
}

# install PYTHON FOLDER REQUIREMENTS: a virtual environment that has them; sets PYTHON to its interpreter
install() {
    PYTHON=$2/bin/python
    [ "$(cat "$2/installed.txt" 2>/dev/null)" = "$3" ] && check_installed "$2" --ready >/dev/null && return
    [ "$2" != .venv ] || driver_fits "$3"     # `static` compiles for a GPU and uses none
    remove_broken "$2"
    local make=("$1" -m venv "$2") fetch=("$PYTHON" tools/install.py) why
    if command -v uv >/dev/null; then
        make=(uv venv -q --clear --python "$1" "$2") fetch=(uv pip install --python "$PYTHON" -r)
    else
        "$1" -c 'import venv, ensurepip' 2>/dev/null ||
            refuse "Python's venv module is missing: install the package python3-venv (Debian, Ubuntu) or uv, or" \
                "set PYTHON=path"
    fi
    # What was whole once and broke is made anew; uv does so anyway
    [ "$(cat "$2/installed.txt" 2>/dev/null)" != "$3" ] || [ "${make[0]}" = uv ] || make+=(--clear)
    echo "setting up $2: installs $(echo "$3" | grep '^torch') and the rest of requirements.txt, once"
    "${make[@]}" >/dev/null || refuse "could not create $2: is the disk full, or may you not write here?"
    echo "$3" >"$2/requirements.txt"
    installing "$2" "${fetch[@]}" "$2/requirements.txt" || {
        grep -qi "no space left" "$2/install.log" && refuse "the disk is full: $2 takes some gigabytes"
        refuse "requirements.txt could not be installed: is there a network? $2/install.log has the details"
    }
    why=$(check_installed "$2" --imports) ||
        refuse "pip has ended, but in $2 ${why:-no Python runs}: remove $2 and try again; $2/install.log has" \
            "the details"
    echo "$3" >"$2/installed.txt"
}

# check_installed FOLDER --ready | --imports: has its interpreter what was asked for? Says what is missing
check_installed() { "$1/bin/python" tools/install.py "$2" requirements.txt 2>/dev/null; }

# remove_broken FOLDER: what would stop venv from making it: an interpreter that is gone, a link to nowhere, a file
remove_broken() {
    if [ -L "$1" ] && [ ! -e "$1" ]; then rm -f "$1"; fi
    [ ! -e "$1" ] || [ -d "$1" ] || refuse "$1 is a file, but packages are to be installed there: move it away"
    "$1/bin/python" -c '' 2>/dev/null || rm -f "$1"/bin/python*
}

# installing FOLDER COMMAND…: runs it; on a terminal a line tells the seconds and what has arrived so far
installing() {
    local folder=$1 began=$SECONDS
    shift
    "$@" >"$folder/install.log" 2>&1 &
    trap 'kill $!; exit 130' INT TERM HUP QUIT
    while [ -t 2 ] && kill -0 $! 2>/dev/null; do
        local size=$(du -sh "$folder" 2>/dev/null | cut -f1)
        printf '\r\033[Kinstalling: %s s, %s' $((SECONDS - began)) "$size" >&2
        sleep 1
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
    wait $! && trap - INT TERM HUP QUIT
}

# PyPI's CUDA build of torch, 6 GB: for `static`, which needs no GPU. TORCH=2.11.0 asks for that version in place of
# the one in requirements.txt. `===` takes no build of another index in its place, such as 2.13.0+cpu, where pip
# knows one.
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
    without_spaces "$folder"
}

data() {
    case "${1:-}" in
        "" | -*) "$PYTHON" data/prepare.py "$@" ;;
        *) "$PYTHON" data/download.py "$@" ;;
    esac
}

# GPUs that torch will see, whatever CUDA_VISIBLE_DEVICES holds: numbers, UUIDs, MIG names. KFD is the file of
# AMD's driver, whose GPUs a ROCm build given by PYTHON= sees (untested)
gpus() {
    { [ -e "${KFD:-/dev/kfd}" ] || nvidia-smi -L >/dev/null 2>&1; } &&
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count())' || echo 0
}

# The data of a preset, where they are missing. Without the tasks of CORE a run with CORE=0 goes on.
preset_data() {
    case $1 in
        tiny) [ -f data/datasets/embedded/manifest.json ] || data || exit $? ;;
        golf) [ -f data/datasets/fineweb10B_sp1024/manifest.json ] || data sp1024 -n 80 || exit $? ;;
        golf_plus) [ -f data/datasets/fineweb10B_sp8192/manifest.json ] || data sp8192 -n 128 || exit $? ;;
        speedrun*) [ -f data/datasets/fineweb10B_gpt2/manifest.json ] || data gpt2 || exit $? ;;
        gpt2) [ -f data/datasets/fineweb_edu/manifest.json ] || data fineweb-edu || exit $? ;;
        gpt2_plus) [ -f data/datasets/climbmix/manifest.json ] || data climbmix || exit $? ;;
    esac
    case $1 in
        gpt2*) [ -f data/core_bundle/core.yaml ] || data core ;;
        speedrun_plus) [ -f data/tokenizers/gpt2_vocab.json ] || data gpt2-vocab || exit $? ;;
    esac
    return 0
}

# Makes a script of this recipe alone and sets script to its path
one_recipe() {
    local folder=logs/.script/$1
    mkdir -p "$folder" && "$PYTHON" tools/script.py "$1" >"$folder/$$" && mv "$folder/$$" "$folder/train_gpt.py" ||
        refuse "the script of $1 could not be made in $folder"
    script=$folder/train_gpt.py
}

# np.sort, which counts n-grams, takes 5 times as long with AVX-512 on Zen 4 as with AVX2; on Intel half
fast_sort() {
    if grep -qs AuthenticAMD /proc/cpuinfo && [ -z "${NPY_ENABLE_CPU_FEATURES:-}" ]; then
        export NPY_DISABLE_CPU_FEATURES="${NPY_DISABLE_CPU_FEATURES-AVX512F}"
    fi
}

train() {
    local script=train_gpt.py flags=() preset=${PRESET:-tiny} path=${DATA_PATH:-} resume=${RESUME:-} proxy="" log
    local alone=""      # by a script of one recipe?
    local argument n word="" plan_only=${DRY_RUN:-}
    for argument in "$@"; do
        case $argument in
            --script) alone=1; continue ;;
            --*) ;;
            LOGGER=*) export LOGGER="${argument#*=}"; continue ;;
            *=*) argument="--$(echo "${argument%%=*}" | tr 'A-Z_' 'a-z-')=${argument#*=}" ;;
            *) word=$argument argument="--preset=$argument" ;;
        esac
        case $argument in
            --preset=*) preset=${argument#*=} ;;
            --device=*) DEVICE=${argument#*=} ;;    # driver_fits asks it, too
            --data-path=*) path=${argument#*=} ;;
            --resume=*) resume=${argument#*=} ;;
            --dry-run=*) plan_only=${argument#*=} ;;
            --dry-run) plan_only=1 ;;
            --help) plan_only=1 DEVICE=cpu ;;
            --proxy | --proxy=*) proxy=1 script=tools/proxy.py ;;
        esac
        flags+=("$argument")
    done
    case $plan_only in 0 | [Ff]alse | FALSE) plan_only="" ;; esac
    # A run goes on with the script and the GPUs of its own preset; its data are there
    if [ -n "$resume" ]; then
        log=logs/$resume/train.log
        if grep -qs '^config preset=' "$log"; then
            preset=$(sed -n 's/^config preset=//p' "$log" | head -n 1)
        fi
        if grep -qs '^config device=cpu' "$log"; then DEVICE=${DEVICE:-cpu}; fi
        if grep -qs '^proxy ' "$log"; then proxy=1; fi
    fi
    [ -z "$alone" ] || [ -z "$proxy" ] || refuse "--script: proxies are made from the whole train_gpt.py"
    # The golf games count the bytes of their script. A resumed run goes on with the kind that it began with
    case $preset in golf | golf_plus) alone=1 ;; esac
    if [ -n "$resume" ]; then
        if cmp -s "logs/$resume/train_gpt.py" train_gpt.py; then alone=""; fi
        if head -n 1 "logs/$resume/train_gpt.py" 2>/dev/null | grep -q " alone, made by "; then alone=1; fi
    fi
    setup
    fast_sort
    if [ -n "$alone" ] && [ -z "$proxy$plan_only" ]; then one_recipe "$preset"; fi
    local run=("$PYTHON" tools/watch.py "$PYTHON")
    [ -z "$plan_only" ] || run=("$PYTHON")
    n=$(gpus)
    [ "$preset" != tiny ] && [ -z "$proxy" ] || n=$((n > 0))     # a step has few rows
    if [ -n "$proxy" ]; then
        [ -n "$path$plan_only$resume" ] || preset_data tiny     # any text will do
    elif [ -z "$path$plan_only$resume" ]; then
        # What needs a GPU is refused before its gigabytes are fetched
        if [ "$n" = 0 ] && [ "$preset" != tiny ] && [ "${DEVICE:-}" != cpu ]; then
            machine=$("$PYTHON" "$script" ${flags[@]+"${flags[@]}"} --dry-run) || {
                local code=$?
                [ -z "$word" ] || echo "run.sh: ./run.sh help lists its commands" >&2
                exit $code
            }
            machine=$(echo "$machine" | sed -n 's/^machine: //p')
            [ -z "$machine" ] || refuse "$machine"
        fi
        preset_data "$preset"
    fi
    # A script of one recipe prints only the table of stages, so the whole file prints the plan
    if [ -z "$plan_only$resume$proxy" ] && [ "$script" != train_gpt.py ]; then
        "$PYTHON" train_gpt.py ${flags[@]+"${flags[@]}"} --dry-run || exit $?
    fi
    if [ "$n" -gt 1 ] && [ "${DEVICE:-}" != cpu ]; then
        # What is refused is refused here: torchrun would add a traceback and make exit code 2 a 1
        "$PYTHON" "$script" ${flags[@]+"${flags[@]}"} --dry-run >/dev/null || exit $?
        exec "${run[@]}" -m torch.distributed.run --standalone --nproc_per_node="$n" "$script" \
            ${flags[@]+"${flags[@]}"}
    fi
    exec "${run[@]}" "$script" ${flags[@]+"${flags[@]}"}
}

case "${1:-}" in
    -h | --help | help) sed -n '2,12s/^# //p' run.sh ;;
    setup) setup ;;
    data) shift; setup; data "$@" ;;
    test)
        shift
        case "${TORCH:+torch} ${1:-} ${2:-}" in
            torch* | " -m static") static_setup ;;
            *) setup ;;
        esac
        # Else each of some hundred programs would compile its modules again
        unset PYTHONDONTWRITEBYTECODE
        # All tests, or the quick ones: in two processes, of which one takes over what is left of the other's.
        # Tests that are named run in one process, as pytest runs them. docs/testing.md
        processes=()
        if [ $# = 0 ] || [ "$*" = quick ]; then
            [ $# = 0 ] || set -- -m "quick and not slow"
            if "$PYTHON" -c 'import xdist' 2>/dev/null; then
                export OMP_NUM_THREADS=1
                processes=(-n 2 --dist worksteal)
            fi
        fi
        exec "$PYTHON" -m pytest -q ${processes[@]+"${processes[@]}"} "$@"
        ;;
    bench) shift; setup; fast_sort; exec "$PYTHON" tools/bench.py "$@" ;;
    static) shift; static_setup; exec "$PYTHON" tools/static_gpu.py "$@" ;;
    gpu-report)
        shift
        setup
        # As train_gpt.py does it
        [ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
        exec "$PYTHON" tools/gpu_report.py "$@"
        ;;
    script) shift; setup >&2; exec "$PYTHON" tools/script.py "$@" ;;
    record) shift; setup; exec "$PYTHON" records/record.py "$@" ;;
    depths) shift; setup; exec "$PYTHON" tools/depths.py "$@" ;;
    board) setup; exec "$PYTHON" records/record.py "$@" ;;
    *) train "$@" ;;
esac
