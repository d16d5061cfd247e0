//! The server that commands connect to, from the environment.

/// Returns the running server that commands connect to (`TENURE_SERVER`), and the API key they send (`TENURE_KEY`).
pub fn remote() -> (Option<String>, Option<String>) {
    let set = |name| std::env::var(name).ok().filter(|v: &String| !v.is_empty());
    (set("TENURE_SERVER"), set("TENURE_KEY"))
}
