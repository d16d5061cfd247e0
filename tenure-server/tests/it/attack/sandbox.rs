//! Code in the sandbox of the `python` tool.
