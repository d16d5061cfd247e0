# `make` runs what CI runs.
.DEFAULT_GOAL := test
.PHONY: help check lint test release bench bench-http fuzz chaos failover attack traces clean-postgres

all := --locked --workspace --all-features
# The redirection makes make use a shell, which it needs for `command`.
has = $(shell command -v $(1) 2>/dev/null)
# nextest runs each test in a process of its own, but no doc tests; they are left out of `cargo test` as well.
# In CI, tests that kill or freeze processes are tried once more, and then listed as flaky: .config/nextest.toml.
profile := $(if $(CI),--profile ci)
runner := $(if $(call has,cargo-nextest),cargo nextest run $(profile),cargo test --lib --bins --tests --examples)

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

check: lint ## formatting, lints, docs, licences
	RUSTDOCFLAGS="-D warnings" cargo doc $(all) --no-deps
	scripts/cargo-deny.sh --locked check licenses bans sources

lint: ## formatting and lints
	cargo fmt --all --check
	cargo clippy $(all) --all-targets -- -D warnings
	cargo check -p tenure --no-default-features
	cargo check -p tenure --all-targets

# Without the lints: `make check` has them, and CI runs both.
test: ## formatting, then every test, with a PostgreSQL, a model, and Python and Node environments of its own
	cargo fmt --all --check
	scripts/python-env.sh true
	scripts/with-model.sh scripts/with-postgres.sh sh -ec '$(runner) $(all) --no-fail-fast; cargo test $(all) --doc'
	scripts/python-env.sh pytest -q -p no:cacheprovider tenure-server/tests/python
	scripts/with-postgres.sh scripts/with-chromium.sh scripts/node-env.sh scripts/clients-env.sh pytest -q tenure-server/tests/clients

release: ## the static binary, a Debian package, a container build context and a bill of materials, in target/dist
	scripts/package.sh
	scripts/check-release.sh

chaos: ## three nodes killed, stopped and woken up for a minute, while the database is restarted
	CHAOS_SECONDS=60 CHAOS_RUNS=800 scripts/with-postgres.sh cargo test --locked -p tenure-server --all-features --test it -- --nocapture nodes::

failover: ## three PostgreSQL servers with synchronous replication, two nodes; the primary is killed, frozen and cut off
	cargo test --locked -p tenure-server --all-features --test it -- --nocapture --ignored failover::

attack: ## attack the release binary, print the numbers of docs/reliability.md (the short form is part of `make test`)
	cargo build --locked --release -p tenure-server
	ATTACK=long TENURE_TEST_BINARY=$(CURDIR)/target/release/tenure scripts/with-postgres.sh \
		cargo test $(all) --test it -- --nocapture --test-threads 1 attack::

traces: ## record what client libraries send, into target/traces
	scripts/record-traces.sh target/traces

bench: ## benchmarks, with a PostgreSQL of its own
	scripts/bench-peers.sh
	scripts/with-postgres.sh cargo bench --locked -p tenure --all-features --bench library

bench-http: ## the server beside the limits, with a PostgreSQL of its own
	scripts/with-postgres.sh cargo bench --locked -p tenure-server --bench http

# They run on the stable toolchain too, but blindly: only `cargo fuzz` builds them so that the fuzzer sees which code it reaches.
fuzz: ## build the fuzz targets (then: cargo fuzz run -s none request)
	cargo build --manifest-path fuzz/Cargo.toml --target-dir target/fuzz

clean-postgres: ## stop the test PostgreSQL, remove its data
	scripts/postgres.sh stop
