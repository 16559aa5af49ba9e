#!/usr/bin/env bash
# Do two commits make the same files? The same short fits, replays and digits runs with the sources of each, on this
# machine, compared bit for bit; the table says what differs. Exit code 1 if anything does.
#
#   tools/compare_commits.sh A B [CASE ...]     about three minutes for all cases, both commits at once
#
# The cases are those of this checkout (tools/compare_run.py), whatever the commits hold. B may be "." for the files
# as they are now. PYTHON names another interpreter than .venv/bin/python; KEEP names a folder that keeps the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
first=$1 second=$2
shift 2

python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || { echo "no $python; run make setup, or set PYTHON" >&2; exit 2; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
results="${KEEP:-$work/results}"
for side in A B; do
    [ ! -e "$results/$side" ] || { echo "$results/$side is there already; remove it, or set KEEP to another folder" >&2; exit 2; }
done
mkdir -p "$results"

take_sources() {  # COMMIT FOLDER
    mkdir -p "$2"
    if [ "$1" = . ]; then cp -r src "$2/"; else git archive "$1" src | tar -x -C "$2"; fi
}

run_side() {  # FOLDER OF SOURCES, FOLDER OF RESULTS, CASES: all that may change a bit is set here
    local sources=$1 out=$2
    shift 2
    env PYTHONPATH="$sources/src" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 \
        MPLBACKEND=Agg KRNET_COMMIT=compared KRNET_LEDGER="$work/ledger-$(basename "$out").jsonl" \
        "$python" tools/compare_run.py "$out" "$@" 2>"$out.log" || { tail -n 20 "$out.log" >&2; return 1; }
}

take_sources "$first" "$work/a"
take_sources "$second" "$work/b"
echo "A $first, B $second" >&2
run_side "$work/a" "$results/A" "$@" & a=$!
run_side "$work/b" "$results/B" "$@" & b=$!
failed=0
wait "$a" || failed=1
wait "$b" || failed=1
[ "$failed" = 0 ] || exit 2
"$python" tools/compare_results.py "$results/A" "$results/B"
