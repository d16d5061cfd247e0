//! The binary.

use clap::Parser;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Threads for work that would hold up others, such as files and large texts. Reads and writes of a SQLite store have threads of their own.
/// Each thread keeps memory of the allocator: without a bound (tokio's is 512), memory would follow the number of clients.
const MAX_BLOCKING_THREADS: usize = 32;

fn main() -> ExitCode {
    // Before the runtime starts its threads.
    if let Some(code) = tenure_server::tools::sandbox::dispatch(std::env::args_os()) {
        return code;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().max_blocking_threads(MAX_BLOCKING_THREADS).enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(tenure_server::cli::Cli::parse().run()),
        Err(e) => Err(e.into()),
    };
    match done {
        Ok(code) => code,
        // Whoever read our output has seen enough: `tenure … | head`.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
