//! Sessions that have expired and that no sweep has visited.

use super::fixture::Fixture;
use crate::store::query::{ExpiryCutoffs, OwnerFilter, SessionCursor, SessionQuery};
use crate::testing::records::{SessionLog, key, timestamp};
use crate::types::entry::{Entry, SessionCreated};
use crate::types::head::Head;
use crate::types::id::Tenant;
use crate::types::status::Status;

#[track_caller]
fn assert_ids(heads: &[Head], want: &[&str]) {
    assert_eq!(heads.iter().map(|h| h.info.session_id.as_str()).collect::<Vec<_>>(), want);
}

/// With expiry cutoffs, the status of an active session depends on its last activity and its assistant's cutoff;
/// other statuses stay. Pages and offsets count only sessions with the wanted effective status.
pub async fn expired_sessions_are_found_before_a_sweep(Fixture { store, .. }: Fixture) {
    for (id, assistant, seconds) in [
        ("old", None, 10),
        ("new", None, 30),
        ("quick-old", Some("quick"), 20),
        ("quick-new", Some("quick"), 41),
        ("ever", Some("ever"), 1),
        ("other", Some("it's"), 11),
        ("paused", None, 2),
        ("swept", None, 3),
        ("deleted", None, 4),
    ] {
        let created = SessionCreated { assistant: assistant.map(str::to_owned), ..SessionCreated::default() };
        let mut log = SessionLog::begin(key("default", id), created, timestamp(seconds));
        let to = match id {
            "paused" => Status::Paused,
            "swept" => Status::Expired,
            "deleted" => Status::Deleted,
            _ => Status::Active,
        };
        if to != Status::Active {
            log.push_at(timestamp(seconds), Entry::Status { to, reason: None, until: None });
        }
        log.save(&*store).await;
    }
    let expiry = ExpiryCutoffs {
        default: Some(timestamp(11)),
        by_assistant: [("quick".to_owned(), Some(timestamp(41))), ("ever".to_owned(), None)].into(),
    };
    let with = |status: &[Status]| SessionQuery {
        status: status.to_vec(),
        expiry: Some(expiry.clone()),
        ..SessionQuery::new(OwnerFilter::Tenant(Tenant::default()), 1000)
    };
    let expired = with(&[Status::Expired]);
    let active = with(&[Status::Active]);
    for (query, want) in [
        (&expired, vec!["quick-old", "old", "swept"]),
        (&active, vec!["quick-new", "new", "other", "ever"]),
        (&with(&[Status::Active, Status::Paused]), vec!["quick-new", "new", "other", "paused", "ever"]),
        (&with(&[Status::Deleted]), vec!["deleted"]),
        (&SessionQuery { assistant: Some("quick".to_owned()), ..expired.clone() }, vec!["quick-old"]),
        (&SessionQuery { expiry: None, ..expired.clone() }, vec!["swept"]),
    ] {
        assert_ids(&store.heads(query).await.unwrap(), &want);
        assert_ids(&store.page(query, 1000).await.unwrap().heads, &want);
        let second = SessionQuery { offset: 1, limit: 1, ..query.clone() };
        assert_ids(&store.page(&second, 1000).await.unwrap().heads, &want[1.min(want.len())..2.min(want.len())]);
        let first = store.page(&SessionQuery { limit: 1, ..query.clone() }, 1000).await.unwrap().heads;
        let rest = SessionQuery { cursor: first.first().map(SessionCursor::of), ..query.clone() };
        assert_ids(&store.page(&rest, 1000).await.unwrap().heads, &want[1..]);
    }
    let never = SessionQuery { expiry: Some(ExpiryCutoffs::default()), ..expired };
    assert_ids(&store.heads(&never).await.unwrap(), &["swept"]);
}
