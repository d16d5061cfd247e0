//! Summaries: a view of the oldest turns that loses nothing, splits no call from its result, and
//! can be removed.

use crate::on_every_store;
use crate::support::*;
use async_trait::async_trait;
use serde_json::json;
use std::sync::{Arc, Mutex};
use tenure::rules::summary::{KEEP_TURNS, PREVIOUS_SUMMARY_HEADING, REQUEST, SUMMARY_MARKER};
use tenure::{log::*, policy::*, rules::*, run::*, session::*, *};
use tokio::sync::Semaphore;

/// A model that writes summaries: `summary 1`, `summary 2` … Can be configured to return an empty
/// text or an error.
#[derive(Debug, Default)]
struct SummaryModel {
    prompts: Mutex<Vec<Vec<Message>>>,
    response: Option<Result<&'static str, ModelError>>,
    blocked_by: Option<Arc<Semaphore>>,
}

impl SummaryModel {
    fn responding(response: Result<&'static str, ModelError>) -> Self {
        Self { response: Some(response), ..Self::default() }
    }

    fn blocked_by(permits: &Arc<Semaphore>) -> Self {
        Self { blocked_by: Some(permits.clone()), ..Self::default() }
    }

    fn request_count(&self) -> usize {
        self.prompts.lock().unwrap().len()
    }

    /// The text it was last asked to summarize.
    fn last_input(&self) -> String {
        let prompts = self.prompts.lock().unwrap();
        let [request, input] = &prompts.last().unwrap()[..] else { panic!("{prompts:?}") };
        assert!(request.text().starts_with(REQUEST));
        input.text()
    }

    async fn wait_for_request(&self) {
        wait_until("the model is asked", async || self.request_count() > 0).await;
    }
}

#[async_trait]
impl Model for SummaryModel {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let n = {
            let mut prompts = self.prompts.lock().unwrap();
            prompts.push(prompt.messages);
            prompts.len()
        };
        if let Some(permits) = &self.blocked_by {
            permits.acquire().await.unwrap().forget();
        }
        let text = match &self.response {
            None => format!("summary {n}"),
            Some(response) => response.clone()?.to_owned(),
        };
        let body = json!({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]});
        Ok(Box::pin(single_chunk_stream(ModelChunk::Complete(body.to_string()))))
    }
}

/// A stream of one chunk.
fn single_chunk_stream(chunk: ModelChunk) -> impl futures_core::Stream<Item = Result<ModelChunk, ModelError>> + Send {
    struct One(Option<ModelChunk>);
    impl futures_core::Stream for One {
        type Item = Result<ModelChunk, ModelError>;
        fn poll_next(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Self::Item>> {
            std::task::Poll::Ready(self.0.take().map(Ok))
        }
    }
    One(Some(chunk))
}

const ALL: Window = Window { max_turns: None, max_tokens: None };

/// The prompt in short form: `summary 1`, `question 3` …
fn prompt_texts(session: &Session) -> Vec<String> {
    history(session, &ALL).iter().map(|m| m.text().replace(&format!("{SUMMARY_MARKER}\n"), "")).collect()
}

fn turn_texts(turns: impl IntoIterator<Item = usize>) -> Vec<String> {
    turns.into_iter().flat_map(turn_messages).map(|m| m.text()).collect()
}

async fn create_with_turns(tenure: &Tenure, name: &str, turns: usize) -> SessionId {
    tenure.create(&ada(), new_session(name)).await.unwrap();
    tenure.append(&ada(), &id(name), vec![Message::system("be kind")]).await.unwrap();
    for n in 1..=turns {
        tenure.append(&ada(), &id(name), turn_messages(n)).await.unwrap();
    }
    id(name)
}

async fn compact(tenure: &Tenure, id: &SessionId, writer: &SummaryModel, keep: Option<usize>) -> CompactionResult {
    tenure.compact(&ada(), id, writer, RawObject::default(), keep).await.unwrap()
}

fn error_code(result: Result<CompactionResult, TurnError>) -> &'static str {
    result.unwrap_err().code()
}

fn expected(summary: &str, turns: impl IntoIterator<Item = usize>) -> Vec<String> {
    [vec!["be kind".to_owned(), summary.to_owned()], turn_texts(turns)].concat()
}

on_every_store! {
    /// The messages stay, prompts contain the summary, the next summary is based on it, and all of
    /// this survives a restart (D-066).
    async fn a_summary_is_a_view(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let s = create_with_turns(&test.tenure, "s", 6).await;
        let before = test.tenure.load(&ada, &s).await.unwrap();
        let result = compact(&test.tenure, &s, &writer, Some(2)).await;
        assert_eq!((result.messages, result.seq), (16, before.head().seq + 2));
        let summary = result.summary.unwrap();
        assert_eq!((summary.position, summary.text(), summary.seq), (17, "summary 1".to_owned(), result.seq - 1));
        assert_eq!(summary.upto, before.messages[16].seq);
        let input = writer.last_input();
        assert!(input.contains("user: question 1\nassistant calls search {}\ntool: result 1\nassistant: answer 1\n"), "{input}");
        assert!(input.contains("answer 4") && !input.contains("question 5") && !input.contains("be kind"), "{input}");
        let after = test.tenure.load(&ada, &s).await.unwrap();
        assert_eq!((&after.messages, &after.head().digest), (&before.messages, &before.head().digest));
        assert_eq!(after.head().active_at, before.head().active_at, "a summary is no use of the session");
        assert_eq!(prompt_texts(&after), expected("summary 1", 5..=6));
        // There is nothing more to summarize.
        assert_eq!(compact(&test.tenure, &s, &writer, Some(2)).await.messages, 0);
        assert_eq!(writer.request_count(), 1);
        test.tenure.append(&ada, &s, turn_messages(7)).await.unwrap();
        assert_eq!(compact(&test.tenure, &s, &writer, Some(1)).await.messages, 8);
        let input = writer.last_input();
        assert!(input.starts_with(&format!("{PREVIOUS_SUMMARY_HEADING}\nsummary 1\n")) && !input.contains("question 4"), "{input}");
        test.reopen().await;
        let after = test.tenure.load(&ada, &s).await.unwrap();
        assert_eq!(prompt_texts(&after), expected("summary 2", 7..=7));
        assert_eq!(after.messages.len(), 29);
        assert!(test.tenure.examine(|_| ()).await.unwrap().is_empty());
    }

    /// A compaction sets a checkpoint; a rewind to it keeps the summary.
    async fn a_compaction_sets_a_checkpoint(test: &mut TestTenure) {
        let id = create_with_turns(&test.tenure, "s", 10).await;
        compact(&test.tenure, &id, &SummaryModel::default(), Some(2)).await;
        let session = test.tenure.load(&ada(), &id).await.unwrap();
        let last = session.checkpoints.last().unwrap();
        let summary = session.summary().unwrap();
        assert_eq!((last.label.as_str(), last.auto), (&*format!("compacted-{}", summary.seq), true));
        assert_eq!((last.position, last.seq), (session.messages.len(), summary.seq + 1));
        test.tenure.append(&ada(), &id, turn_messages(1)).await.unwrap();
        test.tenure.rewind(&ada(), &id, last).await.unwrap();
        let session = test.tenure.load(&ada(), &id).await.unwrap();
        assert_eq!(session.summary().map(|s| s.seq), Some(summary.seq), "a rewind to it keeps the summary");
    }

    /// A rewind to before the end of a summary removes it; an earlier summary that is still valid
    /// becomes active again.
    async fn a_rewind_removes_summaries_of_discarded_messages(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let s = create_with_turns(&test.tenure, "s", 6).await;
        compact(&test.tenure, &s, &writer, Some(4)).await;
        compact(&test.tenure, &s, &writer, Some(1)).await;
        let prompt_of = async |tenure: &Tenure| prompt_texts(&tenure.load(&ada, &s).await.unwrap());
        assert_eq!(prompt_of(&test.tenure).await, expected("summary 2", 6..=6));
        // A rewind to exactly the end of the summary keeps it.
        test.tenure.rewind(&ada, &s, Point::Turn(5)).await.unwrap();
        assert_eq!(prompt_of(&test.tenure).await, expected("summary 2", []));
        test.tenure.rewind(&ada, &s, Point::Turn(4)).await.unwrap();
        assert_eq!(prompt_of(&test.tenure).await, expected("summary 1", 3..=4));
        test.reopen().await;
        assert_eq!(prompt_of(&test.tenure).await, expected("summary 1", 3..=4));
        test.tenure.rewind(&ada, &s, Point::Turn(1)).await.unwrap();
        test.tenure.append(&ada, &s, turn_messages(8)).await.unwrap();
        test.tenure.append(&ada, &s, turn_messages(9)).await.unwrap();
        let all = [vec!["be kind".to_owned()], turn_texts([1, 8, 9])].concat();
        assert_eq!(prompt_of(&test.tenure).await, all);
        test.reopen().await;
        assert_eq!(prompt_of(&test.tenure).await, all);
    }

    /// A client that edits a turn covered by a summary is answered from the actual messages.
    async fn an_edit_of_a_summarized_turn_is_in_the_prompt(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let s = create_with_turns(&test.tenure, "s", 4).await;
        compact(&test.tenure, &s, &writer, Some(2)).await;
        // At least as many new messages as the summary covers: comparing positions alone would keep
        // it.
        let mut messages = vec![Message::system("be kind"), Message::user("question 1"), Message::assistant("answer 1"), Message::user("edited")];
        for n in 0..4 {
            messages.extend([Message::assistant(&format!("new {n}")), Message::user(&format!("and {n}"))]);
        }
        let ask = TurnRequest { session: Some(s.clone()), messages: messages.clone(), history: Some(HistoryMode::Full), ..TurnRequest::default() };
        let preview = test.tenure.preview(&ada, &ask).await.unwrap();
        let texts: Vec<String> = preview.iter().map(Message::text).collect();
        let want: Vec<String> = [turn_texts([1]), messages[3..].iter().map(Message::text).collect()].concat();
        assert_eq!(texts[1..], want[..]);
        // The same holds for the turn itself.
        let TurnStart::Run(turn) = test.tenure.begin_turn(&ada, ask).await.unwrap() else { panic!() };
        assert_eq!(turn.prompt().iter().map(Message::text).collect::<Vec<_>>()[1..], want[..]);
        drop(turn);
        assert!(test.tenure.load(&ada, &s).await.unwrap().summary().is_none());
    }

    /// A fork inherits the summary if it starts after it was written, and can then get its own.
    async fn forks_inherit_the_summary(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let s = create_with_turns(&test.tenure, "s", 6).await;
        compact(&test.tenure, &s, &writer, Some(2)).await;
        let source = test.tenure.load(&ada, &s).await.unwrap();
        test.tenure.fork(&ada, &s, Fork::at(Point::End).id(Some(id("end")))).await.unwrap();
        test.tenure.fork(&ada, &s, Fork::at(Point::Turn(2)).id(Some(id("early")))).await.unwrap();
        let mut by_hand = fork_session(&source, Point::End, id("hand"), test.now()).unwrap();
        test.tenure.save(&mut by_hand).await.unwrap();
        compact(&test.tenure, &id("end"), &writer, Some(1)).await;
        test.reopen().await;
        let load = async |name: &str| test.tenure.load(&ada, &id(name)).await.unwrap();
        assert_eq!(prompt_texts(&load("end").await), expected("summary 2", 6..=6));
        assert_eq!(load("hand").await.summary(), by_hand.summary());
        assert_eq!(prompt_texts(&load("hand").await), expected("summary 1", 5..=6));
        assert_eq!(prompt_texts(&load("early").await), [vec!["be kind".to_owned()], turn_texts(1..=2)].concat());
        assert_eq!(prompt_texts(&load("s").await), expected("summary 1", 5..=6));
        // The fork is unaffected by the purge of its parent.
        test.tenure.purge(&ada, &s, None).await.unwrap();
        assert_eq!(prompt_texts(&load("end").await), expected("summary 2", 6..=6));
    }

    /// After `uncompact`, prompts contain the messages, and no summary is written automatically
    /// (D-069).
    async fn uncompact_shows_the_messages(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        test.reopen_with(|o| o.policy.window = Window { max_turns: Some(4), max_tokens: None }).await;
        let s = create_with_turns(&test.tenure, "s", 6).await;
        compact(&test.tenure, &s, &writer, None).await;
        let seq = test.tenure.head(&ada, &s).await.unwrap().seq;
        assert!(matches!(test.tenure.uncompact(&ada, &s, Some(seq - 1)).await, Err(Error::Conflict { .. })));
        let head = test.tenure.uncompact(&ada, &s, None).await.unwrap();
        assert_eq!((head.seq, &head), (seq + 1, &test.tenure.head(&ada, &s).await.unwrap()));
        assert_eq!(test.tenure.uncompact(&ada, &s, None).await.unwrap().seq, seq + 1, "there is nothing to do");
        test.reopen_with(|o| o.policy.window = Window { max_turns: Some(4), max_tokens: None }).await;
        let session = test.tenure.load(&ada, &s).await.unwrap();
        assert_eq!((session.summary(), session.uncompacted), (None, true));
        assert_eq!(prompt_texts(&session), [vec!["be kind".to_owned()], turn_texts(1..=6)].concat());
        assert_eq!(compact(&test.tenure, &s, &writer, None).await.messages, 0);
        assert_eq!(compact(&test.tenure, &s, &writer, Some(3)).await.messages, 12);
        assert!(!test.tenure.load(&ada, &s).await.unwrap().uncompacted);
    }

    /// Export and import lose no message. The summary is part of the log; an import of the messages
    /// alone does not have it.
    async fn exports_contain_the_summary(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let s = create_with_turns(&test.tenure, "s", 4).await;
        compact(&test.tenure, &s, &writer, Some(1)).await;
        let export = test.tenure.export(&ada, &s).await.unwrap();
        test.tenure.import(&ada, &id("copy"), export.clone(), None).await.unwrap();
        let (old, new) = (test.tenure.load(&ada, &s).await.unwrap(), test.tenure.load(&ada, &id("copy")).await.unwrap());
        assert_eq!((texts(&old), old.summary()), (texts(&new), new.summary()));
        assert_eq!(prompt_texts(&old), prompt_texts(&new));
        test.tenure.import(&ada, &id("messages"), Export { log: Vec::new(), ..export.clone() }, None).await.unwrap();
        let plain = test.tenure.load(&ada, &id("messages")).await.unwrap();
        assert_eq!((texts(&old), plain.summary()), (texts(&plain), None));
        // Importing over the session itself replaces the covered messages, so the summary is gone.
        test.tenure.import(&ada, &s, export, None).await.unwrap();
        assert!(test.tenure.load(&ada, &s).await.unwrap().summary().is_none());
    }

    /// Turns run concurrently with a compaction; if the summarized messages are discarded, the
    /// summary is not stored (D-068).
    async fn concurrent_changes_supersede_a_compaction(test: &mut TestTenure) {
        let (ada, hold) = (ada(), Arc::new(Semaphore::new(0)));
        let s = create_with_turns(&test.tenure, "s", 6).await;
        let start = |keep| {
            let (tenure, s, writer) = (test.tenure.clone(), s.clone(), Arc::new(SummaryModel::blocked_by(&hold)));
            let model = writer.clone();
            let principal = ada.clone();
            (model, tokio::spawn(async move { tenure.compact(&principal, &s, &*writer, RawObject::default(), keep).await }))
        };
        // The next turn commits first, also from another process.
        let (model, task) = start(Some(2));
        model.wait_for_request().await;
        test.tenure.append(&ada, &s, turn_messages(7)).await.unwrap();
        test.second_node().append(&ada, &s, turn_messages(8)).await.unwrap();
        hold.add_permits(1);
        assert_eq!(task.await.unwrap().unwrap().messages, 16);
        assert_eq!(prompt_texts(&test.tenure.load(&ada, &s).await.unwrap()), expected("summary 1", 5..=8));
        // The session is rewound and continued.
        let (model, task) = start(Some(0));
        model.wait_for_request().await;
        test.tenure.rewind(&ada, &s, Point::Turn(7)).await.unwrap();
        test.tenure.append(&ada, &s, turn_messages(9)).await.unwrap();
        hold.add_permits(1);
        assert_eq!(error_code(task.await.unwrap()), "superseded");
        assert_eq!(prompt_texts(&test.tenure.load(&ada, &s).await.unwrap()), expected("summary 1", (5..=7).chain([9])));
        // Another process writes or removes a summary.
        let (model, task) = start(Some(0));
        model.wait_for_request().await;
        compact(&test.second_node(), &s, &SummaryModel::responding(Ok("theirs")), Some(1)).await;
        hold.add_permits(1);
        assert_eq!(error_code(task.await.unwrap()), "superseded");
        let (model, task) = start(Some(0));
        model.wait_for_request().await;
        test.second_node().uncompact(&ada, &s, None).await.unwrap();
        hold.add_permits(1);
        assert_eq!(error_code(task.await.unwrap()), "superseded");
        assert!(test.tenure.load(&ada, &s).await.unwrap().summary().is_none());
        // The session is purged, and a new one uses its id.
        let (model, task) = start(Some(0));
        model.wait_for_request().await;
        test.tenure.purge(&ada, &s, None).await.unwrap();
        test.advance(jiff::SignedDuration::from_secs(1));
        create_with_turns(&test.tenure, "s", 8).await;
        hold.add_permits(1);
        assert_eq!(error_code(task.await.unwrap()), "superseded");
        assert!(test.tenure.load(&ada, &s).await.unwrap().summary().is_none());
        // Two concurrent compactions: the automatic one is rejected as busy, the requested one
        // waits.
        let (model, first) = start(Some(2));
        model.wait_for_request().await;
        assert_eq!(error_code(test.tenure.compact(&ada, &s, &SummaryModel::default(), RawObject::default(), None).await), "busy");
        let (_, second) = start(Some(1));
        hold.add_permits(2);
        assert_eq!((first.await.unwrap().unwrap().messages, second.await.unwrap().unwrap().messages), (24, 4));
    }

    /// A failing model, an empty summary, a caller without access and a stale request change
    /// nothing.
    async fn a_failed_compaction_changes_nothing(test: &mut TestTenure) {
        let ada = ada();
        let s = create_with_turns(&test.tenure, "s", 4).await;
        let seq = test.tenure.head(&ada, &s).await.unwrap().seq;
        let timed_out = ModelError::TimedOut { reason: "it slept".into() };
        for (response, want) in [(Err(timed_out), "upstream_timeout"), (Ok(""), "upstream_broken"), (Ok("<think>hm</think> \n"), "upstream_broken")] {
            let result = test.tenure.compact(&ada, &s, &SummaryModel::responding(response), RawObject::default(), Some(1)).await;
            assert_eq!(error_code(result), want);
        }
        let (bob, writer) = (Principal::new("acme", "bob").unwrap(), SummaryModel::default());
        assert_eq!(error_code(test.tenure.compact(&bob, &s, &writer, RawObject::default(), Some(1)).await), "not_found");
        assert!(matches!(test.tenure.uncompact(&bob, &s, None).await, Err(Error::NotFound { .. })));
        assert_eq!(test.tenure.head(&ada, &s).await.unwrap().seq, seq);
        test.tenure.delete(&ada, &s, None).await.unwrap();
        assert_eq!(error_code(test.tenure.compact(&ada, &s, &writer, RawObject::default(), Some(1)).await), "gone");
        assert!(matches!(test.tenure.uncompact(&ada, &s, None).await, Err(Error::Gone { .. })));
        assert_eq!(writer.request_count(), 0);
    }

    /// Automatic compaction starts only when the window is reached, and then frees half of it
    /// (D-067); a long history is summarized in pieces (D-070).
    async fn compaction_starts_when_the_window_is_reached(test: &mut TestTenure) {
        let (ada, writer) = (ada(), SummaryModel::default());
        let window = Window { max_turns: None, max_tokens: Some(400) };
        test.reopen_with(|o| o.policy.window = window.clone()).await;
        let s = create_with_turns(&test.tenure, "s", 3).await;
        assert_eq!(compact(&test.tenure, &s, &writer, None).await.messages, 0);
        for n in 4..=40 {
            test.tenure.append(&ada, &s, turn_messages(n)).await.unwrap();
        }
        let result = compact(&test.tenure, &s, &writer, None).await;
        assert!(writer.request_count() > 3, "in pieces, not {}", writer.request_count());
        assert!(writer.prompts.lock().unwrap().iter().all(|p| p[1].text().len() < 400 * 4), "a piece fits in the window");
        let session = test.tenure.load(&ada, &s).await.unwrap();
        assert_eq!(result.messages, session.summary().unwrap().position - 1);
        let used: usize = history(&session, &window).iter().map(tokens).sum();
        assert!(used <= 250, "{used} tokens are about half of the window");
        assert_eq!(history(&session, &window), history(&session, &ALL), "nothing between the summary and the end is left out");
    }
}

/// Prompts keep a stable prefix from turn to turn, and summaries are rare.
#[tokio::test]
async fn the_beginning_of_the_prompt_is_stable() {
    let mut test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let window = Window { max_turns: Some(12), max_tokens: Some(1000) };
    test.reopen_with(|o| o.policy.window = window.clone()).await;
    let (ada, writer, s) = (ada(), SummaryModel::default(), create_with_turns(&test.tenure, "s", 0).await);
    let (mut changed, mut before) = (0, Vec::new());
    for n in 1..=60 {
        test.tenure.append(&ada, &s, turn_messages(n)).await.unwrap();
        let session = test.tenure.load(&ada, &s).await.unwrap();
        let now = raw(&history(&session, &window));
        assert_eq!(now, raw(&history(&session, &ALL)), "turn {n}: nothing is left out");
        if !now.starts_with(&before) {
            changed += 1;
        }
        before = now;
        compact(&test.tenure, &s, &writer, None).await;
    }
    assert_eq!(changed, writer.request_count(), "it changes with a summary only");
    assert!((6..=12).contains(&changed), "{changed} times in 60 turns");
}

/// The storage format of a summary, and of its removal.
#[test]
fn entries_are_encoded_with_and_without_a_summary() {
    for text in [r#"{"compacted":{"upto":2,"summary":{"role":"system","content":"x"}}}"#, r#"{"compacted":{"upto":0}}"#]
    {
        assert_eq!(Entry::decode(text).unwrap().encode(), text);
    }
    let none = Entry::Compacted { upto: 0, summary: None };
    assert_eq!(Entry::decode(r#"{"compacted":{"upto":0,"summary":null}}"#).unwrap(), none);
}

#[test]
fn the_text_of_a_model_becomes_a_message_that_fits() {
    let text = |answer: &str, room| summary::message(answer, room).map(|m| m.text());
    assert_eq!(text(" so it was \n", 100), Some(format!("{SUMMARY_MARKER}\nso it was")));
    assert_eq!(text("<think>What was it?</think>\nso it was", 100), Some(format!("{SUMMARY_MARKER}\nso it was")));
    assert_eq!(text("  ", 100), None);
    for long in ["ä".repeat(5000), "\"\n".repeat(5000), "word ".repeat(5000)] {
        let message = summary::message(&long, 80).unwrap();
        assert!((60..=80).contains(&tokens(&message)), "{}", tokens(&message));
    }
}

/// A turn that exceeds the size of one summary request is truncated, not omitted.
#[tokio::test]
async fn a_turn_that_is_too_long_is_truncated() {
    let mut test = TestTenure::new(StoreKind::Memory).await.unwrap();
    test.reopen_with(|o| o.policy.window = Window { max_turns: None, max_tokens: Some(1000) }).await;
    let (ada, writer, s) = (ada(), SummaryModel::default(), create_with_turns(&test.tenure, "s", 0).await);
    let long = "ö".repeat(100_000);
    let messages = vec![
        Message::user("read this"),
        tool_call_message("c", "read", &json!({})),
        Message::tool("c", &long),
        Message::assistant("it is long"),
    ];
    test.tenure.append(&ada, &s, messages).await.unwrap();
    compact(&test.tenure, &s, &writer, None).await;
    let input = writer.last_input();
    assert!(
        input.len() < 6_000 && input.contains("tool: öö") && input.ends_with("assistant: it is long"),
        "{}",
        input.len()
    );
    assert_eq!(test.tenure.load(&ada, &s).await.unwrap().summary().unwrap().position, 5);
    assert_eq!(KEEP_TURNS, 2);
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = Message> {
        let word = prop::sample::select(vec!["a", "b", "a much longer text than that, with more words in it"]);
        let id = prop::sample::select(vec!["c1", "c2", "c3"]);
        prop_oneof![
            3 => word.clone().prop_map(Message::user),
            3 => word.clone().prop_map(Message::assistant),
            1 => word.clone().prop_map(Message::system),
            2 => (id.clone(), word).prop_map(|(id, w)| Message::tool(id, w)),
            2 => id.prop_map(|id| tool_call_message(id, "run", &json!({}))),
        ]
    }

    fn any_message_entries(max: usize) -> impl Strategy<Value = Vec<MessageEntry>> {
        let entry = (any_message(), prop::bool::weighted(0.1));
        let entry = entry.prop_map(|(message, replaces_instructions)| MessageEntry {
            replaces_instructions: replaces_instructions && message.role().is_instruction(),
            ..MessageEntry::from(message)
        });
        prop::collection::vec(entry, 0..max)
    }

    fn fold(entries: impl IntoIterator<Item = Entry>) -> Session {
        let at = "2026-01-01T00:00:00Z".parse().unwrap();
        let entries = [Entry::created(SessionCreated::default())].into_iter().chain(entries);
        let records = (1..).zip(entries).map(|(seq, entry)| Record { seq, at, entry });
        Session::replay(&ada().key(&id("s")), records).unwrap()
    }

    /// The prompt without instructions and summary.
    fn visible_messages(session: &Session, window: &Window) -> Vec<String> {
        let apart = active_instructions(&session.messages).len() + usize::from(session.summary().is_some());
        raw(&history(session, window)[apart..])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        /// For any history: the prompt is valid, and the messages covered by the summary followed
        /// by those in the prompt equal the original prompt in order, so no call is split from its
        /// result.
        #[test]
        fn nothing_is_lost_duplicated_or_split(
            message_entries in any_message_entries(30),
            more in any_message_entries(10),
            keep in prop::option::of(0usize..4),
            turns in prop::option::of(0usize..5),
            budget in prop::option::of(60usize..400),
        ) {
            let window = Window { max_turns: turns, max_tokens: budget };
            let mut log: Vec<Entry> = message_entries.into_iter().map(Entry::Message).collect();
            let session = fold(log.clone());
            let mut covered = 0;
            let mut tries = 0;
            let goal = summary::goal(&session, &window, keep);
            let mut now = session.clone();
            while let Some(part) = goal.and_then(|goal| summary::next_part(&now, &window, goal)) {
                prop_assert!(part.still_applies(&now) && part.position > covered);
                let next = now.messages.get(part.position);
                prop_assert!(next.is_none_or(|m| m.message.role() == Role::User), "it ends with a turn");
                covered = part.position;
                tries += 1;
                log.push(Entry::Compacted { upto: part.upto, summary: summary::message("so it was", part.max_tokens) });
                now = fold(log.clone());
                prop_assert!(!part.still_applies(&now));
            }
            prop_assert_eq!(goal.is_some(), tries > 0, "a goal is reached");
            prop_assert!(is_valid(&history(&now, &window)));
            let first = fold(now.messages[..covered].iter().map(|m| Entry::Message(MessageEntry { replaces_instructions: m.replaces_instructions, ..MessageEntry::from(m.message.clone()) })));
            let together = if covered == 0 { visible_messages(&now, &ALL) } else { [visible_messages(&first, &ALL), visible_messages(&now, &ALL)].concat() };
            prop_assert_eq!(together, visible_messages(&session, &ALL));
            if let (Some(goal), Some(keep)) = (goal, keep) {
                let users = session.messages.iter().filter(|m| m.seq > goal && m.message.role() == Role::User).count();
                prop_assert!(users >= keep);
            }
            // The prompt stays valid with any further messages.
            log.extend(more.into_iter().map(Entry::Message));
            prop_assert!(is_valid(&history(&fold(log), &window)));
        }

        /// After an automatic summary, the prompt is within its window and omits nothing, if the
        /// last turn is answered.
        #[test]
        fn the_token_budget_is_respected(message_entries in any_message_entries(40), turns in prop::option::of(1usize..6), budget in prop::option::of(120usize..400)) {
            let window = Window { max_turns: turns, max_tokens: budget };
            let mut log: Vec<Entry> = message_entries.into_iter().filter(|p| !p.message.is_tool_round()).map(Entry::Message).collect();
            log.extend([Message::user("so?"), Message::assistant("so.")].map(Entry::message));
            let session = fold(log.clone());
            let goal = summary::goal(&session, &window, None);
            prop_assert!(goal.is_none() || summary::exceeds_window(&session, &window));
            let mut now = session;
            while let Some(part) = goal.and_then(|goal| summary::next_part(&now, &window, goal)) {
                log.push(Entry::Compacted { upto: part.upto, summary: summary::message(&"word ".repeat(1000), part.max_tokens) });
                now = fold(log.clone());
            }
            if goal.is_some() {
                let used: usize = history(&now, &window).iter().map(tokens).sum();
                prop_assert!(budget.is_none_or(|max| used <= max), "{} of {:?}", used, budget);
                prop_assert_eq!(history(&now, &window), history(&now, &ALL));
                prop_assert!(!summary::exceeds_window(&now, &window));
            }
        }
    }
}
