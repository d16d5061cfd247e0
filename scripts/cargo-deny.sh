#!/usr/bin/env bash
# Runs cargo-deny; builds it into target/tools first if the machine has none.
#
#   scripts/cargo-deny.sh --locked check licenses bans sources
set -eu
root=$(cd "$(dirname "$0")/.." && pwd -P)
version=0.20.2
tools=$root/target/tools

deny=$(command -v cargo-deny || true)
if [ -z "$deny" ]; then
    deny=$tools/bin/cargo-deny
    if [ ! -x "$deny" ]; then
        echo "cargo-deny.sh: building cargo-deny $version into target/tools" >&2
        # Unoptimised: it runs for seconds, and builds for minutes.
        env -u CARGO_PROFILE_DEV_DEBUG cargo install cargo-deny --version "$version" --locked --debug \
            --root "$tools" --target-dir "$tools/target" --quiet
        rm -rf "$tools/target"
    fi
fi
cd "$root"
exec "$deny" "$@"
