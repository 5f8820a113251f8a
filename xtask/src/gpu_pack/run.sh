#!/bin/sh
# Proves paceline's MLX engine on this machine: `paceline selftest`, then every MLX test of the
# models. Then come the tests of the crate gpu on Vulkan: its
# loader, libvulkan.so.1, must be there. Needs sh, tar, gzip and coreutils; no cargo, no network.
#
#   sh run.sh [SECONDS]     [default: 570]
#
# The log is gpu-pack.log in $OUT, else beside this file; the self-test's table lies there too.
# PACELINE_MLXC names another library than the one in the pack.
set -u
here=$(cd "$(dirname "$0")" && pwd)
limit=${1:-570}
out=${OUT:-$here}
began=$(date +%s)
tree=$here/tree
passed=0 failed=0 skipped=0 late=0
BATCH=4         # tests of a process: a hang or an abort costs no more than these
BATCH_LIMIT=120 # seconds; MLX compiles kernels in the first step of a process
SELFTEST_LIMIT=240

left() { echo $((limit - $(date +%s) + began)); }

unpack() {
    [ -x "$tree/bin/paceline" ] && return
    rm -rf "$tree" && mkdir -p "$tree" || return
    cat "$here"/part.* | tar -xzf - -C "$tree"
}

# The library, and NVIDIA's packages of a Python of this machine where the pack has none.
library() {
    mlx=$(echo "$tree"/mlx/*/mlx/lib/libmlxc.so)
    folder=${mlx%/mlx/lib/libmlxc.so}
    if [ -f "$tree/nvidia-of-machine" ] && [ ! -e "$folder/nvidia" ]; then
        ask='import nvidia; print(list(nvidia.__path__)[0])'
        found=$(python3 -c "$ask") && ln -s "$found" "$folder/nvidia"
    fi
    export PACELINE_MLXC="${PACELINE_MLXC:-$mlx}"
}

prepare() {
    mkdir -p "$tree/home" "$tree/tmp"
    export HOME="$tree/home" PACELINE_HOME="$tree/home" TMPDIR="$tree/tmp"
    # Tests find recorded data two folders above this one.
    export CARGO_MANIFEST_DIR="$tree/crates/any" PACELINE_TEST_MODELS="$tree/models"
    # As the program sets it, and all tokens that mlx_lm was recorded with.
    export MLX_ENABLE_TF32=0 PACELINE_MLX_TOKENS="${PACELINE_MLX_TOKENS:-32}"
    library
}

# macOS has no such program; a person is there who can stop this one.
command -v timeout >/dev/null || timeout() { shift 3 && "$@"; }

# Runs a program for at most $1 seconds and not longer than there is time.
within() {
    seconds=$1 && shift
    most=$(left)
    [ "$most" -lt "$seconds" ] && seconds=$most
    [ "$seconds" -gt 0 ] && timeout -k 5 "$seconds" "$@"
}

selftest() {
    model=$tree/models/SmolLM2-135M-Instruct-mlx-4bit
    set -- --report "$out/selftest.txt"
    if [ -d "$model" ]; then set -- "$@" --model "$model"; else set -- "$@" --quick; fi
    if within "$SELFTEST_LIMIT" "$tree/bin/paceline" selftest "$@"; then
        echo "passed selftest" && passed=$((passed + 1))
    else
        echo "FAILED selftest" && failed=$((failed + 1))
    fi
}

# Counts a test that passed; its log says whether it skipped itself.
count_passed() {
    if grep -q '^ *SKIPPED ' "$tree/log"; then
        grep '^ *SKIPPED ' "$tree/log" && skipped=$((skipped + 1))
    else
        echo "passed $1" && passed=$((passed + 1))
    fi
}

# Runs a test alone and shows all of what it says if it fails.
alone() {
    if [ "$(left)" -le 0 ]; then
        echo "NOT RUN $2" && late=$((late + 1))
        return
    fi
    if within "$BATCH_LIMIT" "$1" "$2" --exact --nocapture >"$tree/log" 2>&1; then
        count_passed "$2"
    else
        echo "FAILED $2 (exit code $?)" && failed=$((failed + 1))
        cat "$tree/log"
    fi
}

# Runs tests of a program together, and each alone unless all passed and none skipped itself.
batch() {
    program=$1 && shift
    if [ "$(left)" -gt 0 ] \
        && within "$BATCH_LIMIT" "$program" "$@" --exact --show-output >"$tree/log" 2>&1 \
        && ! grep -q '^ *SKIPPED ' "$tree/log"; then
        for name in "$@"; do echo "passed $name"; done
        passed=$((passed + $#))
        return
    fi
    for name in "$@"; do alone "$program" "$name"; done
}

# All tests of a program whose names have $2 in them.
tests() {
    program=$tree/tests/$1
    names=$("$program" "$2" --list 2>/dev/null | sed -n 's/: test$//p')
    if [ -z "$names" ]; then
        echo "FAILED $1: it lists no test" && failed=$((failed + 1))
        return
    fi
    set --
    for name in $names; do
        set -- "$@" "$name"
        if [ $# -eq "$BATCH" ]; then batch "$program" "$@"; set --; fi
    done
    [ $# -eq 0 ] || batch "$program" "$@"
}

main() {
    unpack || { echo "FAILED to unpack the parts beside run.sh"; return 1; }
    prepare
    selftest
    tests mlx ''
    tests model ''
    tests train mlx::
    tests gpu ''
    seconds=$(($(date +%s) - began))
    echo "$passed passed, $failed failed, $skipped skipped, $late not run in $seconds s"
    [ $((failed + late)) -eq 0 ]
}

mkdir -p "$out"
{ main; echo $? >"$here/code"; } 2>&1 | tee "$out/gpu-pack.log"
exit "$(cat "$here/code")"
