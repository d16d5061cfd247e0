//! Webhooks: HTTP notifications sent when a session or a run ends.

use crate::clock;
use crate::config::{self, OnExpire, RunsConfig, http_url};
use anyhow::Context;
use jiff::Timestamp;
use reqwest::header::CONTENT_TYPE;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tenure::{Session, Tenant, Tenure, User, maintenance::EndReason, session::Export};

/// Registers a webhook callback for each entry of `on_expire.webhooks`. All of them must succeed before a session
/// expires or is evicted; a failed one is retried.
pub fn install(tenure: &Tenure, config: &OnExpire) -> anyhow::Result<()> {
    for (i, hook) in config.webhooks.iter().enumerate() {
        let webhook = Arc::new(Webhook::new(hook).with_context(|| format!("on_expire.webhooks[{i}]"))?);
        tenure.on_expire(move |session, reason| {
            let webhook = webhook.clone();
            async move { Ok(webhook.notify_session_ended(&session, reason).await?) }
        });
    }
    Ok(())
}

/// Maximum number of attempts to deliver a webhook about a run, and the delay before the second attempt. The delay
/// doubles after each attempt (exponential backoff).
const TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Returns the webhooks that are notified when a run ends (`runs.webhooks`).
pub fn run_hooks(config: &RunsConfig) -> anyhow::Result<Vec<Arc<Webhook>>> {
    let hooks = config.webhooks.iter().enumerate();
    let webhooks =
        hooks.map(|(i, hook)| Webhook::new(hook).with_context(|| format!("runs.webhooks[{i}]")).map(Arc::new));
    webhooks.collect()
}

/// A webhook: a URL that receives notifications by POST.
#[derive(Debug)]
pub struct Webhook {
    client: reqwest::Client,
    url: reqwest::Url,
    /// Key of the keyed BLAKE3 hash that signs the body. `None` means that deliveries are not signed.
    key: Option<[u8; 32]>,
}

impl Webhook {
    fn new(hook: &config::WebhookConfig) -> anyhow::Result<Self> {
        let url = http_url("url", &hook.url)?;
        let key = hook.secret()?.map(|secret| *blake3::hash(secret.as_bytes()).as_bytes());
        let timeout = hook.timeout.duration().context("timeout: must be finite")?;
        let client =
            crate::http_client::client().timeout(timeout).redirect(reqwest::redirect::Policy::none()).build()?;
        Ok(Self { client, url, key })
    }

    async fn notify_session_ended(&self, session: &Session, reason: EndReason) -> Result<(), String> {
        self.send(session_ended(session, reason).map_err(|e| e.to_string())?).await
    }

    /// Delivers a body, with at most `TRIES` attempts and exponential backoff. A final failure is only logged.
    pub async fn deliver_with_retries(&self, body: String) {
        let mut pause = FIRST_PAUSE;
        for _ in 1..TRIES {
            match self.send(body.clone()).await {
                Ok(()) => return,
                Err(reason) => tracing::warn!(reason, "webhook delivery failed; retrying"),
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        if let Err(reason) = self.send(body).await {
            tracing::error!(reason, "webhook delivery failed; no attempts left");
        }
    }

    async fn send(&self, body: String) -> Result<(), String> {
        let mut request = self.client.post(self.url.clone()).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            let signature = blake3::keyed_hash(key, body.as_bytes()).to_hex();
            request = request.header("X-Tenure-Signature", format!("blake3={signature}"));
        }
        // Errors name only the host: the URL may contain a secret.
        let host = self.url.host_str().unwrap_or_default();
        match request.body(body).send().await {
            Ok(response) if response.status().is_success() => Ok(()),
            Ok(response) => Err(format!("the webhook at {host} responded with status {}", response.status().as_u16())),
            Err(e) if e.is_timeout() => Err(format!("the webhook at {host} timed out")),
            Err(e) => Err(format!("could not reach the webhook at {host}: {}", crate::http_client::error_chain(&e))),
        }
    }
}

/// Payload of the notification that a session has ended.
#[derive(Serialize)]
struct SessionEndedEvent<'a> {
    event: &'static str,
    id: String,
    at: Timestamp,
    tenant: &'a Tenant,
    user: &'a User,
    session: Export,
}

fn session_ended(session: &Session, reason: EndReason) -> serde_json::Result<String> {
    let event = match reason {
        EndReason::Expired => "session.expired",
        EndReason::Evicted => "session.evicted",
        _ => "session.ended",
    };
    let id = delivery_id(session, event);
    let at = clock::now();
    // Serialized directly to text, so that messages are sent byte for byte.
    let tenant = &session.head().tenant;
    let user = &session.head().user;
    serde_json::to_string(&SessionEndedEvent { event, id, at, tenant, user, session: Export::from(session.clone()) })
}

/// Returns the delivery id for deduplication by the receiver: the same for every attempt to report one end of a
/// session, different when the session ends again later.
fn delivery_id(session: &Session, event: &str) -> String {
    let mut hash = blake3::Hasher::new();
    let times = format!("{} {}", session.head().active_at, session.head().status_at);
    for part in [session.head().tenant.as_str(), session.head().info.session_id.as_str(), event, &times] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("end_{}", &hash.finalize().to_hex()[..32])
}
