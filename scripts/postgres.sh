#!/usr/bin/env bash
# A throw-away PostgreSQL server for the tests of this checkout.
#
#   scripts/postgres.sh start     start it (install PostgreSQL if missing), print its URL
#   scripts/postgres.sh url       print the URL of the running server
#   scripts/postgres.sh restart   stop it as a crash would, start it on the same port and data
#   scripts/postgres.sh kill      SIGKILL the postmaster; `start` brings it back with its data
#   scripts/postgres.sh stop      stop it and remove its data
#   scripts/postgres.sh bin       print the directory of PostgreSQL's programs
#
# A test that kills its server sets TENURE_TEST_PG_NAME, so as to have one of its own.
# Exit code 3: PostgreSQL can not be had here. Under CI that is a plain failure (1): CI never skips.
set -eu
export LC_ALL=C

root=$(cd "$(dirname "$0")/.." && pwd -P)
# One server per user, checkout and name. The name goes through the checksum, so it can not lead `rm -rf` astray.
key=$(printf '%s\n' "$(id -u)" "$root" "${TENURE_TEST_PG_NAME:-}" | cksum | cut -d ' ' -f 1)
tmp=${TMPDIR:-/tmp}
dir=${tmp%/}/tenure-test-pg-$key
data=$dir/data

log() { echo "postgres.sh: $*" >&2; }
die() { log "$*"; exit 1; }

unavailable() {
    log "PostgreSQL is not available: $*"
    log "install PostgreSQL 14 or newer (on Debian and Ubuntu: apt-get install postgresql),"
    log "or put its initdb, pg_ctl and postgres on PATH"
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 3
}

# Prints the directory that holds the server's programs, the newest if there are several.
find_bin() {
    local pg_ctl candidate
    pg_ctl=$(command -v pg_ctl || true)
    {
        # PATH may hold links to a few of the programs only; the directory behind them has all.
        if [ -n "$pg_ctl" ]; then dirname "$(readlink -f "$pg_ctl")"; fi
        printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV
    } | while read -r candidate; do
        if [ -x "$candidate/initdb" ] && [ -x "$candidate/pg_ctl" ] && [ -x "$candidate/postgres" ]; then
            echo "$candidate"
            break
        fi
    done
}

install() {
    local sudo='' no_cluster=/etc/postgresql-common/createcluster.d/tenure-test.conf ok=yes
    command -v apt-get >/dev/null || unavailable "it is not installed and there is no apt-get"
    if [ "$(id -u)" != 0 ]; then
        sudo='sudo -n'
        $sudo true 2>/dev/null || unavailable "it is not installed and installing it needs root"
    fi
    log "installing PostgreSQL with apt-get"
    # The package would create and start a server of its own; this file, gone again below, tells it not to.
    $sudo mkdir -p "${no_cluster%/*}"
    echo 'create_main_cluster = false' | $sudo tee "$no_cluster" >/dev/null
    # A stale package list is no reason to give up: what is listed may still be installable.
    $sudo apt-get update -qq >&2 || log "apt-get update failed, trying with the package lists at hand"
    $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends postgresql </dev/null >&2 || ok=no
    $sudo rm -f "$no_cluster"
    [ "$ok" = yes ] || unavailable "apt-get install postgresql failed, see above"
}

# Sets $bin, installing PostgreSQL if need be.
need_bin() {
    bin=$(find_bin)
    if [ -z "$bin" ]; then
        install
        bin=$(find_bin)
        [ -n "$bin" ] || unavailable "the package brought no server to /usr/lib/postgresql/*/bin"
    fi
}

# PostgreSQL refuses to run as root.
as_postgres() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

postmaster() { head -n 1 "$data/postmaster.pid" 2>/dev/null; }

# Looks at the command line, not only at the process id: the id in a stale file may by now belong to something
# else, and a dead postmaster that has not been reaped still has an id but no command line.
running() {
    local pid
    pid=$(postmaster) || return 1
    if [ -d /proc/self ]; then
        tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$data"
    else
        ps -ww -o args= -p "$pid" | grep -qF -- "$data"
    fi 2>/dev/null
}

url() { echo "postgres://postgres@127.0.0.1:$(cat "$dir/port")/postgres"; }

# A port on which no process listens. Below 32768, so that no outgoing connection is given it while the server is down.
free_port() {
    local port
    for _ in $(seq 100); do
        port=$((20000 + RANDOM % 12000))
        if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return
        fi
    done
    die "no free port between 20000 and 32000"
}

# Builds the cluster aside and moves it into place: what is at $dir is always whole.
create() {
    if [ "$(id -u)" = 0 ] && ! id postgres >/dev/null 2>&1; then
        log "creating the user postgres"
        useradd --system --shell /bin/sh postgres || die "can not create the user: create it, or do not run as root"
    fi
    log "creating a cluster in $dir"
    new=$(mktemp -d "$dir.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    if [ "$(id -u)" = 0 ]; then chown postgres: "$new"; fi
    cd "$new" # the caller's directory may be closed to the user postgres
    as_postgres test -w "$new" || die "the user postgres can not write to $tmp: set TMPDIR to a directory open to it"
    as_postgres "$bin/initdb" -D "$new/data" -U postgres -A trust -E UTF8 --locale=C --no-sync >"$new/log" 2>&1 || {
        cat "$new/log" >&2
        die "initdb failed, see above"
    }
    # fsync stays on: the tests are about what survives.
    cat >>"$new/data/postgresql.conf" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = '$dir'
max_connections = 200
shared_buffers = 256MB
CONF
    free_port >"$new/port"
    : >"$new/log"
    if [ "$(id -u)" = 0 ]; then chown postgres: "$new/log"; fi
    [ -d "$dir" ] || mv "$new" "$dir" # unless another start was quicker
    rm -rf "$new"
    trap - EXIT
}

# A killed postmaster that has not been reaped yet looks alive to PostgreSQL, which then refuses to start. Put an id
# that no process can have in place of its own; the rest of the file still guards against its surviving children.
forget_dead_postmaster() {
    local file=$data/postmaster.pid rest
    if [ -f "$file" ]; then
        rest=$(tail -n +2 "$file")
        printf '%s\n' 4194305 "$rest" >"$file"
        rm -f "$dir"/.s.PGSQL.*.lock
    fi
}

start() {
    local try out port
    need_bin
    [ -d "$dir" ] || create
    cd "$dir"
    if running; then
        url
        return
    fi
    forget_dead_postmaster
    port=$(cat "$dir/port")
    log "starting on port $port"
    for try in $(seq 60); do
        : >"$dir/log"
        if out=$(as_postgres "$bin/pg_ctl" start -w -t 60 -D "$data" -l "$dir/log" -o "-p $port" </dev/null 2>&1); then
            url
            return
        fi
        # After a kill the old server's children take a moment to notice that it is gone.
        grep -q 'pre-existing shared memory block' "$dir/log" || break
        if [ "$try" = 1 ]; then log "waiting for the killed server's children to end"; fi
        sleep 0.5
    done
    { echo "$out"; tail -n 20 "$dir/log"; } >&2
    die "the server did not start, see above; '$0 stop' removes it"
}

# $1: the mode of pg_ctl. Immediate is a crash without the loss of the machine.
halt() {
    need_bin
    cd "$dir"
    log "stopping"
    as_postgres "$bin/pg_ctl" stop -s -w -t 60 -D "$data" -m "$1" >&2 || die "can not stop process $(postmaster)"
}

need_running() { running || die "not running: run '$0 start' first"; }

case ${1:-} in
start) start ;;
url)
    need_running
    url
    ;;
restart)
    need_running
    halt immediate
    start
    ;;
kill)
    need_running
    kill -KILL "$(postmaster)"
    while running; do sleep 0.05; done
    ;;
stop)
    if running; then halt fast; fi
    rm -rf "$dir"
    ;;
bin)
    need_bin
    echo "$bin"
    ;;
*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
