//! The binary.

use clap::Parser;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Before the runtime starts its threads.
    if let Some(code) = tenure_server::tools::sandbox::dispatch(std::env::args_os()) {
        return code;
    }
    run()
}

#[tokio::main]
async fn run() -> ExitCode {
    match tenure_server::cli::Cli::parse().run().await {
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
