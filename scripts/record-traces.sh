#!/usr/bin/env bash
# Records what the client libraries send, one JSON file per scenario:
#
#   scripts/record-traces.sh DIRECTORY [CLIENT...]
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
record=$here/../tenure-server/tests/clients/record.py
exec "$here/node-env.sh" "$here/clients-env.sh" python3 "$record" "$@"
