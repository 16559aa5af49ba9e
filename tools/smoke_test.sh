#!/usr/bin/env bash
# Do the wheel and the source archive install and work in a clean environment? Builds both with `python -m build`,
# installs the wheel in a fresh virtual environment of each Python, and records, replays and verifies there, outside
# this folder. The source archive is installed in the first environment and tried in the same way.
#
#   tools/smoke_test.sh [PYTHON ...]     python3 if none is named; minutes each, most of it torch's installation
#
# Only the wheel's own dependencies are installed: none of the extras is needed. constraints.txt pins torch, but pip
# chooses the build: on Linux the usual one has CUDA and takes about 5 GB of disk, one environment at a time.
# PIP_FIND_LINKS may name a folder with other builds. TMPDIR is where everything is built; DIST keeps the two archives.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${1:-}" in -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit ;; esac
[ $# -gt 0 ] || set -- python3
for python in "$@"; do
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || {
        echo "$python does not run, is older than Python 3.10, or lacks venv; name another Python" >&2; exit 2; }
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
dist="${DIST:-$work/dist}"
mkdir -p "$dist"
unset PYTHONPATH  # the installed package must be found, not these sources
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1 KRNET_LEDGER="$work/ledger.jsonl"
# As in the tests: small networks need one thread, and some virtual machines advertise AMX without running it.
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA="${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_FP16}"

say() { printf 'smoke test: %s\n' "$*"; }

install() {  # VENV, ARGUMENTS OF PIP
    local venv=$1
    shift
    "$venv/bin/python" -m pip install -q --no-cache-dir --no-compile -c "$root/constraints.txt" "$@"
}

try_commands() {  # VENV: the commands of a recording
    local bin=$1/bin recorder
    "$bin/krnet" --version | grep -qxF "krnet $version" || { say "krnet --version is not $version" >&2; return 1; }
    "$bin/python" -m krnet --version | grep -qxF "krnet $version" || { say "python -m krnet fails" >&2; return 1; }
    "$bin/krnet" --help >help.txt
    for command in plan record info verify replay learn demo bench report; do
        grep -q "^  $command " help.txt || { say "krnet --help has no command $command" >&2; return 1; }
    done
    "$bin/krnet" plan --shape 8,4,4 --class-counts 30x2 --json >plan.json
    "$bin/python" -c 'import numpy as np; r = np.random.default_rng(0); np.save("labels.npy", np.arange(60) % 3)
np.save("features.npy", np.maximum(r.normal(size=(60, 8, 4, 4)), 0).astype("float32"))'
    for recorder in pca krnet; do
        "$bin/krnet" record features.npy --labels labels.npy -o "$recorder.krn" --recorder "$recorder" --budget 8kB \
            $([ "$recorder" = krnet ] && echo --iterations 5) --quiet --json >"record-$recorder.json"
        "$bin/krnet" info "$recorder.krn" --json >"info-$recorder.json"
        "$bin/krnet" verify "$recorder.krn" --against features.npy --json >"verify-$recorder.json"
        "$bin/krnet" replay "$recorder.krn" --ids 0:10 -o "$recorder.npy" --json >"replay-$recorder.json"
    done
    "$bin/python" -c 'open("empty.jsonl", "w")' && "$bin/krnet" report empty.jsonl -o report.html --quiet
    if "$bin/krnet" info labels.npy >/dev/null 2>error.txt; then say "labels.npy was taken for a recording" >&2; return 1; fi
    grep -q '^error: ' error.txt || { cat error.txt >&2; return 1; }
}

try_package() {  # VENV: the calls, on what try_commands has written and on recordings of earlier versions
    "$1/bin/python" -I - "$version" "$(cd "$1" && pwd -P)" <<'PYTHON'
import importlib.metadata
import json
import sys
from pathlib import Path

import krnet
import krnet.cli.app

assert "torch" not in sys.modules, "the command line imports torch before it is needed"
version, venv = sys.argv[1:]
home = Path(krnet.__file__).resolve().parent
assert home.is_relative_to(venv), f"krnet comes from {home}, not from {venv}"
assert importlib.metadata.version("krnet") == version
kernels = sorted(path.name for path in (home / "nn" / "cuda").glob("*.cu"))
assert kernels == ["batchnorm.cu", "kernels.cu"], kernels

import numpy as np
import torch
from safetensors.torch import load_file

for name in krnet.__all__:
    getattr(krnet, name)
features, labels = np.load("features.npy"), np.load("labels.npy")
for recorder in ("pca", "krnet"):
    recording = krnet.open(f"{recorder}.krn")
    assert len(recording) == 60 and recording.shape == (8, 4, 4) and recording.labels.tolist() == labels.tolist()
    assert np.array_equal(recording[list(range(10))].numpy(), np.load(f"{recorder}.npy"))
    assert recording.nbytes <= 8000, recording.nbytes
    assert json.loads(Path(f"verify-{recorder}.json").read_text())["ok"]
krnet.record(features, labels, out="raw.krn", recorder="raw")
assert np.array_equal(krnet.open("raw.krn")[[3, 59]].numpy(), features[[3, 59]])

golden = Path("golden")
manifest, stored = json.loads((golden / "manifest.json").read_text()), load_file(golden / "values.safetensors")
tried = 0
for name, entry in manifest["recordings"].items():
    if entry["recorder"] == "images":
        continue  # needs the extra `images`
    assert krnet.verify(golden / f"{name}.krn")["ok"], name
    expected = stored[f"{name}.values"]
    error = (krnet.open(golden / f"{name}.krn")[entry["ids"]] - expected).abs().max()
    assert error <= manifest["tolerance"] * expected.abs().max(), f"{name}: replays differ by {error}"
    tried += 1
assert tried >= 10, tried
print(f"smoke test: Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}: "
      f"krnet {version} records and replays, {tried} golden recordings open")
PYTHON
}

try_all() {  # VENV
    rm -rf "$work/empty"
    mkdir "$work/empty"
    cp -r "$root/tests/golden" "$work/empty/"
    (
        cd "$work/empty"
        try_commands "$1"
        try_package "$1"
    )
}

say "building wheel and source archive"
"$1" -m venv "$work/build"
install "$work/build" build
"$work/build/bin/python" -m build --outdir "$dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")"
wheel="$dist/krnet-$version-py3-none-any.whl" archive="$dist/krnet-$version.tar.gz"
for file in "$wheel" "$archive"; do
    say "$(basename "$file"), $(wc -c <"$file") bytes"
done

first=1
for python in "$@"; do
    say "wheel, $("$python" --version)"
    "$python" -m venv "$work/venv"
    install "$work/venv" "$wheel"
    "$work/venv/bin/python" -m pip check >/dev/null
    "$work/venv/bin/python" -m compileall -q -f "$work"/venv/lib/python*/site-packages/krnet
    try_all "$work/venv"
    if [ "$first" = 1 ]; then
        say "source archive, $("$python" --version)"
        "$work/venv/bin/python" -m pip uninstall -q -y krnet
        install "$work/venv" --no-deps "$archive"
        try_all "$work/venv"
        first=0
    fi
    rm -rf "$work/venv"
done
say "passed: $*"
