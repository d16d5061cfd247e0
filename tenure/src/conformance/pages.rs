//! Bounded lists: the pages of a scan with bounded work add up to the unbounded list.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::query::{HeadPage, OwnerFilter, SessionCursor, SessionQuery};
use crate::testing::records::{SessionLog, key, timestamp};
use crate::testing::rng::Rng;
use crate::types::entry::{Entry, Patch, SessionCreated, SessionPatch};
use crate::types::head::Head;
use crate::types::id::{Tenant, User};
use crate::types::status::Status;

fn tag(tag: &str) -> Vec<String> {
    vec![tag.to_owned()]
}

/// Stores 60 sessions of two users and two tenants, many active at the same time.
async fn fill(store: &dyn Store) {
    let mut rng = Rng::new(20_261_118);
    for n in 0..60 {
        let user = User::new(["ada", "bob"][rng.below(2)]).unwrap();
        let mut created = SessionCreated { user, tags: tag("all"), ..SessionCreated::default() };
        created.tags.extend((n % 7 == 0).then(|| "seventh".to_owned()));
        created.title = (n % 5 == 0).then(|| format!("The FIFTH {n}"));
        created.thread = (n % 6 == 0).then(|| "thread".to_owned());
        created.assistant = (n % 4 == 0).then(|| "helper".to_owned());
        let mut log =
            SessionLog::begin(key(["a", "b"][usize::from(n % 10 == 9)], &format!("s{n}")), created, timestamp(n / 4));
        if n % 3 == 0 {
            log.push_at(timestamp(n / 4), Entry::Status { to: Status::Deleted, reason: None, until: None });
        }
        log.save(store).await;
    }
}

/// Reads all pages of a query and checks each against its bounds. Returns the heads and the number
/// of pages.
async fn all_pages(store: &dyn Store, query: &SessionQuery, max_scan: usize) -> (Vec<Head>, usize) {
    let mut listed = Vec::new();
    let mut pages = 0;
    let mut cursor = None;
    loop {
        let HeadPage { heads, scan_stopped_at: stopped } =
            store.page(&SessionQuery { cursor, ..query.clone() }, max_scan).await.unwrap();
        pages += 1;
        assert!(heads.len() <= query.limit && pages < 1000, "{query:?}");
        assert!(stopped.is_none() || heads.len() < query.limit, "a full page must not report a scan stop");
        cursor = match heads.last().filter(|_| heads.len() == query.limit) {
            Some(last) => Some(SessionCursor::of(last)),
            None => stopped,
        };
        listed.extend(heads);
        if cursor.is_none() {
            return (listed, pages);
        }
    }
}

/// Whatever the query and however small the scan budget, the pages together equal the list.
pub async fn pages_together_are_the_list(Fixture { store, .. }: Fixture) {
    fill(&*store).await;
    let tenant = Tenant::new("a").unwrap();
    let title = |t: &str| Some(t.to_owned());
    for owner in [OwnerFilter::Tenant(tenant.clone()), OwnerFilter::User(tenant, User::new("ada").unwrap())] {
        let all = SessionQuery::new(owner, usize::MAX);
        for query in [
            all.clone(),
            SessionQuery { tags: tag("all"), ..all.clone() },
            SessionQuery { tags: tag("seventh"), ..all.clone() },
            SessionQuery { tags: ["all", "seventh"].map(str::to_owned).to_vec(), ..all.clone() },
            SessionQuery { tags: tag("none"), ..all.clone() },
            SessionQuery { title: title("fifth"), ..all.clone() },
            SessionQuery { title: title("no such title"), ..all.clone() },
            SessionQuery { title: title("fifth"), tags: tag("all"), status: vec![Status::Active], ..all.clone() },
            SessionQuery { thread: Some("thread".to_owned()), ..all.clone() },
            SessionQuery { assistant: Some("helper".to_owned()), status: vec![Status::Deleted], ..all.clone() },
        ] {
            let list = store.heads(&query).await.unwrap();
            for (limit, max_scan) in [(1, 1), (2, 3), (3, 2), (5, 10), (100, 7), (100, 1000)] {
                let (listed, pages) = all_pages(&*store, &SessionQuery { limit, ..query.clone() }, max_scan).await;
                assert_eq!(listed, list, "limit {limit}, {max_scan} at a time: {query:?}");
                assert!(max_scan < 100 || pages == 1 + list.len() / limit, "{pages} pages: {query:?}");
            }
        }
    }
}

/// A page scans no more than its budget and returns the cursor where it stopped.
pub async fn a_page_ends_at_its_scan_bound(Fixture { store, .. }: Fixture) {
    fill(&*store).await;
    let all = SessionQuery::new(OwnerFilter::Tenant(Tenant::new("a").unwrap()), 1000);
    let order = store.heads(&all).await.unwrap();
    let none = SessionQuery { title: Some("no such title".to_owned()), ..all.clone() };
    let page = store.page(&none, 10).await.unwrap();
    assert_eq!(page, HeadPage { heads: Vec::new(), scan_stopped_at: Some(SessionCursor::of(&order[9])) });
    // A rare label is found through its index, independent of the scan position.
    let last = store.page(&SessionQuery { tags: tag("seventh"), ..all.clone() }, 10).await.unwrap();
    assert_eq!((last.heads.len(), last.scan_stopped_at), (8, None));
    assert_eq!(store.page(&SessionQuery { tags: tag("none"), ..all }, 1).await.unwrap(), HeadPage::default());
}

/// A session is found by its current labels only, and by none after a purge.
pub async fn labels_follow_their_session(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::begin(
        key("a", "s"),
        SessionCreated { tags: tag("old"), ..SessionCreated::default() },
        timestamp(0),
    );
    log.save(&*store).await;
    let count = async |name: &str| {
        let query =
            SessionQuery { tags: tag(name), ..SessionQuery::new(OwnerFilter::Tenant(Tenant::new("a").unwrap()), 9) };
        store.page(&query, 9).await.unwrap().heads.len()
    };
    assert_eq!((count("old").await, count("new").await), (1, 0));
    let tags = Patch::Set(["new", "more"].map(str::to_owned).to_vec());
    log.push_at(timestamp(1), Entry::info(SessionPatch { tags, ..SessionPatch::default() })).save(&*store).await;
    log.push_message("hello").save(&*store).await;
    assert_eq!((count("old").await, count("new").await, count("more").await), (0, 1, 1));
    assert_eq!(store.check(&[]).await.unwrap(), []);
    store.purge(&log.key).await.unwrap();
    assert_eq!((count("new").await, count("more").await), (0, 0));
    assert_eq!(store.check(&[]).await.unwrap(), []);
}
