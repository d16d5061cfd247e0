#!/usr/bin/env bash
# Checks what `make release` built: the package has its files, and the binary runs in a root that contains nothing but
# /dev/urandom (only root can try that, with chroot).
set -euo pipefail
cd "$(dirname "$0")/../target/dist"

sha256sum --check --quiet SHA256SUMS
# Listed before they are searched: `grep -q` on a pipe would end dpkg-deb with SIGPIPE.
files="$(dpkg-deb --contents ./*.deb)"
for file in usr/bin/tenure etc/tenure/tenure.yaml lib/systemd/system/tenure.service usr/lib/sysusers.d/tenure.conf; do
    grep -q " ./$file$" <<< "$files" || { echo "error: the package has no $file" >&2; exit 1; }
done
if command -v systemd-analyze > /dev/null; then
    unit="$(mktemp -d)/tenure.service"
    dpkg-deb --fsys-tarfile ./*.deb | tar -xO ./lib/systemd/system/tenure.service > "$unit"
    systemd-analyze security --offline=true --no-pager --threshold=20 "$unit" | tail -n 1
fi

if [ "$(id -u)" -ne 0 ]; then
    echo "not root: the check in an empty root is left out" >&2
    exit 0
fi
root="$(mktemp -d)"
trap 'kill "$server" 2> /dev/null || true; rm -rf "$root"' EXIT
mkdir "$root/data" "$root/dev"
mknod "$root/dev/random" c 1 8
mknod "$root/dev/urandom" c 1 9
cp tenure "$root/tenure"
in_root() { chroot "$root" /tenure --config /data/tenure.yaml "$@"; }
echo 'listen: 127.0.0.1:18787' > "$root/data/tenure.yaml"
echo 'store: sqlite:/data/tenure.db' >> "$root/data/tenure.yaml"
in_root --version
# Not with the function, which would be a shell of its own: the signal below is for the server.
chroot "$root" /tenure --config /data/tenure.yaml serve > "$root/log" 2>&1 &
server=$!
for _ in $(seq 50); do
    in_root healthcheck > /dev/null 2>&1 && break
    sleep 0.1
done
in_root healthcheck
printf 'Hello\n' | in_root --server http://127.0.0.1:18787 chat hello
in_root backup /data/backup.jsonl
in_root --store sqlite:/data/copy.db restore /data/backup.jsonl
in_root --store sqlite:/data/copy.db doctor
kill "$server"
wait "$server"
echo "the release is complete"
