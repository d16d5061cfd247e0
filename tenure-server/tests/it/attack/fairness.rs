//! One principal must not slow down or starve another.

use super::{amount, report};
use crate::support::{ServerProcess, assert_error, chat_request, http_client, send};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tenure::store::Commit;
use tenure::{log::*, session::*, *};

const CONFIG: &str = "store: sqlite:tenure.db\ntelemetry: {log: 'off'}\n";

/// Creates a key for a user of a tenant with the command line.
fn key(dir: &Path, tenant: &str, user: &str) -> String {
    std::fs::write(dir.join("tenure.yaml"), CONFIG).unwrap();
    let output = Command::new(crate::support::binary())
        .current_dir(dir)
        .args(["keys", "add", "--tenant", tenant, "--user", user])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.split_whitespace().find(|word| word.starts_with("tnr_") || word.len() > 30).unwrap().to_owned()
}

/// Writes sessions of one user directly to the store.
async fn fill(dir: &Path, tenant: &str, count: usize) {
    let (store, _) = tenure::store::open(&format!("sqlite:{}", dir.join("tenure.db").display())).await.unwrap();
    let commits = (0..count).map(|n| {
        let created = SessionCreated { user: User::new("mallory").unwrap(), ..SessionCreated::default() };
        let created = SessionCreated { title: Some(format!("Session {n}")), tags: vec!["some".to_owned()], ..created };
        let record = Record { seq: 1, at: jiff::Timestamp::now(), entry: Entry::created(created) };
        let key =
            SessionKey { tenant: Tenant::new(tenant).unwrap(), session: SessionId::new(format!("s{n}")).unwrap() };
        let head = Session::replay(&key, vec![record.clone()]).unwrap().head().clone();
        Commit::new(None, vec![record], head)
    });
    // Commits are batched into shared transactions.
    for batch in commits.collect::<Vec<_>>().chunks(200) {
        for result in futures_util::future::join_all(batch.iter().map(|commit| store.commit(commit))).await {
            result.unwrap();
        }
    }
}

async fn as_key(server: &ServerProcess, key: &str, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
    let mut request = server.request(method, path).bearer_auth(key);
    if let Some(body) = body {
        request = request.json(&body);
    }
    send(request).await
}

async fn median_of_chats(server: &ServerProcess, key: &str, count: usize, name: &str) -> Duration {
    let mut times = Vec::new();
    for n in 0..count {
        let start = Instant::now();
        let (status, body) =
            as_key(server, key, "POST", "/v1/chat/completions", Some(chat_request(name, &format!("hello {n}")))).await;
        assert_eq!(status, 200, "the chat of another tenant fails: {body}");
        times.push(start.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listers_of_one_tenant_do_not_stop_the_chat_of_another() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), "hostile", amount(4_000, 200_000)).await;
    let (mallory, ann) = (key(dir.path(), "hostile", "mallory"), key(dir.path(), "acme", "ann"));
    let server = Arc::new(ServerProcess::start(dir.path(), CONFIG));
    let idle = median_of_chats(&server, &ann, amount(10, 50), "idle").await;
    let stop = Arc::new(AtomicBool::new(false));
    let lists = Arc::new(AtomicUsize::new(0));
    let most = 32;
    let mut listers = Vec::new();
    for n in 0..most {
        let server = server.clone();
        let mallory = mallory.clone();
        let stop = stop.clone();
        let lists = lists.clone();
        listers.push(tokio::spawn(async move {
            // Each client has its own connection.
            let client = http_client();
            let filter = ["tag=absent", "title=absent", "metadata.absent=1", "tag=some&title=absent"][n % 4];
            let url = format!("{}/sessions?{filter}", server.url);
            while !stop.load(Relaxed) {
                let (status, body) = send(client.get(&url).bearer_auth(&mallory)).await;
                assert!(status == 200 || status == 429, "{status}: {body}");
                assert!(status != 200 || body["data"] == json!([]), "{body}");
                lists.fetch_add(1, Relaxed);
            }
        }));
    }
    while lists.load(Relaxed) < most {
        tokio::task::yield_now().await;
    }
    let busy = median_of_chats(&server, &ann, amount(20, 200), "busy").await;
    stop.store(true, Relaxed);
    for lister in listers {
        lister.await.unwrap();
    }
    let case = "hostile listers";
    report(case, "lists answered meanwhile", lists.load(Relaxed));
    report(case, "chat of another tenant, idle median", format!("{:.1} ms", idle.as_secs_f64() * 1e3));
    report(case, "chat of another tenant, median beside 32 listers", format!("{:.1} ms", busy.as_secs_f64() * 1e3));
    report(case, "ratio", format!("{:.1}", busy.as_secs_f64() / idle.as_secs_f64()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_has_a_limit_and_a_scan_has_a_cursor() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), "default", 300).await;
    let server = ServerProcess::start(dir.path(), &format!("{CONFIG}limits: {{max_offset: 200, max_scan: 100}}\n"));
    let list = async |query: &str| server.get(&format!("/sessions?user=mallory&{query}")).await;
    let refused = list("offset=201").await;
    assert_error(&refused, 400, "invalid", Some("offset"));
    let text = refused.1["error"]["message"].as_str().unwrap();
    assert!(text.contains("max_offset") && text.contains("cursor"), "{text}");
    assert_eq!(list("offset=90&limit=5").await.1["data"].as_array().unwrap().len(), 5);
    assert_error(&list("offset=150&title=absent").await, 400, "invalid", Some("offset"));
    // An absent title: nothing is found, on three pages that each scan a hundred sessions.
    let mut path = "title=absent".to_owned();
    let mut pages = 0;
    loop {
        let (status, body) = list(&path).await;
        assert_eq!((status, &body["data"]), (200, &json!([])), "{body}");
        pages += 1;
        assert!(pages < 10, "it does not end");
        let Some(next) = body["next_cursor"].as_str() else { break };
        path = format!("title=absent&cursor={next}");
    }
    assert!(pages >= 3, "{pages}");
    // An absent tag is one index lookup.
    let absent = list("tag=absent").await.1;
    assert_eq!((&absent["data"], &absent["next_cursor"]), (&json!([]), &Value::Null));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_through_nested_forks_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let forks = amount(60, 2_000);
    {
        let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("tenure.db").display())).await.unwrap();
        let (principal, id) = (Principal::default(), |n: usize| SessionId::new(format!("f{n}")).unwrap());
        tenure.create(&principal, NewSession { id: Some(id(0)), ..NewSession::default() }).await.unwrap();
        tenure.append(&principal, &id(0), vec![Message::user("the ferry")]).await.unwrap();
        for n in 1..forks {
            tenure.fork(&principal, &id(n - 1), Fork::at(Point::Position(1)).id(Some(id(n)))).await.unwrap();
        }
    }
    let server = ServerProcess::start(dir.path(), CONFIG);
    let (start, mut worst, mut pages, mut hits) = (Instant::now(), Duration::ZERO, 0, 0);
    let mut path = "/search?q=ferry&limit=100".to_owned();
    loop {
        let page_start = Instant::now();
        let (status, body) = server.get(&path).await;
        assert_eq!(status, 200, "{body}");
        worst = worst.max(page_start.elapsed());
        hits += body["data"].as_array().unwrap().len();
        pages += 1;
        let Some(next) = body["next_cursor"].as_str() else { break };
        path = format!("/search?q=ferry&limit=100&cursor={next}");
        // The long form reads the first pages only: all of them are two million reads.
        if pages == 20 {
            break;
        }
    }
    // Each fork has the message of the first session, and up to as many ancestors as there are forks.
    assert!(hits > 0 && (pages == 20 || hits == forks), "{hits} found on {pages} pages");
    assert!(pages > 1 || forks <= 100, "the results of one page are bounded");
    report("nested forks", "worst page", format!("{:.0} ms", worst.as_secs_f64() * 1e3));
    report("nested forks", "pages, all together", format!("{pages} in {:.1} s", start.elapsed().as_secs_f64()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_text_is_redacted_in_linear_time() {
    let dir = tempfile::tempdir().unwrap();
    let rule = "redaction: [{name: email, pattern: '[a-z.]+@[a-z.]+[a-z]'}]\n";
    let server = ServerProcess::start(dir.path(), &format!("{CONFIG}{rule}"));
    let time = async |name: &str, bytes: usize| {
        let text = "ann@example.com and [redacted: email] ".repeat(bytes / 38);
        let body = json!({"messages": [{"role": "user", "content": format!("needle {text}")}]});
        let (status, created) = send(server.request("POST", "/sessions").json(&json!({"id": name}))).await;
        assert_eq!(status, 201, "{created}");
        let (status, appended) = send(server.request("POST", &format!("/sessions/{name}/messages")).json(&body)).await;
        assert_eq!(status, 201, "{appended}");
        let start = Instant::now();
        let (status, search_page) = server.get("/search?q=needle&limit=1").await;
        assert_eq!((status, search_page["data"][0]["session_id"].as_str()), (200, Some(name)), "{search_page}");
        assert!(!search_page.to_string().contains("ann@"), "it is redacted");
        start.elapsed()
    };
    time("warm", 1 << 10).await;
    let small = time("small", 256 << 10).await;
    let large = time("large", amount(1 << 20, 4 << 20)).await;
    report("redaction", "256 KB", format!("{:.0} ms", small.as_secs_f64() * 1e3));
    report("redaction", "1 MB (long form: 4 MB)", format!("{:.0} ms", large.as_secs_f64() * 1e3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_do_not_follow_the_number_of_searching_clients() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), "default", 500).await;
    let server = Arc::new(ServerProcess::start(dir.path(), CONFIG));
    let (clients, rounds) = (amount(16, 64), amount(10, 50));
    let mut searching = Vec::new();
    for _ in 0..clients {
        let server = server.clone();
        searching.push(tokio::spawn(async move {
            for _ in 0..rounds {
                let (status, body) = server.get("/search?q=absent").await;
                assert!(status == 200 || status == 429, "{body}");
            }
        }));
    }
    let mut threads = 0;
    while !searching.iter().all(|task| task.is_finished()) {
        threads = threads.max(server.threads());
        tokio::task::yield_now().await;
    }
    for task in searching {
        task.await.unwrap();
    }
    report("searching clients", "clients", clients);
    report("searching clients", "most threads", threads);
    // Workers of the runtime, the blocking threads at their limit, and the threads of the store.
    let workers = std::thread::available_parallelism().unwrap().get();
    assert!(threads <= workers + 32 + 8 + 4, "{threads} threads");
}
