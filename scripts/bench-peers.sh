#!/usr/bin/env bash
# Prepares the peers for `make bench`: a Python environment with other people's session stores, in target/peers. The scripts that drive
# them are not part of this repository; PEERS_DIR says where they are. Without them the benches run alone.
set -eu
cd "$(dirname "$0")/.."
PEERS_DIR=${PEERS_DIR:-../shared/peers}
if [ ! -f "$PEERS_DIR/requirements.txt" ]; then
  echo "no peers at $PEERS_DIR: benches run without them" >&2
  exit 0
fi
venv=target/peers/venv
if [ ! -f "$venv/ready" ]; then
  echo "installing the peers into $venv (a minute or two)" >&2
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$PEERS_DIR/requirements.txt"
  touch "$venv/ready"
fi
