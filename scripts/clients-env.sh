#!/usr/bin/env bash
# Prepares the Python environment of the client tests in target/clients-python, and runs a command in it:
#
#   scripts/clients-env.sh pytest tenure-server/tests/clients
set -eu
PYTHON_TESTS=clients exec "$(dirname "$0")/python-env.sh" "$@"
