//! The entry point of the binary `tenure`: dispatches sandbox helper processes, then runs the command line on a
//! tokio runtime.

use clap::Parser;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Maximum number of threads for blocking work, such as files and large texts. Reads and writes of a SQLite store
/// have threads of their own. Each thread retains allocator memory: without a bound (tokio's default is 512),
/// memory would grow with the number of clients.
const MAX_BLOCKING_THREADS: usize = 32;

fn main() -> ExitCode {
    // Must run before the runtime starts its threads.
    if let Some(code) = tenure_server::tools::sandbox::dispatch(std::env::args_os()) {
        return code;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().max_blocking_threads(MAX_BLOCKING_THREADS).enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(tenure_server::cli::Cli::parse().run()),
        Err(e) => Err(e.into()),
    };
    match result {
        Ok(code) => code,
        // The reader of our output has closed the pipe, as in `tenure … | head`: not an error.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {}", tenure_server::error::with_causes(&e));
            ExitCode::FAILURE
        }
    }
}
