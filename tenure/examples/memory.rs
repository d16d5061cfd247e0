//! Long-term memory across sessions, with an embedder of your own: `cargo run --example memory`.

use tenure::{Embedder, Options, Tenure};

/// A toy embedding: counts of letter pairs. A real embedder would call an embedding model.
fn embed(text: &str) -> Vec<f32> {
    let mut vector = vec![0.0; 26 * 26];
    let letters: Vec<usize> =
        text.to_lowercase().bytes().filter(u8::is_ascii_lowercase).map(|b| usize::from(b - b'a')).collect();
    for pair in letters.windows(2) {
        vector[pair[0] * 26 + pair[1]] += 1.0;
    }
    vector
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> tenure::Result<()> {
    let embedder = Embedder::new("letter-pairs", |texts: Vec<String>| async move {
        Ok(texts.iter().map(|text| embed(text)).collect())
    });
    let tenure = Tenure::open_with("memory:", Options { embedder: Some(embedder), ..Options::default() }).await?;
    let ada = tenure.user("acme", "ada")?;
    for fact in ["Ada is allergic to peanuts.", "Ada lives in Bern.", "Ada's sister is called Byron."] {
        ada.remember(fact).await?;
    }

    for question in ["peanut allergies", "where does she live?"] {
        println!("{question}");
        for hit in ada.recall(question, 2).await?.memories {
            println!("  {:.2}  {}", hit.score, hit.memory.text);
        }
    }
    // Memories belong to their user: another user recalls nothing.
    let bob = tenure.user("acme", "bob")?.recall("peanut allergies", 2).await?;
    assert!(bob.memories.is_empty());
    Ok(())
}
