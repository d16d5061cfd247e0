//! The effect of one tenant's requests on the latency of another.

use crate::client::Client;
use crate::servers::{Server, upstream};
use crate::*;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tenure::store::Commit;

const SESSIONS: usize = 200_000;
const LISTERS: usize = 32;

/// Creates a key for a user of a tenant. Returns the value of its `Authorization` header.
fn key(store: &str, tenant: &str, user: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tenure"))
        .args(["--store", store, "keys", "add", "--tenant", tenant, "--user", user])
        .env_remove("TENURE_CONFIG")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn signed(request: &[u8], key: &str) -> Vec<u8> {
    let text = std::str::from_utf8(request).unwrap();
    text.replacen("\r\n", &format!("\r\nauthorization: Bearer {key}\r\n"), 1).into_bytes()
}

async fn chats(client: &mut Client, key: &str, session: &str, count: usize) -> Duration {
    let mut times = Vec::new();
    for n in 0..count {
        let body = format!(
            r#"{{"model":"m","session_id":"{session}","messages":[{{"role":"user","content":"{n} {}"}}]}}"#,
            words(200, n)
        );
        let request = signed(&Client::request("POST", "/v1/chat/completions", &body), key);
        times.push(timed(client.send(&request)).await);
    }
    median(times)
}

/// Chat latency of one tenant while 32 clients of another list 200,000 sessions with a filter that matches nothing,
/// compared with the same chat alone.
pub async fn chat_beside_listers(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    {
        let (store, _) = tenure::store::open(&store).await.unwrap();
        let mut tasks = Vec::new();
        for client_index in 0..64 {
            let store = store.clone();
            tasks.push(tokio::spawn(async move {
                for n in (client_index..SESSIONS).step_by(64) {
                    let user = User::new("mallory").unwrap();
                    let title = Some(format!("Session {n}"));
                    let tags = vec![format!("t{}", n % 10)];
                    let created = SessionCreated { user, title, tags, ..SessionCreated::default() };
                    let record = Record { seq: 1, at: jiff::Timestamp::now(), entry: Entry::created(created) };
                    let key = SessionKey { tenant: Tenant::new("hostile").unwrap(), session: id(&format!("s{n}")) };
                    let head = Session::replay(&key, vec![record.clone()]).unwrap().head().clone();
                    store.commit(&Commit::new(None, vec![record], head)).await.unwrap();
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
    let mallory = key(&store, "hostile", "mallory");
    let ann = key(&store, "acme", "ann");
    let upstream = upstream();
    let server = Server::start(&store, Some(&upstream), &[]);
    let mut client = Client::connect(&server.address).await;
    chats(&mut client, &ann, "warm", 20).await;
    let idle = chats(&mut client, &ann, "idle", 300).await;
    for (filter, path) in [("an absent tag", "/sessions?tag=absent"), ("an absent title", "/sessions?title=absent")] {
        let stop = Arc::new(AtomicBool::new(false));
        let mut listers = Vec::new();
        for _ in 0..LISTERS {
            let address = server.address.clone();
            let stop = stop.clone();
            let request = signed(&Client::request("GET", path, ""), &mallory);
            listers.push(tokio::spawn(async move {
                let mut client = Client::connect(&address).await;
                let mut lists = 0;
                while !stop.load(Ordering::Relaxed) {
                    client.send(&request).await;
                    lists += 1;
                }
                lists
            }));
        }
        let busy = chats(&mut client, &ann, "busy", 300).await;
        stop.store(true, Ordering::Relaxed);
        let mut lists = 0;
        for lister in listers {
            lists += lister.await.unwrap();
        }
        println!("({lists} lists by {filter} meanwhile)");
        report.row(
            format!("chat beside 32 clients of another tenant that list by {filter}, beside alone"),
            ms(busy),
            ms(idle),
            ratio(busy, idle),
            Promise::AtMost(5.0),
        );
    }
}

/// Resident memory after 4,000 recalls by one client with eight concurrent requests, without an embedder.
pub async fn memory_of_recalls(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&format!("sqlite:{}", dir.path().join("ours.db").display()), None, &[]);
    let mut client = Client::connect(&server.address).await;
    for n in 0..500 {
        let body = format!(r#"{{"text":"memory {n}: {}"}}"#, words(400, n));
        client.send(&Client::request("POST", "/memories", &body)).await;
    }
    let before = server.resident();
    let mut tasks = Vec::new();
    for client_index in 0..8 {
        let address = server.address.clone();
        tasks.push(tokio::spawn(async move {
            let mut client = Client::connect(&address).await;
            for n in (client_index..4_000).step_by(8) {
                let path = format!("/memories/search?q={}&limit=20", words(60, n).replace(' ', "+"));
                client.send(&Client::request("GET", &path, "")).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let after = server.resident();
    println!("(resident memory before the recalls: {before:.0} MB)");
    let mb = |m: f64| format!("{m:.0} MB");
    report.row(
        "resident memory after 4,000 recalls, beside 150 MB",
        mb(after),
        mb(150.0),
        after / 150.0,
        Promise::AtMost(1.0),
    );
}
