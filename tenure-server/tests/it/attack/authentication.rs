//! Keys, headers and cross-site requests.
