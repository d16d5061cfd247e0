//! Recall: its ranking, memories that supersede others, and what is selected for prompts.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use tenure::{memory::*, policy::*, run::*, *};

const OWN: MemoryTarget = MemoryTarget::Own;

async fn remember(t: &Tenure, text: &str) -> Memory {
    t.remember(&ada(), &OWN, NewMemory::from(text)).await.unwrap()
}

fn texts(result: &RecallResult) -> Vec<&str> {
    result.memories.iter().map(|hit| hit.memory.text.as_str()).collect()
}

/// An embedder that knows letters: texts with similar letters are similar.
fn letter_embedder() -> Embedder {
    Embedder::new("letters", |texts| async move {
        let vector = |text: &String| {
            let mut numbers = vec![0.1; 26];
            for letter in text.to_lowercase().bytes().filter(u8::is_ascii_lowercase) {
                numbers[usize::from(letter - b'a')] += 1.0;
            }
            numbers
        };
        Ok(texts.iter().map(vector).collect())
    })
}

on_every_store! {
    /// A recall has the same results with the same scores on every store, also after changes.
    async fn the_ranking_does_not_depend_on_the_store(test: &mut TestTenure) {
        test.reopen_with(|o| o.embedder = Some(letter_embedder())).await;
        let reference = Tenure::open_with("memory:", Options { embedder: Some(letter_embedder()), clock: test.clock.clone(), ..Options::default() }).await.unwrap();
        let ask = async |t: &Tenure| {
            let mut all = Vec::new();
            for question in ["Where does the ferry leave?", "apples", "Wo wohnt sie?", "緑茶", "what is my phone number"] {
                let result = t.recall(&ada(), &OWN, question, 10).await.unwrap();
                assert!(result.by_meaning && !result.memories.is_empty(), "{question}");
                all.extend(result.memories.into_iter().map(|hit| (hit.memory.text, hit.score, hit.coverage, hit.similarity)));
            }
            all
        };
        let facts = ["The ferry leaves Dover at nine", "She bought an apple", "Sie wohnt in der Nähe", "彼女は緑茶が好きです", "My phone number is 555 0100", "Nothing else", "Ferries and apples"];
        for t in [&test.tenure, &reference] {
            for text in facts {
                remember(t, text).await;
            }
        }
        assert_eq!(ask(&test.tenure).await, ask(&reference).await);
        for t in [&test.tenure, &reference] {
            let gone = t.recall(&ada(), &OWN, "nothing else", 1).await.unwrap().memories.remove(0).memory.id;
            t.forget_memory(&ada(), &OWN, &gone).await.unwrap();
            remember(t, "My new phone number is 555 0199").await;
        }
        assert_eq!(ask(&test.tenure).await, ask(&reference).await);
        // An index that is loaded at once equals one that grew.
        test.reopen_with(|o| o.embedder = Some(letter_embedder())).await;
        assert_eq!(ask(&test.tenure).await, ask(&reference).await);
    }

    /// Inflected words match, and the answer to a question is found by the words of the question.
    async fn words_are_stemmed_and_neighbours_count(test: &mut TestTenure) {
        let t = &test.tenure;
        for text in ["Which instruments do you play?", "The cello, since school", "Lovely weather today"] {
            remember(t, text).await;
            test.advance(SignedDuration::from_secs(5));
        }
        let result = t.recall(&ada(), &OWN, "playing an instrument", 2).await.unwrap();
        assert_eq!(texts(&result), ["Which instruments do you play?", "The cello, since school"]);
        test.advance(SignedDuration::from_hours(2));
        remember(t, "Dinner is at eight").await;
        let result = t.recall(&ada(), &OWN, "the weather", 9).await.unwrap();
        assert!(!texts(&result).contains(&"Dinner is at eight"), "two hours later is another conversation");
    }

    /// Several questions are asked at once; each memory is ranked by its best one.
    async fn several_questions(test: &mut TestTenure) {
        let t = &test.tenure;
        for text in ["Anna works in Oslo", "Ben lives in Rome", "Tea is in the cupboard"] {
            remember(t, text).await;
            test.advance(SignedDuration::from_hours(1));
        }
        let result = t.recall_any(&ada(), &OWN, &["where does Anna work?", "where does Ben live?"], 9).await.unwrap();
        let mut found = texts(&result);
        found.sort_unstable();
        assert_eq!(found, ["Anna works in Oslo", "Ben lives in Rome"]);
        let too_many = ["tea"; MAX_QUESTIONS + 1];
        assert_eq!(t.recall_any(&ada(), &OWN, &too_many, 9).await.unwrap_err().code(), "invalid");
        assert!(t.recall_any(&ada(), &OWN, &[], 9).await.unwrap().memories.is_empty());
    }

    /// A newer memory supersedes the one that it updates, whatever the order in which they are stored: the older one is
    /// found after it, is not shown to a model, and is current again when the newer one is forgotten.
    async fn a_newer_memory_supersedes_an_older_one(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| a.memory = Some(MemoryConfig { scope: MemoryScope::User, ..MemoryConfig::default() })));
        let new = t.remember(&ada(), &OWN, "I moved, my new address is 12 Harbour Street".into()).await.unwrap();
        let past = Some(test.now() - SignedDuration::from_hours(24 * 90));
        let old = t.remember(&ada(), &OWN, NewMemory { timestamp: past, ..NewMemory::from("My address is 4 Mill Lane") }).await.unwrap();
        assert_eq!(Some(old.created_at), past);
        remember(t, "My address book is blue").await;
        let result = t.recall(&ada(), &OWN, "What is my address? Is it Mill Lane?", 9).await.unwrap();
        assert_eq!(texts(&result)[..2], [&*new.text, &*old.text]);
        assert_eq!(result.memories[1].memory.superseded_by.as_ref(), Some(&new.id));
        let block = async |session: &str| {
            let model = ScriptedModel::new([text_answer("Yes.")]);
            let request = TurnRequest { session: Some(id(session)), ..question("What is my address?") };
            run_turn(t, request, &model, &CountingTools::default()).await.unwrap();
            model.last_prompt()[0].clone()
        };
        let shown = block("one").await;
        assert!(shown.contains("Harbour Street") && !shown.contains("Mill Lane"), "{shown}");
        t.forget_memory(&ada(), &OWN, &new.id).await.unwrap();
        assert!(block("two").await.contains("Mill Lane"), "nothing supersedes it any more");
    }

    /// What a new memory supersedes can be declared; it must exist.
    async fn superseding_can_be_declared(test: &mut TestTenure) {
        let t = &test.tenure;
        let old = remember(t, "Prefers the window seat").await;
        test.advance(SignedDuration::from_secs(1));
        let declared = NewMemory { supersedes: vec![old.id.clone()], ..NewMemory::from("Aisle, because of the legs") };
        let new = t.remember(&ada(), &OWN, declared).await.unwrap();
        let found = t.recall(&ada(), &OWN, "window seat", 9).await.unwrap();
        assert_eq!(texts(&found), ["Aisle, because of the legs", "Prefers the window seat"]);
        test.advance(SignedDuration::from_secs(1));
        remember(t, "Prefers the window seat").await;
        let again = t.memory(&ada(), &OWN, &old.id).await.unwrap().unwrap();
        assert_eq!(again.superseded_by, None, "stored again, it is current again");
        let missing = NewMemory { supersedes: vec!["mem_missing".to_owned()], ..NewMemory::from("x") };
        let error = t.remember(&ada(), &OWN, missing).await.unwrap_err();
        assert!(error.code() == "invalid" && error.to_string().contains("mem_missing"), "{error}");
        assert_eq!(t.memory_list(&ada(), &OWN, None, None, 9).await.unwrap().len(), 2, "nothing was stored");
        assert_eq!(t.memory(&ada(), &OWN, &new.id).await.unwrap().unwrap().superseded_by, None);
    }

    /// What fits into the token budget is selected by relevance, and shown newest first.
    async fn the_most_relevant_facts_are_selected(test: &mut TestTenure) {
        test.reopen_with(|o| o.embedder = Some(letter_embedder())).await;
        let t = &test.tenure;
        let memory = MemoryConfig { scope: MemoryScope::User, max_tokens: Some(70), ..MemoryConfig::default() };
        t.declare(clerk(|a| a.memory = Some(memory)));
        remember(t, "The ferry to Calais leaves Dover at nine").await;
        for n in 0..6 {
            test.advance(SignedDuration::from_hours(24));
            remember(t, &format!("Platform {n} is being rebuilt by the people of the ferry company")).await;
        }
        let model = ScriptedModel::new([text_answer("At nine.")]);
        run_turn(t, question("When does the ferry to Calais leave Dover?"), &model, &CountingTools::default()).await.unwrap();
        let block = model.last_prompt()[0].clone();
        let lines: Vec<&str> = block.lines().filter(|line| line.starts_with("- ")).collect();
        assert!(lines.len() >= 2 && lines.len() < 7, "{block}");
        assert!(lines.last().unwrap().ends_with("leaves Dover at nine"), "the oldest is the most relevant: {block}");
        assert!(lines.is_sorted_by(|a, b| a > b), "newest first: {block}");
    }

    /// The tool takes several queries, and ids that a new memory supersedes.
    async fn the_memory_tool(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| {
            a.memory = Some(MemoryConfig { scope: MemoryScope::User, inject: Some(false), ..MemoryConfig::default() });
            a.tools = vec![ToolSource::Memory];
        }));
        let old = remember(t, "Prefers the window seat").await;
        remember(t, "Plays the cello").await;
        let calls = [
            ("c1", "memory", json!({"action": "recall", "queries": ["which seat?", "the window", "a cello"]})),
            ("c2", "memory", json!({"action": "remember", "text": "Aisle seats only", "supersedes": [old.id]})),
            ("c3", "memory", json!({"action": "recall"})),
        ];
        let model = ScriptedModel::new([tool_calls_answer(&calls[..1]), tool_calls_answer(&calls[1..2]), tool_calls_answer(&calls[2..]), text_answer("Done.")]);
        run_turn(t, question("Aisle, please."), &model, &CountingTools::default()).await.unwrap();
        let messages = conversation(&session_x(t).await);
        assert!(messages[2].contains("window seat") && messages[2].contains("cello"), "{messages:?}");
        assert!(messages[6].contains("`query` or `queries`"), "{messages:?}");
        let superseded = t.memory(&ada(), &OWN, &old.id).await.unwrap().unwrap().superseded_by;
        assert!(superseded.is_some_and(|newer| messages[4].contains(&newer)));
    }
}
