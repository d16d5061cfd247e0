#!/usr/bin/env bash
# Prepares the Python environment of the server's tests in target/python, with the versions in requirements.txt, and runs a
# command in it:
#
#   scripts/python-env.sh pytest tenure-server/tests/python
#
# PYTHON_TESTS names another directory of tests with an environment of its own (clients-env.sh). Installs only when the
# versions have changed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd -P)
tests=${PYTHON_TESTS:-python}
wanted=$root/tenure-server/tests/$tests/requirements.txt
venv=$root/target/python
[ "$tests" = python ] || venv=$root/target/$tests-python

if ! cmp -s "$wanted" "$venv/installed"; then
    rm -rf "$venv"
    mkdir -p "$root/target"
    if ! python3 -m venv "$venv" 2>/dev/null; then
        # Debian and Ubuntu have it in a package of its own.
        sudo=''
        if [ "$(id -u)" != 0 ]; then sudo='sudo -n'; fi
        echo "python-env.sh: installing python3-venv with apt-get" >&2
        $sudo apt-get install -y -qq --no-install-recommends python3-venv </dev/null >&2 || {
            echo "python-env.sh: Python 3 with venv can not be had; install it (on Debian and Ubuntu: apt-get install python3-venv)" >&2
            exit 1
        }
        python3 -m venv "$venv"
    fi
    echo "python-env.sh: installing the packages of tests/$tests into target/${venv##*/}" >&2
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" "$venv/installed"
fi
PATH=$venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 exec "$@"
