//! Checkpoints, rewind and fork: `cargo run --example fork`.

use tenure::{CheckpointLabel, Message, NewSession, Point, Principal, Tenure};

#[tokio::main(flavor = "current_thread")]
async fn main() -> tenure::Result<()> {
    let tenure = Tenure::open("memory:").await?;
    let ada = Principal::default();
    let id = tenure.create(&ada, NewSession::default()).await?.head().info.session_id.clone();
    for n in 1..=3 {
        let (question, answer) = (format!("question {n}"), format!("answer {n}"));
        tenure.append(&ada, &id, vec![Message::user(&question), Message::assistant(&answer)]).await?;
    }
    tenure.checkpoint(&ada, &id, Some(CheckpointLabel::new("before-the-detour")?)).await?;
    tenure.append(&ada, &id, vec![Message::user("a detour"), Message::assistant("a wrong turn")]).await?;

    // Another way from the second turn on. Nothing is copied.
    let branch = tenure.fork(&ada, &id, Point::Turn(2)).await?.info.session_id;
    tenure.append(&ada, &branch, vec![Message::user("what if?")]).await?;

    // Back to the checkpoint. Discarded messages stay readable.
    let rewind = tenure.rewind(&ada, &id, "before-the-detour").await?;
    println!("{} messages left, {} discarded", rewind.position, rewind.discarded);
    for discarded in tenure.discarded(&ada, &id).await? {
        let texts: Vec<_> = discarded.messages.iter().map(|m| m.message.text()).collect();
        println!("discarded at {}: {texts:?}", discarded.at);
    }
    for (name, id) in [("session", &id), ("branch", &branch)] {
        let session = tenure.load(&ada, id).await?;
        println!("{name}: {:?}", session.messages.iter().map(|m| m.message.text()).collect::<Vec<_>>());
    }
    Ok(())
}
