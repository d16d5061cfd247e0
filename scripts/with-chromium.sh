#!/usr/bin/env bash
# Finds Chromium, or installs it with apt-get, and runs a command that finds it there (TENURE_TEST_CHROMIUM):
#
#   scripts/with-chromium.sh scripts/clients-env.sh pytest tenure-server/tests/clients/test_browser.py
set -eu

find_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome || true; }

chromium=$(find_chromium)
if [ -z "$chromium" ]; then
    sudo=''
    if [ "$(id -u)" != 0 ]; then sudo='sudo -n'; fi
    echo "with-chromium.sh: installing chromium with apt-get" >&2
    # A stale package list is no reason to give up: what is listed may still be installable.
    $sudo apt-get update -qq >&2 || true
    $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends chromium </dev/null >&2 || true
    chromium=$(find_chromium)
fi
if [ -z "$chromium" ]; then
    echo "with-chromium.sh: no Chromium; on Debian: apt-get install chromium" >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
fi
TENURE_TEST_CHROMIUM=$chromium exec "$@"
