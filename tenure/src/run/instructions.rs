//! The assistant's instructions as the model is shown them: a text, or a template over the session (D-132).

use crate::rules::partial::PartialSession;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::Result;
use crate::types::id::{Principal, SessionId, User};
use crate::types::template::{is_template, render};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

impl Tenure {
    /// Renders the instructions for a session at this time. The inner error says why they cannot be rendered.
    pub(crate) async fn render_instructions(
        &self,
        principal: &Principal,
        id: &SessionId,
        assistant: &Assistant,
        now: Timestamp,
    ) -> Result<Result<Option<String>, String>> {
        let Some(text) = assistant.instructions.as_deref() else { return Ok(Ok(None)) };
        if !is_template(text) {
            return Ok(Ok(Some(text.to_owned())));
        }
        let values = |session: PartialSession<'_>| {
            Ok(template_values(session.head.info.metadata.clone(), &session.head.user, now))
        };
        let values = self.engine.read_cached_partial(principal, id, values).await?;
        Ok(render(text, &values).map(Some))
    }
}

/// Renders the instructions for a session that may not exist yet.
pub(crate) fn render_with(
    assistant: &Assistant,
    metadata: Map<String, Value>,
    user: &User,
    now: Timestamp,
) -> Result<Option<String>, String> {
    match assistant.instructions.as_deref() {
        Some(text) if is_template(text) => render(text, &template_values(metadata, user, now)).map(Some),
        text => Ok(text.map(str::to_owned)),
    }
}

/// The values that a template can name.
fn template_values(metadata: Map<String, Value>, user: &User, now: Timestamp) -> Map<String, Value> {
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    Map::from_iter([
        ("metadata".to_owned(), Value::Object(metadata)),
        ("user".to_owned(), json!(user)),
        ("now".to_owned(), json!(now)),
    ])
}
