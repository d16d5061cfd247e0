//! A session from its beginning to the next request: `cargo run --example quickstart`.

use serde_json::json;
use tenure::{Message, NewSession, Tenure};

#[tokio::main(flavor = "current_thread")]
async fn main() -> tenure::Result<()> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let url = format!("sqlite:{}", dir.path().join("tenure.db").display());

    // One process creates a session and exits.
    let tenure = Tenure::open(&url).await?;
    let new = NewSession { title: Some("Weather".into()), ..NewSession::default() };
    let session = tenure.user("acme", "ada")?.create_session_with(new).await?;
    session
        .append([
            Message::user("How warm is it in Bern?"),
            Message::assistant_tool_calls([("call_1", "weather", json!({"city": "Bern"}))]),
            Message::tool("call_1", "21 degrees"),
            Message::assistant("It is 21 degrees."),
        ])
        .await?;
    let id = session.id().to_string();
    drop((session, tenure));

    // Another process opens it, with its tool calls, and builds the next prompt.
    let session = Tenure::open(&url).await?.user("acme", "ada")?.session(&id)?;
    session.append([Message::user("And tomorrow?")]).await?;
    for message in session.history().await? {
        println!("{}", message.as_str());
    }
    let checkpoints = session.checkpoints().await?;
    println!("checkpoints: {:?}", checkpoints.iter().map(|c| c.label.as_str()).collect::<Vec<_>>());
    Ok(())
}
