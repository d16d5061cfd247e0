//! The server that commands connect to, from the environment.

/// Returns the running server that commands connect to (`TENURE_SERVER`), and the API key they send (`TENURE_KEY`).
pub fn remote_from_environment() -> (Option<String>, Option<String>) {
    let variable = |name| std::env::var(name).ok().filter(|v: &String| !v.is_empty());
    (variable("TENURE_SERVER"), variable("TENURE_KEY"))
}
