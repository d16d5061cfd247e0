#!/usr/bin/env bash
# Builds the static binary, a Debian package and a container build context in target/dist.
#
#   scripts/package.sh [BINARY]    # BINARY: a static binary that was built before
set -euo pipefail
binary="${1:+$(realpath "$1")}"
cd "$(dirname "$0")/.."

target="$(rustc -vV | sed -n 's/^host: //p')"
if [ -z "$binary" ]; then
    # `--target` keeps build scripts and procedural macros dynamic, which they must be.
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" \
        cargo build --locked --release --target "$target" -p tenure-server
    binary="target/$target/release/tenure"
fi
dist=target/dist
rm -rf "$dist"
mkdir -p "$dist"
install -m 0755 "$binary" "$dist/tenure"
scripts/sbom.py > "$dist/tenure.cdx.json"

# A static binary has no interpreter and no shared libraries.
if readelf --program-headers "$dist/tenure" | grep -q INTERP; then
    echo "error: $dist/tenure is not static" >&2
    exit 1
fi

version="$("$dist/tenure" --version | cut -d' ' -f2)"
case "$target" in
    x86_64-*) architecture=amd64 ;;
    aarch64-*) architecture=arm64 ;;
    *) architecture="${target%%-*}" ;;
esac

stage="$dist/stage"
doc="$stage/usr/share/doc/tenure"
install -D -m 0755 "$dist/tenure" "$stage/usr/bin/tenure"
install -D -m 0640 contrib/debian/tenure.yaml "$stage/etc/tenure/tenure.yaml"
for unit in tenure.service tenure-backup.service tenure-backup.timer; do
    install -D -m 0644 "contrib/systemd/$unit" "$stage/lib/systemd/system/$unit"
done
install -D -m 0644 contrib/systemd/tenure.sysusers "$stage/usr/lib/sysusers.d/tenure.conf"
install -d "$stage/usr/share/bash-completion/completions"
"$dist/tenure" completions bash > "$stage/usr/share/bash-completion/completions/tenure"
install -D -m 0644 LICENSE "$doc/copyright"
install -m 0644 README.md CHANGELOG.md tenure.example.yaml docs/*.md "$doc"
install -D -m 0644 contrib/grafana-dashboard.json contrib/prometheus-alerts.yaml -t "$doc/contrib"
for script in postinst prerm postrm; do
    install -D -m 0755 "contrib/debian/$script" "$stage/DEBIAN/$script"
done
echo /etc/tenure/tenure.yaml > "$stage/DEBIAN/conffiles"
cat > "$stage/DEBIAN/control" <<CONTROL
Package: tenure
Version: $version
Architecture: $architecture
Maintainer: The Tenure authors <noreply@example.com>
Section: net
Priority: optional
Recommends: ca-certificates
Installed-Size: $(du -sk --exclude=DEBIAN "$stage" | cut -f1)
Description: durable sessions for LLM agents
 An OpenAI-compatible endpoint with durable sessions in front of any model
 server, and an agent server. One static binary, with SQLite, JSONL files or
 PostgreSQL as its store.
CONTROL
find "$stage" -type d -exec chmod 0755 {} +
dpkg-deb --root-owner-group --build "$stage" "$dist/tenure_${version}_${architecture}.deb"
rm -rf "$stage"

container="$dist/container"
mkdir -p "$container/data"
cp "$dist/tenure" LICENSE tenure.example.yaml contrib/Dockerfile "$container/"
# An empty directory is not kept by every tool that copies a build context.
touch "$container/data/.keep"
(cd "$dist" && sha256sum tenure *.deb tenure.cdx.json > SHA256SUMS)
ls -l "$dist"
