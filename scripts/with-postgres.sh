#!/usr/bin/env bash
# Runs a command with a PostgreSQL server to test against:
#
#   scripts/with-postgres.sh cargo test --all-features
#
# TENURE_TEST_POSTGRES is the server's URL, and PATH has PostgreSQL's programs (pgbench, psql). The server is stopped
# when the command ends, however it ends. One that ran before is used and left running, and so is one that the caller
# named in TENURE_TEST_POSTGRES. The exit code is the command's.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }

if [ -n "${TENURE_TEST_POSTGRES:-}" ]; then exec "$@"; fi

skipped() {
    echo
    echo "**********************************************************************"
    echo "*  PostgreSQL is NOT available: the PostgreSQL tests are SKIPPED.    *"
    echo "**********************************************************************"
    echo
} >&2

finish() {
    code=$?
    trap '' INT TERM HUP # a second Ctrl-C must not leave the server behind
    "$@" || echo "with-postgres.sh: could not stop PostgreSQL, run '$here/postgres.sh stop'" >&2
    exit "$code"
}

if ! "$here/postgres.sh" url >/dev/null 2>&1; then trap 'finish "$here/postgres.sh" stop' EXIT; fi
# Bash runs these once the command, which got the same Ctrl-C, has ended; each then leads to EXIT.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

code=0
TENURE_TEST_POSTGRES=$("$here/postgres.sh" start) || code=$?
case $code in
0)
    PATH=$PATH:$("$here/postgres.sh" bin)
    export PATH TENURE_TEST_POSTGRES
    ;;
3)
    unset TENURE_TEST_POSTGRES
    skipped
    trap 'finish skipped' EXIT # again at the end, where it is seen
    ;;
*) exit "$code" ;;
esac

"$@"
