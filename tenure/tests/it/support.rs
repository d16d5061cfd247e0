//! What the library's integration tests share, on top of `tenure::testing`: one test per store, the
//! assistant `clerk`, its turns, and readable forms of a session.

use base64::Engine;
use serde_json::json;
pub use tenure::testing::*;
use tenure::{policy::*, review::*, run::*, session::*, *};

/// Expands each case into one test per store.
#[macro_export]
macro_rules! on_every_store {
    ($($(#[doc = $doc:literal])* async fn $name:ident($test:ident: &mut TestTenure) $body:block)*) => {$(
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::support::StoreKind;

            async fn case($test: &mut $crate::support::TestTenure) $body

            async fn on(kind: StoreKind) {
                if let Some(mut test) = $crate::support::TestTenure::new(kind).await {
                    case(&mut test).await;
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn memory() { on(StoreKind::Memory).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn jsonl() { on(StoreKind::Jsonl).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite() { on(StoreKind::Sqlite).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { on(StoreKind::Postgres).await }
        }
    )*};
}

pub fn ada() -> Principal {
    Principal::new("acme", "ada").unwrap()
}

pub fn admin() -> Principal {
    Principal::tenant_wide("acme").unwrap()
}

pub fn id(s: &str) -> SessionId {
    SessionId::new(s).unwrap()
}

pub fn new_session(s: &str) -> NewSession {
    NewSession { id: Some(id(s)), ..NewSession::default() }
}

pub fn texts(session: &Session) -> Vec<String> {
    session.messages.iter().map(|m| m.message.as_str().to_owned()).collect()
}

pub fn raw(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|m| m.as_str().to_owned()).collect()
}

pub fn labels(session: &Session) -> Vec<(String, usize)> {
    session.checkpoints.iter().map(|c| (c.label.to_string(), c.position)).collect()
}

/// The assistant of these tests, with a modified configuration.
pub fn clerk(change: impl FnOnce(&mut Assistant)) -> Assistant {
    let mut clerk = Assistant { name: "clerk".to_owned(), ..Assistant::default() };
    change(&mut clerk);
    clerk
}

pub fn reviewed(tool: &str) -> ReviewRule {
    ReviewRule { tool: tool.to_owned(), condition: None, queue: None, timeout: None, on_timeout: Decision::Rejected }
}

/// The parameters of a run that can be taken over.
pub fn resumable() -> Option<Resumable> {
    Some(Resumable::new("m"))
}

/// A question to the clerk in session `x`.
pub fn question(text: &str) -> TurnRequest {
    TurnRequest {
        session: Some(id("x")),
        messages: vec![Message::user(text)],
        history: Some(HistoryMode::Append),
        assistant: Some("clerk".to_owned()),
        resumable: resumable(),
        ..TurnRequest::default()
    }
}

pub async fn begin(tenure: &Tenure, ask: TurnRequest) -> Result<Box<OpenRun>> {
    match tenure.begin_turn(&ada(), ask).await? {
        TurnStart::Run(turn) => Ok(turn),
        TurnStart::AlreadyAnswered { .. } => panic!("the request was already answered"),
    }
}

/// Executes a turn to its end.
pub async fn execute(turn: OpenRun, model: &ScriptedModel, tools: &CountingTools) -> Result<TurnOutcome, TurnError> {
    turn.execute(Executors::new(model).tools(tools)).await
}

/// Begins a turn and executes it to its end.
pub async fn run_turn(
    tenure: &Tenure,
    ask: TurnRequest,
    model: &ScriptedModel,
    tools: &CountingTools,
) -> Result<TurnOutcome, TurnError> {
    let turn = begin(tenure, ask).await?;
    execute(*turn, model, tools).await
}

/// Takes over all orphaned runs and executes them.
pub async fn take_over(
    tenure: &Tenure,
    model: &ScriptedModel,
    tools: &CountingTools,
) -> Vec<Result<TurnOutcome, TurnError>> {
    let mut done = Vec::new();
    for head in tenure.find_orphaned_runs(16).await.unwrap() {
        if let Some(turn) = tenure.claim_orphaned_run(&head).await.unwrap() {
            done.push(execute(turn, model, tools).await);
        }
    }
    done
}

/// The session `x`.
pub async fn session_x(tenure: &Tenure) -> Session {
    tenure.load(&ada(), &id("x")).await.unwrap()
}

/// Roles and texts of a session's messages.
pub fn conversation(session: &Session) -> Vec<String> {
    let text = |m: &StoredMessage| match m.message.tool_calls() {
        calls if calls.is_empty() => format!("{}: {}", role(&m.message), m.message.text()),
        calls => format!("calls: {}", calls.iter().map(|c| c.id.as_str()).collect::<Vec<_>>().join(" ")),
    };
    session.messages.iter().map(text).collect()
}

fn role(message: &Message) -> String {
    message.to_value()["role"].as_str().unwrap().to_owned()
}

/// Outcome and code of the session's last run.
pub fn ending(session: &Session) -> (Option<RunOutcome>, Option<String>) {
    let run = session.runs.last().unwrap();
    (run.ended.map(|(_, outcome)| outcome), run.code.clone())
}

/// The ids of the open reviews.
pub fn open(session: &Session) -> Vec<ReviewId> {
    session.open_reviews().map(|r| r.opened.review.clone()).collect()
}

pub fn review_input(decision: Decision) -> ReviewInput {
    ReviewInput { decision, reviewer: "eve".to_owned(), notes: None, arguments: None, choice: None }
}

/// Counts the occurrences of a text in the files of a store by a byte scan, including base64, or in
/// the rows of PostgreSQL. A store in memory has none.
pub async fn count_in_store(test: &TestTenure, text: &str) -> usize {
    if let Some(schema) = test.store.schema() {
        return count_in_rows(schema, text).await;
    }
    let Some(directory) = test.directory() else { return 0 };
    let escaped = json!(text).to_string();
    let base64 = base64::engine::general_purpose::STANDARD.encode(text);
    let patterns =
        [text.as_bytes(), escaped.trim_matches('"').as_bytes(), &base64.as_bytes()[..base64.len().min(20) / 4 * 4 - 4]];
    let mut matches_found = 0;
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() {
                directories.push(entry);
                continue;
            }
            let bytes = std::fs::read(&entry).unwrap();
            let hits = patterns.iter().filter(|n| bytes.windows(n.len()).any(|w| w == **n)).count();
            if hits > 0 {
                eprintln!("{} contains the text", entry.display());
            }
            matches_found += hits;
        }
    }
    matches_found
}

async fn count_in_rows(schema: &PostgresSchema, text: &str) -> usize {
    let (client, connection) = tokio_postgres::connect(schema.server(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let tables = "select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                  where n.nspname = $1 and c.relkind = 'r'";
    let mut matches_found = 0;
    for row in client.query(tables, &[&schema.name()]).await.unwrap() {
        let table: String = row.get(0);
        let hits = format!(
            "select count(*) from {}.{table} t where t::text like '%' || $1 || '%' or t::text like '%' || $2 || '%'",
            schema.name()
        );
        let hex: String = text.bytes().map(|b| format!("{b:02x}")).collect();
        matches_found += client.query_one(&hits, &[&text, &hex]).await.unwrap().get::<_, i64>(0) as usize;
    }
    matches_found
}
