//! A session from its beginning to the next request: `cargo run --example quickstart`.

use tenure::{Message, NewSession, Principal, Tenure, Window, history};

#[tokio::main(flavor = "current_thread")]
async fn main() -> tenure::Result<()> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let url = format!("sqlite:{}", dir.path().join("tenure.db").display());

    // One process creates a session and goes away …
    let tenure = Tenure::open(&url).await?;
    let ada = Principal::new("acme", "ada")?;
    let session = tenure.create(&ada, NewSession { title: Some("Weather".into()), ..NewSession::default() }).await?;
    let id = session.head().info.session_id.clone();
    let call = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"weather","arguments":"{}"}}]}"#;
    let turn = vec![
        Message::user("How warm is it in Bern?"),
        Message::parse(call)?,
        Message::tool("c1", "21 degrees"),
        Message::assistant("It is 21 degrees."),
    ];
    tenure.append(&ada, &id, turn).await?;
    drop(tenure);

    // … another finds it again, tool turns and all, and shows it to a model.
    let tenure = Tenure::open(&url).await?;
    tenure.append(&ada, &id, vec![Message::user("And tomorrow?")]).await?;
    let session = tenure.load(&ada, &id).await?;
    for message in history(&session, &Window { max_turns: Some(50), max_tokens: None }) {
        println!("{}", message.as_str());
    }
    println!("checkpoints: {:?}", session.checkpoints.iter().map(|c| c.label.as_str()).collect::<Vec<_>>());
    Ok(())
}
