//! Transcripts: one message per line, bad lines reported, never skipped: `cargo run --example transcripts`.

use tenure::{
    Message,
    session::{JsonlTranscript, iter_transcripts, read_transcript},
};

fn main() -> tenure::Result<()> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("abc.jsonl");
    JsonlTranscript::write(&file, &[Message::user("hello"), Message::assistant("hi")])?;
    JsonlTranscript::append(&file, &[Message::user("and again")])?;
    println!("{} messages", read_transcript(&file)?.messages.len());

    // A torn line at the end, as a crash leaves it.
    let torn = [std::fs::read_to_string(&file).expect("it was just written"), r#"{"role":"assis"#.into()].concat();
    std::fs::write(&file, torn).expect("it can be written");
    for transcript in iter_transcripts(dir.path())? {
        let (path, transcript) = transcript?;
        println!("{}: {} messages", path.file_name().unwrap_or_default().display(), transcript.messages.len());
        for problem in transcript.problems {
            println!("  line {}: {}", problem.line, problem.reason);
        }
    }
    Ok(())
}
