//! A store that lost acknowledged commits while nodes were running: a restored backup, or an
//! asynchronous failover. A node discards its stale cache, and never continues from, shows or
//! writes a history that is stored nowhere (D-007).

use crate::on_every_store;
use crate::places::*;
use tenure::store::{Commit, RecordRange};
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};

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
async fn assert_all_see(home: &Home, nodes: &[&Tenure], texts_wanted: &[&str]) {
    for tenure in nodes.iter().copied().chain([&home.beside()]) {
        assert_eq!(texts(&tenure.load(&ada(), &id("s")).await.unwrap()), user_messages(texts_wanted));
        assert_eq!(tenure.head(&ada(), &id("s")).await.unwrap(), home.beside().head(&ada(), &id("s")).await.unwrap());
    }
    assert_eq!(home.tenure.examine(|_| ()).await.unwrap(), []);
}

on_every_store! {
    /// Others extended the log to its former length: the same position with a different history.
    async fn a_different_log_of_the_same_length_is_detected(home: &mut Home) {
        let other = home.beside();
        home.tenure.create(&ada(), named("s")).await.unwrap();
        append_message(&home.tenure, "one").await;
        append_message(&home.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        append_message(&home.tenure, "next").await;
        assert_all_see(home, &[&home.tenure, &other], &["one", "other", "next"]).await;
    }

    /// A read detects the loss as well, without a write.
    async fn a_read_shows_the_stored_history(home: &mut Home) {
        let other = home.beside();
        home.tenure.create(&ada(), named("s")).await.unwrap();
        append_message(&home.tenure, "one").await;
        append_message(&home.tenure, "lost").await;
        let lost = home.tenure.load(&ada(), &id("s")).await.unwrap();
        assert_eq!(texts(&lost), user_messages(&["one", "lost"]));
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        assert_all_see(home, &[&home.tenure], &["one", "other"]).await;
    }

    /// Others extended the log beyond its former length: the cached log is not a prefix of the
    /// stored one.
    async fn a_different_longer_log_is_detected(home: &mut Home) {
        let other = home.beside();
        home.tenure.create(&ada(), named("s")).await.unwrap();
        append_message(&home.tenure, "one").await;
        append_message(&home.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        append_message(&other, "another").await;
        append_message(&home.tenure, "next").await;
        assert_all_see(home, &[&home.tenure, &other], &["one", "other", "another", "next"]).await;
    }

    /// No writes since: the cached log is longer than the stored one.
    async fn a_shorter_log_is_detected(home: &mut Home) {
        let other = home.beside();
        home.tenure.create(&ada(), named("s")).await.unwrap();
        append_message(&home.tenure, "one").await;
        append_message(&home.tenure, "lost").await;
        truncate_log(&other, &id("s"), 2).await;
        append_message(&home.tenure, "next").await;
        assert_all_see(home, &[&home.tenure, &other], &["one", "next"]).await;
    }

    /// A session loaded for editing cannot be saved over a different history.
    async fn an_edited_session_is_not_saved_over_another_history(home: &mut Home) {
        let other = home.beside();
        home.tenure.create(&ada(), named("s")).await.unwrap();
        append_message(&home.tenure, "one").await;
        append_message(&home.tenure, "lost").await;
        let mut edited = home.tenure.load(&ada(), &id("s")).await.unwrap();
        truncate_log(&other, &id("s"), 2).await;
        append_message(&other, "other").await;
        edited.push(picture("see", "F"), home.now());
        assert_eq!(edited.save(&home.tenure).await.unwrap_err().code(), "conflict");
        let mut edited = home.tenure.load(&ada(), &id("s")).await.unwrap();
        edited.push(Message::user("edit"), home.now());
        edited.save(&home.tenure).await.unwrap();
        edited.push(Message::user("and again"), home.now());
        edited.save(&home.tenure).await.unwrap();
        assert_all_see(home, &[&home.tenure, &other], &["one", "other", "edit", "and again"]).await;
    }
}
