//! Metrics of the process and the build, with the names that Prometheus clients use. Read from `/proc` at each scrape;
//! where there is none, only the build is reported.

use std::fmt::Write;
use std::fs;

/// Clock ticks per second in `/proc` (`USER_HZ`), which is 100 on every architecture that Linux supports today.
const TICKS: f64 = 100.0;

/// The names, types and descriptions of the metrics below.
pub const PROCESS_METRICS: &[(&str, &str, &str)] = &[
    ("tenure_build_info", "gauge", "1; the label is the version"),
    ("process_resident_memory_bytes", "gauge", "Resident memory"),
    ("process_cpu_seconds_total", "counter", "CPU time, user and system"),
    ("process_start_time_seconds", "gauge", "Start time, in seconds since 1970"),
    ("process_open_fds", "gauge", "Open file descriptors"),
    ("process_max_fds", "gauge", "Limit of open file descriptors"),
    ("process_threads", "gauge", "Threads"),
];

/// Renders the metrics in the Prometheus text format.
pub fn render() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program, in parentheses, may contain spaces.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |n: usize| fields.get(n).and_then(|text| text.parse::<f64>().ok());
    let cpu = field(11).zip(field(12)).map(|(user, system)| (user + system) / TICKS);
    let boot = fs::read_to_string("/proc/stat").unwrap_or_default();
    let boot = boot.lines().find_map(|l| l.strip_prefix("btime ")?.trim().parse::<f64>().ok());
    let started = boot.zip(field(19)).map(|(boot, ticks)| boot + ticks / TICKS);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident =
        status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<f64>().ok());
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let max_fds =
        limits.lines().find_map(|l| l.strip_prefix("Max open files")?.split_whitespace().next()?.parse::<f64>().ok());
    let open_fds = fs::read_dir("/proc/self/fd").ok().map(|list| list.count() as f64);
    let values = [Some(1.0), resident.map(|kilobytes| kilobytes * 1024.0), cpu, started, open_fds, max_fds, field(17)];
    let mut text = String::new();
    for ((name, kind, help), value) in PROCESS_METRICS.iter().zip(values) {
        let Some(value) = value else { continue };
        let labels = if *name == "tenure_build_info" {
            format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))
        } else {
            String::new()
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}\n");
    }
    text
}
