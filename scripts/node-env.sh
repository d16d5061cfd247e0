#!/usr/bin/env bash
# Installs the Node client libraries into target/clients-node, with the versions in
# package-lock.json, and runs a command that finds them there (TENURE_TEST_NODE):
#
#   scripts/node-env.sh scripts/clients-env.sh pytest tenure-server/tests/clients
#
# Installs only when the versions have changed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd -P)
clients=$root/tenure-server/tests/clients
target=$root/target/clients-node

if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    sudo=''
    if [ "$(id -u)" != 0 ]; then sudo='sudo -n'; fi
    echo "node-env.sh: installing nodejs and npm with apt-get" >&2
    # A stale package list is no reason to give up: what is listed may still be installable.
    $sudo apt-get update -qq >&2 || true
    $sudo apt-get install -y -qq --no-install-recommends nodejs npm </dev/null >&2 || {
        echo "node-env.sh: no Node.js 18 or newer; on Debian: apt-get install nodejs npm" >&2
        exit 1
    }
fi

if ! cmp -s "$clients/package-lock.json" "$target/installed"; then
    rm -rf "$target"
    mkdir -p "$target"
    cp "$clients/package.json" "$clients/package-lock.json" "$target"
    echo "node-env.sh: installing the client libraries into target/clients-node" >&2
    (cd "$target" && npm ci --loglevel=error --no-audit --no-fund --ignore-scripts >&2)
    cp "$clients/package-lock.json" "$target/installed"
fi
TENURE_TEST_NODE=$target exec "$@"
