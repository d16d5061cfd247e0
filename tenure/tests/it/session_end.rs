//! Tools are notified of every way in which a session ends.

use async_trait::async_trait;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::{run::*, session::*, *};

/// Tools that record the sessions that have ended.
#[derive(Default)]
struct EndedSessions(Mutex<Vec<String>>);

#[async_trait]
impl Tools for EndedSessions {
    async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        Ok(Vec::new())
    }

    async fn call(&self, _: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        Err(ToolError::NotCalled(format!("unknown tool {:?}", call.tool)))
    }

    async fn end(&self, session: &SessionKey) {
        self.0.lock().unwrap().push(session.session.to_string());
    }
}

#[tokio::test]
async fn deletion_expiry_purge_and_erasure_end_the_tools_of_a_session() {
    let clock = Clock::manual("2026-01-01T00:00:00Z".parse().unwrap());
    let mut options = Options { clock: clock.clone(), ..Options::default() };
    options.policy.ttl = Some(Duration::from_hours(1));
    let tenure = Tenure::open_with("memory:", options).await.unwrap();
    let tools = Arc::new(EndedSessions::default());
    tenure.register_tools(tools.clone());
    let ended = || std::mem::take(&mut *tools.0.lock().unwrap());
    let ada = tenure.user("acme", "ada").unwrap();
    let create = async |id: &str| {
        let new = NewSession { id: Some(SessionId::new(id).unwrap()), ..NewSession::default() };
        ada.create_session_with(new).await.unwrap()
    };

    create("deleted").await.delete().await.unwrap();
    assert_eq!(ended(), ["deleted"]);
    create("purged").await.purge().await.unwrap();
    assert_eq!(ended(), ["purged"]);
    let active = create("active").await;
    active.append(Message::user("hi")).await.unwrap();
    active.append([Message::assistant("hello")]).await.unwrap();
    assert_eq!(ended(), [""; 0], "an active session keeps its tools");
    create("expired").await;
    clock.advance(jiff::SignedDuration::from_hours(2));
    tenure.sweep().await.unwrap();
    let mut expired = ended();
    expired.sort();
    assert_eq!(expired, ["active", "expired"]);
    create("erased").await;
    let admin = Principal::tenant_wide("acme").unwrap();
    tenure.erase(&admin, &ada.principal().user).await.unwrap();
    assert!(ended().contains(&"erased".to_owned()));
}
