//! The audit trail over HTTP: it is read-only, readable with the right, and reveals tampering.

use crate::support::InProcessClient;
use serde_json::{Value, json};
use tenure::store::Commit;
use tenure::{log::*, review::*, session::*};
use tenure_server::auth::Right;

/// Stores a session with this many decisions, a minute apart; `change` may tamper with the records.
pub async fn seed(
    api: &InProcessClient,
    tenant: &str,
    session: &str,
    decisions: u64,
    change: impl FnOnce(&mut Vec<Record>),
) {
    let key = SessionKey { tenant: Tenant::new(tenant).unwrap(), session: SessionId::new(session).unwrap() };
    let start: jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let mut records = Vec::new();
    let mut push = |entry: Entry| {
        let seq = records.len() as u64 + 1;
        let at = start + jiff::SignedDuration::from_mins(seq as i64);
        records.push(Record { seq, at, entry });
        at
    };
    push(Entry::created(SessionCreated { user: User::new("ada").unwrap(), ..SessionCreated::default() }));
    push(Entry::message(Message::user("Money back")));
    let mut previous = DecisionHash::START;
    for n in 0..decisions {
        let review = ReviewId::of(&key.session, 3 + 2 * n);
        let opened: ReviewOpened = serde_json::from_value(json!({"review": review, "step": "refund"})).unwrap();
        push(Entry::review_opened(opened));
        let decided = ReviewDecided {
            review,
            step: "refund".to_owned(),
            decision: Decision::Approved,
            reviewer: "user_789".to_owned(),
            notes: Some(format!("=HYPERLINK(\"{n}\"), ok")),
            arguments: None,
            previous: Some(previous),
        };
        let at = push(Entry::review_decided(decided.clone()));
        previous = decided.hash(at);
    }
    let head = Session::replay(&key, records.clone()).unwrap().head().clone();
    change(&mut records);
    api.app.tenure.store().commit(&Commit::new(None, records, head)).await.unwrap();
}

#[tokio::test]
async fn decisions_cannot_be_written_over_http() {
    let api = InProcessClient::memory().await;
    seed(&api, "acme", "s", 2, |_| ()).await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let ada = api.key("acme", Some("ada"), &[Right::Read, Right::Write]).await;
    let before = ada.get("/sessions/s").await.expect_status(200);
    assert_eq!(before["metadata"]["hitl_decisions"].as_array().unwrap().len(), 2);
    let param = "metadata.hitl_decisions";
    for value in [json!(null), json!([]), json!([{"step": "refund", "decision": "rejected", "reviewer": "cfo"}])] {
        let metadata = json!({"hitl_decisions": value});
        let with_decisions = |mut body: Value| {
            body["metadata"] = metadata.clone();
            body
        };
        let messages = json!([{"role": "user", "content": "x"}]);
        assert_eq!(ada.patch("/sessions/s", with_decisions(json!({}))).await.expect_error(400).1, param);
        assert_eq!(ada.post("/sessions", with_decisions(json!({"id": "n"}))).await.expect_error(400).1, param);
        assert_eq!(ada.post("/threads/t/session", with_decisions(json!({}))).await.expect_error(400).1, param);
        for body in [json!({"messages": messages}), json!({"tenure": 2, "messages": messages})] {
            assert_eq!(ada.put("/v1/sessions/s", with_decisions(body.clone())).await.expect_error(400).1, param);
            assert_eq!(ada.put("/v1/sessions/n", with_decisions(body.clone())).await.expect_error(400).1, param);
            assert_eq!(ada.post("/sessions/import", with_decisions(body)).await.expect_error(400).1, param);
        }
    }
    assert_eq!(ada.get("/sessions/s").await.expect_status(200), before);
    assert_eq!(ada.get("/sessions/n").await.expect_error(404).0, "not_found");
    let decided = admin.get("/reviews?status=decided").await.expect_status(200);
    assert_eq!(decided["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_session_shows_its_trail_and_whether_it_was_changed() {
    let api = InProcessClient::memory().await;
    seed(&api, "acme", "s", 3, |_| ()).await;
    seed(&api, "acme", "bad", 3, |records| {
        if let Entry::ReviewDecided(d) = &mut records[5].entry {
            d.decision = Decision::Rejected;
        }
    })
    .await;
    let ada = api.key("acme", Some("ada"), &[Right::Read, Right::Write]).await;
    let trail = ada.get("/sessions/s/audit").await.expect_status(200);
    assert_eq!((&trail["session_id"], &trail["verified"], &trail["broken"]), (&json!("s"), &json!(true), &Value::Null));
    let decisions = trail["decisions"].as_array().unwrap();
    assert_eq!(decisions.len(), 3);
    let first = json!({
        "session_id": "s", "seq": 4, "timestamp": "2026-01-01T00:04:00Z", "review_id": "rev_3_s", "step": "refund",
        "decision": "approved", "reviewer": "user_789", "notes": "=HYPERLINK(\"0\"), ok", "arguments": null,
        "previous": "0".repeat(64), "hash": decisions[0]["hash"], "imported": false, "verified": true,
    });
    assert_eq!(decisions[0], first);
    assert_eq!(decisions[1]["previous"], decisions[0]["hash"]);
    let broken = ada.get("/sessions/bad/audit").await.expect_status(200);
    assert_eq!((&broken["verified"], &broken["broken"]["seq"]), (&json!(false), &json!(8)));
    assert_eq!(broken["decisions"][2]["verified"], false);
    // Decisions of a deleted session are included; those of another user are not.
    ada.delete("/sessions/s").await.expect_status(200);
    assert_eq!(ada.get("/sessions/s/audit").await.expect_status(200), trail);
    for stranger in [api.key("acme", Some("bob"), &[Right::Read]).await, api.key("other", None, &[Right::Admin]).await]
    {
        assert_eq!(stranger.get("/sessions/s/audit").await.expect_error(404).0, "not_found");
    }
}

#[tokio::test]
async fn an_administrator_exports_the_trail_of_the_tenant() {
    let api = InProcessClient::memory().await;
    for n in 0..120 {
        seed(&api, "acme", &format!("s{n}"), 2, |_| ()).await;
    }
    seed(&api, "other", "secret", 2, |_| ()).await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let answer = admin.get("/audit").await;
    assert_eq!((answer.status.as_u16(), answer.headers["content-type"].to_str().unwrap()), (200, "application/jsonl"));
    let lines: Vec<Value> = answer.text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 240);
    assert!(lines.iter().all(|l| l["verified"] == true && l["session_id"] != "secret"));
    let in_range = admin.get("/audit?from=2026-01-01T00:04:00Z&to=2026-01-01T00:06:00Z").await.text;
    assert_eq!((in_range.lines().count(), in_range.contains("00:06:00")), (120, false));
    let csv = admin.get("/audit?format=csv&from=2026-01-01T00:05:00Z").await;
    assert_eq!(csv.headers["content-type"].to_str().unwrap(), "text/csv; charset=utf-8");
    let lines: Vec<&str> = csv.text.split_terminator("\r\n").collect();
    assert_eq!((lines.len(), lines[0].starts_with("session_id,seq,timestamp,")), (121, true));
    assert!(lines[1].contains(r#",refund,approved,user_789,"'=HYPERLINK(""1""), ok",,"#), "{}", lines[1]);
    assert!(admin.get("/audit?from=2027-01-01T00:00:00Z").await.text.is_empty());
    let other = api.key("other", None, &[Right::Admin]).await.get("/audit").await.text;
    assert_eq!((other.lines().count(), other.contains("\"secret\"")), (2, true));
    let reader = api.key("acme", Some("ada"), &[Right::Read, Right::Write, Right::Review]).await;
    assert_eq!(reader.get("/audit").await.expect_error(403).0, "forbidden");
    for (query, param) in [("from=yesterday", "from"), ("to=7", "to"), ("format=xml", "format"), ("form=csv", "form")] {
        assert_eq!(admin.get(&format!("/audit?{query}")).await.expect_error(400).1, param);
    }
}
