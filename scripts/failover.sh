#!/usr/bin/env bash
# Three PostgreSQL servers with synchronous streaming replication, for `make failover`. Promotion is scripted: the test
# decides when it happens, so that the time to recover can be measured from that moment.
#
#   scripts/failover.sh prepare           choose a directory and three ports, print the ports
#   scripts/failover.sh start P1 P2 P3    create the servers; they replicate through the proxies on these ports
#   scripts/failover.sh kill N            SIGKILL server N and all its processes
#   scripts/failover.sh freeze N          SIGSTOP them
#   scripts/failover.sh thaw N            SIGCONT them
#   scripts/failover.sh promote N         make the most advanced standby the primary instead of N, print its number
#   scripts/failover.sh rejoin N FROM     end server N, copy FROM, start N as its standby
#   scripts/failover.sh stop              end all servers and remove their data
#
# A commit is acknowledged when one standby has it on disk (synchronous_standby_names = 'ANY 1 (*)'), so the standby that
# has received most has everything that was acknowledged.
set -eu
export LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd -P)
key=$(printf '%s\n' "$(id -u)" "$here" failover | cksum | cut -d ' ' -f 1)
tmp=${TMPDIR:-/tmp}
dir=${tmp%/}/tenure-failover-$key
bin=$("$here/postgres.sh" bin)

log() { echo "failover.sh: $*" >&2; }
as_postgres() { if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi; }
port() { cat "$dir/$1.port"; }
via() { cat "$dir/$1.via"; }
sql() { as_postgres "$bin/psql" -h 127.0.0.1 -p "$(port "$1")" -U postgres -d postgres -Atqc "$2"; }

free_port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 12000))
        if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port" && return; fi
    done
}

# The postmaster of a server and its children.
processes() {
    local pid
    pid=$(head -n 1 "$dir/n$1/postmaster.pid" 2>/dev/null) || return 0
    if ! tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$dir/n$1"; then return 0; fi
    echo "$pid"
    cat "/proc/$pid/task/$pid/children" 2>/dev/null || true
}

# $1: the signal, $2: the server. The postmaster first, so that it starts no more.
send() {
    local all
    all=$(processes "$2")
    if [ -n "$all" ]; then kill "-$1" $all 2>/dev/null || true; fi
}

configure() {
    as_postgres sh -c "cat >>'$dir/n$1/postgresql.conf'" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = $(port "$1")
max_connections = 200
shared_buffers = 64MB
wal_level = replica
wal_keep_size = 512MB
hot_standby = on
synchronous_commit = on
synchronous_standby_names = 'ANY 1 (*)'
wal_sender_timeout = 2s
wal_receiver_timeout = 2s
wal_receiver_status_interval = 1s
wal_retrieve_retry_interval = 200ms
CONF
}

follow() { # $1 follows $2
    echo "primary_conninfo = 'host=127.0.0.1 port=$(via "$2") user=postgres application_name=n$1 connect_timeout=2'" |
        as_postgres sh -c "cat >>'$dir/n$1/postgresql.conf'"
}

launch() {
    as_postgres "$bin/pg_ctl" start -s -w -t 60 -D "$dir/n$1" -l "$dir/n$1.log" </dev/null >&2
}

copy() { # $1 becomes a copy of $2
    rm -rf "$dir/n$1"
    as_postgres "$bin/pg_basebackup" -h 127.0.0.1 -p "$(port "$2")" -U postgres -D "$dir/n$1" -c fast -X stream
    echo "port = $(port "$1")" | as_postgres sh -c "cat >>'$dir/n$1/postgresql.conf'"
    follow "$1" "$2"
    as_postgres touch "$dir/n$1/standby.signal"
    launch "$1"
}

stop() {
    for n in 1 2 3; do send KILL $n; done
    rm -rf "$dir"
}

case ${1:-} in
prepare)
    if [ -d "$dir" ]; then stop; fi
    mkdir -p "$dir"
    if [ "$(id -u)" = 0 ]; then chown postgres: "$dir"; fi
    for n in 1 2 3; do free_port >"$dir/$n.port"; done
    echo "$(port 1) $(port 2) $(port 3)"
    ;;
start)
    cd "$dir"
    echo "$2" >"$dir/1.via"
    echo "$3" >"$dir/2.via"
    echo "$4" >"$dir/3.via"
    log "creating three servers in $dir"
    as_postgres "$bin/initdb" -D "$dir/n1" -U postgres -A trust -E UTF8 --locale=C --no-sync >/dev/null
    # Replication from this machine needs no password either.
    configure 1
    launch 1
    copy 2 1
    copy 3 1
    ;;
kill) send KILL "$2" ;;
freeze) send STOP "$2" ;;
thaw) send CONT "$2" ;;
promote)
    cd "$dir"
    best='' most=-1
    for n in 1 2 3; do
        if [ "$n" = "$2" ]; then continue; fi
        received=$(sql $n "SELECT pg_wal_lsn_diff(coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()), '0/0')::bigint")
        if [ "$received" -gt "$most" ]; then best=$n most=$received; fi
    done
    as_postgres "$bin/pg_ctl" promote -s -w -t 60 -D "$dir/n$best" >&2
    for n in 1 2 3; do
        if [ "$n" = "$2" ] || [ "$n" = "$best" ]; then continue; fi
        follow $n "$best"
        as_postgres "$bin/pg_ctl" reload -s -D "$dir/n$n" >&2
    done
    echo "$best"
    ;;
rejoin)
    cd "$dir"
    send KILL "$2"
    for _ in $(seq 100); do
        if [ -z "$(processes "$2")" ]; then break; fi
        sleep 0.05
    done
    copy "$2" "$3"
    ;;
stop) if [ -d "$dir" ]; then stop; fi ;;
*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
