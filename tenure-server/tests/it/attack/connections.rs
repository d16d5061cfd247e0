//! Connections, request bodies and streamed responses.
