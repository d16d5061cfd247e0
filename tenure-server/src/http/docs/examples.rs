//! Examples of request bodies, by operation.

/// The example body of an operation, as JSON text whose fields are in the customary order. `None` if it has none: the
/// form begins empty.
pub fn request(operation: &str) -> Option<&'static str> {
    Some(match operation {
        "chat" => {
            r#"{
  "session_id": "trip",
  "messages": [{"role": "user", "content": "What is the fare?"}]
}"#
        }
        "embed" => r#"{"model": "default", "input": "What is the fare?"}"#,
        "create_session" => r#"{"id": "trip", "title": "The red ferry", "tags": ["travel"]}"#,
        "update_session" => r#"{"title": "The red ferry", "metadata": {"customer": "42"}}"#,
        "append_messages" | "import_sessions" | "import_session_v1" => {
            r#"{"messages": [{"role": "user", "content": "What is the fare?"}]}"#
        }
        "create_checkpoint" => r#"{"label": "before-booking"}"#,
        "rewind_session" => r#"{"turn": 1}"#,
        "fork_session" => r#"{"id": "retry", "turn": 1}"#,
        "fork_session_v1" => r#"{"session_id": "retry", "turns": 1}"#,
        "compact_session" => r#"{"keep_turns": 2}"#,
        "thread_session" => r#"{"assistant_id": "support"}"#,
        "create_run" => r#"{"input": "What is the fare?"}"#,
        "claim_review" => r#"{"lasting": "15m"}"#,
        "release_review" | "create_dream" => "{}",
        "decide_review" => r#"{"decision": "approved", "notes": "as agreed"}"#,
        "put_cached_result" => r#"{"tool": "weather", "arguments": {"city": "Bern"}, "result": "rain"}"#,
        "create_memory" => r#"{"text": "likes green tea"}"#,
        "create_assistant" => r#"{"name": "support", "instructions": "You are kind."}"#,
        "put_assistant" => r#"{"instructions": "You are kind."}"#,
        "create_key" => r#"{"name": "ci", "rights": ["read", "write"]}"#,
        "rotate_key" => r#"{"grace": "24h"}"#,
        _ => return None,
    })
}
