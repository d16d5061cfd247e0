//! Checkpoints, rewind and fork: `cargo run --example fork`.

use tenure::{Message, Point, Tenure};

#[tokio::main(flavor = "current_thread")]
async fn main() -> tenure::Result<()> {
    let tenure = Tenure::open("memory:").await?;
    let session = tenure.user("acme", "ada")?.create_session().await?;
    for n in 1..=3 {
        let question = Message::user(&format!("question {n}"));
        session.append([question, Message::assistant(&format!("answer {n}"))]).await?;
    }
    session.checkpoint("before-the-experiment").await?;
    session.append([Message::user("an experiment"), Message::assistant("a wrong answer")]).await?;

    // A second conversation from the second turn on. Nothing is copied.
    let branch = session.fork(Point::Turn(2)).await?;
    branch.append([Message::user("what if?")]).await?;

    // Back to the checkpoint. The discarded messages stay readable.
    let rewound = session.rewind("before-the-experiment").await?;
    println!("{} messages left, {} discarded", rewound.position, rewound.discarded);
    for discarded in tenure.discarded(session.principal(), session.id()).await? {
        let texts: Vec<_> = discarded.messages.iter().map(|m| m.message.text()).collect();
        println!("discarded at {}: {texts:?}", discarded.at);
    }
    for (name, handle) in [("session", &session), ("branch", &branch)] {
        let messages = handle.load().await?.messages;
        println!("{name}: {:?}", messages.iter().map(|m| m.message.text()).collect::<Vec<_>>());
    }
    Ok(())
}
