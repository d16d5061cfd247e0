//! A store that lost acknowledged commits while nodes were running: a restored backup, or an
//! asynchronous failover. A node discards its stale cache, and never continues from, shows or
//! writes a history that is stored nowhere (D-007).

use crate::on_every_store;
use crate::support::*;
use tenure::store::{Commit, RecordRange, Remedy};
use tenure::{session::*, *};

/// Truncates a stored session to its first `upto` records.
async fn truncate_log(tenure: &Tenure, session: &SessionId, upto: usize) {
    let store = tenure.store();
    let key = ada().key(session);
    let mut log = store.records(&key, &RecordRange::after(0)).await.unwrap();
    log.truncate(upto);
    let head = Session::replay(&key, log.clone()).unwrap().head().clone();
    store.purge(&key).await.unwrap();
    store.commit(&Commit::new(None, log, head)).await.unwrap();
}

fn user_messages(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|t| Message::user(t).as_str().to_owned()).collect()
}

async fn append_message(tenure: &Tenure, text: &str) {
    tenure.append(&ada(), &id("s"), vec![Message::user(text)]).await.unwrap();
}

/// Asserts that all nodes, including one without cache, see the same session, and that the doctor
/// has no findings.
async fn assert_all_see(test: &TestTenure, nodes: &[&Tenure], texts_wanted: &[&str]) {
    for tenure in nodes.iter().copied().chain([&test.second_node()]) {
        assert_eq!(texts(&tenure.load(&ada(), &id("s")).await.unwrap()), user_messages(texts_wanted));
        assert_eq!(
            tenure.head(&ada(), &id("s")).await.unwrap(),
            test.second_node().head(&ada(), &id("s")).await.unwrap()
        );
    }
    let mut findings = test.tenure.examine(|_| ()).await.unwrap();
    // Commits that bypass the library carry no words for the message index.
    findings.retain(|finding| finding.remedy != Remedy::CompleteMessageIndex);
    assert_eq!(findings, []);
}

on_every_store! {
    /// Others extended the log to its former length: the same position with a different history.
    async fn a_different_log_of_the_same_length_is_detected(test: &mut TestTenure) {
        let other = test.second_node();
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        append_message(&test.tenure, "one").await;
        append_message(&test.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        append_message(&test.tenure, "next").await;
        assert_all_see(test, &[&test.tenure, &other], &["one", "other", "next"]).await;
    }

    /// A read detects the loss as well, without a write.
    async fn a_read_shows_the_stored_history(test: &mut TestTenure) {
        let other = test.second_node();
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        append_message(&test.tenure, "one").await;
        append_message(&test.tenure, "lost").await;
        let lost = test.tenure.load(&ada(), &id("s")).await.unwrap();
        assert_eq!(texts(&lost), user_messages(&["one", "lost"]));
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        assert_all_see(test, &[&test.tenure], &["one", "other"]).await;
    }

    /// Others extended the log beyond its former length: the cached log is not a prefix of the
    /// stored one.
    async fn a_different_longer_log_is_detected(test: &mut TestTenure) {
        let other = test.second_node();
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        append_message(&test.tenure, "one").await;
        append_message(&test.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        append_message(&other, "another").await;
        append_message(&test.tenure, "next").await;
        assert_all_see(test, &[&test.tenure, &other], &["one", "other", "another", "next"]).await;
    }

    /// No writes since: the cached log is longer than the stored one.
    async fn a_shorter_log_is_detected(test: &mut TestTenure) {
        let other = test.second_node();
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        append_message(&test.tenure, "one").await;
        append_message(&test.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&test.tenure, "next").await;
        assert_all_see(test, &[&test.tenure, &other], &["one", "next"]).await;
    }

    /// A session loaded for editing cannot be saved over a different history.
    async fn an_edited_session_is_not_saved_over_another_history(test: &mut TestTenure) {
        let other = test.second_node();
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        append_message(&test.tenure, "one").await;
        append_message(&test.tenure, "lost").await;
        let mut edited = test.tenure.load(&ada(), &id("s")).await.unwrap();
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        edited.push(image_message("see", "F"), test.now());
        assert_eq!(test.tenure.save(&mut edited).await.unwrap_err().code(), "conflict");
        let mut edited = test.tenure.load(&ada(), &id("s")).await.unwrap();
        edited.push(Message::user("edit"), test.now());
        test.tenure.save(&mut edited).await.unwrap();
        edited.push(Message::user("and again"), test.now());
        test.tenure.save(&mut edited).await.unwrap();
        assert_all_see(test, &[&test.tenure, &other], &["one", "other", "edit", "and again"]).await;
    }
}
