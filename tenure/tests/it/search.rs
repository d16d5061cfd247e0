//! Search over session messages, on every store.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use tenure::{policy::*, session::*, *};

fn search(text: &str) -> SearchRequest {
    SearchRequest::new(text, 100)
}

/// Each hit as text: session, position (or the title), and the highlighted words.
fn describe_hits(page: &SearchPage) -> Vec<String> {
    let describe_hit = |f: &SearchHit| {
        let chars: Vec<char> = f.snippet.chars().collect();
        let words: Vec<String> = f.highlights.iter().map(|(a, b)| chars[*a..*b].iter().collect()).collect();
        let location = f.message.as_ref().map_or("title".to_owned(), |s| s.position.to_string());
        format!("{}/{location} {}", f.session_id, words.join("+"))
    };
    page.hits.iter().map(describe_hit).collect()
}

async fn search_hits(tenure: &Tenure, principal: &Principal, text: &str) -> Vec<String> {
    let page = tenure.search_sessions(principal, &search(text)).await.unwrap();
    assert_eq!((page.next.as_ref(), page.damaged.len()), (None, 0));
    describe_hits(&page)
}

/// Reads all pages of a search and checks each against its bounds.
async fn all_pages(tenure: &Tenure, principal: &Principal, mut search: SearchRequest) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..10_000 {
        let page = tenure.search_sessions(principal, &search).await.unwrap();
        assert!(page.hits.len() <= search.query.limit && page.scanned <= search.max_sessions + 1);
        all.extend(describe_hits(&page));
        // Cursors round-trip through text.
        let Some(next) = page.next else { return all };
        search.cursor = Some(next.to_string().parse().unwrap());
    }
    panic!("pagination does not terminate");
}

#[tokio::test]
async fn a_search_through_nested_forks_is_bounded() {
    let tenure = Tenure::open("memory:").await.unwrap();
    tenure.create(&ada(), new_session("f0")).await.unwrap();
    tenure.append(&ada(), &id("f0"), vec![Message::user("the ferry")]).await.unwrap();
    for n in 1..40 {
        tenure
            .fork(&ada(), &id(&format!("f{}", n - 1)), Fork::at(Point::Position(n)).id(Some(id(&format!("f{n}")))))
            .await
            .unwrap();
        tenure.append(&ada(), &id(&format!("f{n}")), vec![Message::user("and so on")]).await.unwrap();
    }
    // Each of the 40 sessions contains the message of the first one, which is up to 39 ancestors
    // away.
    let mut search = SearchRequest { max_reads: 10, ..search("ferry") };
    let mut hits = 0;
    let mut pages = 0;
    loop {
        let page = tenure.search_sessions(&ada(), &search).await.unwrap();
        hits += page.hits.len();
        pages += 1;
        assert!(page.scanned <= 11, "each session is one read at least: {}", page.scanned);
        assert_eq!(page.truncated, page.next.is_some(), "the page says that it was cut");
        let Some(next) = page.next else { break };
        search.cursor = Some(next.to_string().parse().unwrap());
    }
    // Each ancestor costs a page of records and a head, with ten reads per page; finding the
    // position to continue from is not counted.
    assert_eq!(hits, 40);
    assert!(pages >= 100, "{pages} pages");
    let full = tenure
        .search_sessions(&ada(), &SearchRequest { max_reads: 10_000, ..SearchRequest::new("ferry", 100) })
        .await
        .unwrap();
    assert_eq!((full.hits.len(), full.truncated, full.next), (40, false, None));
}

on_every_store! {
    /// A user finds only their own sessions, an administrator all of the tenant.
    async fn users_find_only_their_own_sessions(test: &mut TestTenure) {
        let t = &test.tenure;
        let (eve, stranger) = (Principal::new("acme", "eve").unwrap(), Principal::tenant_wide("other").unwrap());
        for (principal, name) in [(&ada(), "a1"), (&eve, "e1"), (&ada(), "a2")] {
            t.create(principal, NewSession { title: Some(format!("The ferry of {name}")), ..new_session(name) }).await.unwrap();
            t.append(principal, &id(name), turn_messages(1)).await.unwrap();
            t.append(principal, &id(name), vec![Message::user("The FERRY to Döver"), tool_call_message("c9", "ferry", &serde_json::json!({}))]).await.unwrap();
            test.advance(SignedDuration::from_secs(1));
        }
        let hits_in = |name: &str| [format!("{name}/title ferry"), format!("{name}/5 ferry"), format!("{name}/4 FERRY")];
        assert_eq!(search_hits(t, &ada(), "ferry").await, [hits_in("a2"), hits_in("a1")].concat());
        assert_eq!(search_hits(t, &eve, "ferry").await, hits_in("e1"));
        assert_eq!(search_hits(t, &admin(), "ferry").await, [hits_in("a2"), hits_in("e1"), hits_in("a1")].concat());
        assert_eq!(search_hits(t, &stranger, "ferry").await, Vec::<String>::new());
        assert_eq!(search_hits(t, &ada(), "dover ferry").await, ["a2/4 FERRY+Döver", "a1/4 FERRY+Döver"]);
        assert_eq!(search_hits(t, &ada(), "\"ferry dover\"").await, Vec::<String>::new());
        // An administrator can restrict the search to one user; for others the filter has no
        // effect.
        let mut filtered = search("ferry");
        filtered.query.owner = OwnerFilter::User(admin().tenant, eve.user.clone());
        assert_eq!(describe_hits(&t.search_sessions(&admin(), &filtered).await.unwrap()), hits_in("e1"));
        assert_eq!(describe_hits(&t.search_sessions(&ada(), &filtered).await.unwrap()), [hits_in("a2"), hits_in("a1")].concat());
        // A cursor that names another user's session finds nothing.
        let far = test.now().as_microsecond() + 1;
        filtered.cursor = Some(format!("s~99~9~9~{far}~e1").parse().unwrap());
        assert_eq!(describe_hits(&t.search_sessions(&stranger, &filtered).await.unwrap()), Vec::<String>::new());
        assert!(!describe_hits(&t.search_sessions(&ada(), &filtered).await.unwrap()).iter().any(|f| f.starts_with("e1")));
        let mut by_role = search("ferry");
        by_role.role = Some(Role::User);
        assert_eq!(describe_hits(&t.search_sessions(&eve, &by_role).await.unwrap()), ["e1/4 FERRY"]);
        let page = t.search_sessions(&eve, &by_role).await.unwrap();
        let message = page.hits[0].message.as_ref().unwrap();
        let stored = &t.load(&eve, &id("e1")).await.unwrap().messages[4];
        assert_eq!((message.seq, message.at, message.role), (stored.seq, stored.at, Role::User));
    }

    /// Discarded messages are not found; messages inherited from a parent are.
    async fn discarded_and_deleted_messages_are_not_found(test: &mut TestTenure) {
        let (t, principal) = (&test.tenure, ada());
        t.create(&principal, new_session("a")).await.unwrap();
        for n in 0..4 {
            t.append(&principal, &id("a"), turn_messages(n)).await.unwrap();
        }
        t.fork(&principal, &id("a"), Fork::at(Point::Turn(3)).id(Some(id("b")))).await.unwrap();
        t.append(&principal, &id("b"), turn_messages(7)).await.unwrap();
        t.rewind(&principal, &id("a"), Point::Turn(1)).await.unwrap();
        t.append(&principal, &id("a"), turn_messages(8)).await.unwrap();
        let sorted = async |text: &str| {
            let mut hits = search_hits(t, &principal, text).await;
            hits.sort();
            hits
        };
        assert_eq!(sorted("question 0").await, ["a/0 question+0", "b/0 question+0"]);
        assert_eq!(sorted("question 2").await, ["b/8 question+2"], "it was rewound in a, and the fork left before that");
        assert_eq!(sorted("question 3").await, Vec::<String>::new());
        assert_eq!(sorted("answer 8").await, ["a/7 answer+8"]);
        assert_eq!(sorted("answer 7").await, ["b/15 answer+7"]);
        // Rewind into the part shared with the parent.
        t.rewind(&principal, &id("b"), Point::Position(5)).await.unwrap();
        t.append(&principal, &id("b"), vec![Message::assistant("question 2 was never asked")]).await.unwrap();
        assert_eq!(sorted("question 2").await, ["b/5 question+2"]);
        // Purge the parent; the fork keeps the records it needs.
        t.purge(&principal, &id("a"), None).await.unwrap();
        assert_eq!(sorted("question 0").await, ["b/0 question+0"]);
        assert_eq!(sorted("answer 8").await, Vec::<String>::new());
        t.delete(&principal, &id("b"), None).await.unwrap();
        assert_eq!(sorted("question").await, Vec::<String>::new());
        let mut deleted = search("question");
        deleted.query.status = vec![Status::Deleted];
        assert_eq!(t.search_sessions(&principal, &deleted).await.unwrap().hits.len(), 3);
        t.restore(&principal, &id("b"), None).await.unwrap();
        assert_eq!(sorted("question").await.len(), 3);
        test.advance(SignedDuration::from_hours(24 * 8));
        assert_eq!(sorted("question").await, Vec::<String>::new(), "it has expired, although nobody has swept");
    }

    /// Pages of any size add up to the same hits, which equal those of a naive search.
    async fn pages_contain_every_hit_once(test: &mut TestTenure) {
        let (t, principal) = (&test.tenure, ada());
        let (words, mut seed) = (["alpha", "beta", "gamma", "delta", "Épsilon"], 7u64);
        let mut dice = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        let mut want: Vec<String> = Vec::new();
        for s in 0..12 {
            let name = id(&format!("s{s:02}"));
            t.create(&principal, new_session(name.as_str())).await.unwrap();
            let texts: Vec<Vec<&str>> =
                (0..dice(150)).map(|_| (0..4).map(|_| words[dice(5) as usize]).collect()).collect();
            let messages: Vec<Message> = texts.iter().map(|w| Message::user(&w.join(", "))).collect();
            for batch in messages.chunks(40) {
                t.append(&principal, &name, batch.to_vec()).await.unwrap();
            }
            let both = |w: &[&str]| w.contains(&"beta") && w.contains(&"Épsilon");
            let matches_here = texts.iter().enumerate().rev().filter(|(_, w)| both(w)).map(|(i, _)| format!("{name}/{i}"));
            want = matches_here.chain(want).collect();
            test.advance(SignedDuration::from_secs(1));
        }
        let locations = |hits: Vec<String>| hits.iter().map(|f| f.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>();
        assert!(want.len() > 100, "{}", want.len());
        for (limit, max_sessions, max_bytes) in
            [(100, 500, 16 << 20), (1, 500, 16 << 20), (7, 1, 16 << 20), (100, 500, 1), (13, 3, 5000)]
        {
            let small = SearchRequest { max_sessions, max_bytes, ..SearchRequest::new("EPSILON beta", limit) };
            assert_eq!(locations(all_pages(t, &principal, small).await), want, "{limit} {max_sessions} {max_bytes}");
        }
        // Appends and rewinds between pages: no hit is duplicated, and no discarded message is
        // found.
        let mut first = SearchRequest::new("beta epsilon", 3);
        let page = t.search_sessions(&principal, &first).await.unwrap();
        let newest = page.hits[2].session_id.clone();
        let last = page.hits[2].message.clone().unwrap();
        t.append(&principal, &newest, vec![Message::user("beta epsilon, new")]).await.unwrap();
        first.cursor = page.next;
        let rest = locations(all_pages(t, &principal, first.clone()).await);
        assert_eq!(rest, want[3..]);
        t.rewind(&principal, &newest, Point::Position(last.position / 2)).await.unwrap();
        let rest = locations(all_pages(t, &principal, first).await);
        let still = |f: &&String| match f.split_once('/') {
            Some((s, position)) => s != newest.as_str() || position.parse::<usize>().unwrap() < last.position / 2,
            None => false,
        };
        assert_eq!(rest, want[3..].iter().filter(still).cloned().collect::<Vec<_>>());
    }

    /// Redacted text is neither found nor shown; it stays in the log (D-084).
    async fn redacted_words_are_not_found(test: &mut TestTenure) {
        let rule = RedactionRule::new("email", r"[\w.]+@[\w.]+\w", None).unwrap();
        test.reopen_with(|options| options.redaction = vec![rule].try_into().unwrap()).await;
        let (t, principal) = (&test.tenure, ada());
        t.create(&principal, NewSession { title: Some("ann@example.com".into()), ..new_session("a") }).await.unwrap();
        t.append(&principal, &id("a"), vec![Message::user("the address is ann@example.com, she said")]).await.unwrap();
        assert_eq!(search_hits(t, &principal, "example").await, Vec::<String>::new());
        let page = t.search_sessions(&principal, &search("address")).await.unwrap();
        assert_eq!(page.hits[0].snippet, "the address is [redacted: email], she said");
        assert_eq!(page.hits[0].title.as_deref(), Some("[redacted: email]"));
        assert_eq!(t.redact("to ann@example.com").0, "to [redacted: email]");
        let loaded = t.load(&principal, &id("a")).await.unwrap();
        assert!(loaded.messages[0].message.text().contains("ann@example.com"), "what was given is given back");
    }
}

/// A damaged session does not hide the others.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_sessions_are_reported_and_skipped() {
    let mut test = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    for name in ["a", "b", "c"] {
        test.tenure.create(&ada(), new_session(name)).await.unwrap();
        test.tenure.append(&ada(), &id(name), vec![Message::user("the ferry")]).await.unwrap();
        test.advance(SignedDuration::from_secs(1));
    }
    test.reopen().await;
    let file = rusqlite::Connection::open(test.url().strip_prefix("sqlite:").unwrap()).unwrap();
    let changed = file
        .execute("UPDATE record SET entry = replace(entry, 'the ferry', 'the furry') WHERE record_key >> 32 = (SELECT id FROM head WHERE session = 'b')", [])
        .unwrap();
    assert!(changed > 0);
    let page = test.tenure.search_sessions(&ada(), &search("ferry")).await.unwrap();
    assert_eq!(describe_hits(&page), ["c/0 ferry", "a/0 ferry"]);
    assert_eq!((page.damaged, page.scanned), (vec![id("b")], 3));
}

#[tokio::test]
async fn invalid_queries_and_cursors_are_refused() {
    let tenure = Tenure::open("memory:").await.unwrap();
    for text in ["", "!!", &"word ".repeat(100)] {
        let error = tenure.search_sessions(&ada(), &search(text)).await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { param, .. } if param == "q"), "{error}");
    }
    let many = tenure.search_sessions(&ada(), &SearchRequest::new("x", 101)).await.unwrap_err();
    assert!(matches!(many, Error::TooLarge { limit: "max_page", .. }));
    for cursor in ["", "x", "1", "1~", "1~ a", "s~", "s~1~2~3", "s~1~2~3~1", "s~1~2~x~1~a", "s~-1~2~3~1~a"] {
        let error = cursor.parse::<SearchCursor>().unwrap_err();
        assert!(matches!(&error, Error::Invalid { param, .. } if param == "cursor"), "{cursor}: {error}");
    }
}
