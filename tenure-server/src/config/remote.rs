//! The server that commands speak to, from the environment.

/// The running server that commands speak to (`TENURE_SERVER`), and the key they show it (`TENURE_KEY`).
pub fn remote() -> (Option<String>, Option<String>) {
    let set = |name| std::env::var(name).ok().filter(|v: &String| !v.is_empty());
    (set("TENURE_SERVER"), set("TENURE_KEY"))
}
