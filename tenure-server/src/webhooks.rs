//! The end of sessions: the sweep, and what is told before a session goes.

use crate::clock::{self, Stopwatch};
use crate::config::{Config, Webhook, http_url};
use crate::serve::App;
use anyhow::Context;
use jiff::Timestamp;
use reqwest::header::CONTENT_TYPE;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tenure::{Ending, Export, Session, Tenant, Tenure, User};

/// A sweep that did not go well is repeated after so long; nothing sweeps more often, unless there is more to do at once.
const SOON: Duration = Duration::from_secs(60);
/// However long sessions live, the sweep comes by after so long.
const AT_LEAST: Duration = Duration::from_secs(3600);

/// Sets up who is told when a session ends. All of it must succeed before a session goes; what failed is tried again.
pub fn install(tenure: &Tenure, config: &Config) -> anyhow::Result<()> {
    if let Some(workspaces) = crate::workspace::Workspaces::new(config)? {
        workspaces.install(tenure);
    }
    for (i, hook) in config.on_expire.webhooks.iter().enumerate() {
        let receiver = Arc::new(Receiver::new(hook).with_context(|| format!("on_expire.webhooks[{i}]"))?);
        tenure.on_expire(move |session, why| {
            let receiver = receiver.clone();
            async move { receiver.tell(&session, why).await }
        });
    }
    Ok(())
}

/// How often a web hook about a run is tried, and how long it waits before the second time; each time twice as long.
const TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Those who are told when a run ends.
pub fn run_hooks(config: &Config) -> anyhow::Result<Vec<Arc<Receiver>>> {
    let hooks = config.runs.webhooks.iter().enumerate();
    let made = hooks.map(|(i, hook)| Receiver::new(hook).with_context(|| format!("runs.webhooks[{i}]")).map(Arc::new));
    made.collect()
}

/// Who is told by a web hook.
#[derive(Debug)]
pub struct Receiver {
    client: reqwest::Client,
    url: reqwest::Url,
    /// Signs the body.
    key: Option<[u8; 32]>,
}

impl Receiver {
    fn new(hook: &Webhook) -> anyhow::Result<Self> {
        let url = http_url("url", &hook.url)?;
        let key = hook.secret()?.map(|secret| *blake3::hash(secret.as_bytes()).as_bytes());
        let timeout = hook.timeout.duration().context("timeout: it must end some time")?;
        let client =
            crate::http_client::client().timeout(timeout).redirect(reqwest::redirect::Policy::none()).build()?;
        Ok(Self { client, url, key })
    }

    async fn tell(&self, session: &Session, why: Ending) -> Result<(), String> {
        self.send(story(session, why).map_err(|e| e.to_string())?).await
    }

    /// Tells until it is heard, for a while.
    pub async fn insist(&self, body: String) {
        let mut pause = FIRST_PAUSE;
        for _ in 1..TRIES {
            match self.send(body.clone()).await {
                Ok(()) => return,
                Err(why) => tracing::warn!(why, "a web hook is tried again"),
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        if let Err(why) = self.send(body).await {
            tracing::error!(why, "a web hook is given up");
        }
    }

    async fn send(&self, body: String) -> Result<(), String> {
        let mut request = self.client.post(self.url.clone()).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            let signature = blake3::keyed_hash(key, body.as_bytes()).to_hex();
            request = request.header("X-Tenure-Signature", format!("blake3={signature}"));
        }
        // Its address may hold a secret.
        let host = self.url.host_str().unwrap_or_default();
        match request.body(body).send().await {
            Ok(response) if response.status().is_success() => Ok(()),
            Ok(response) => Err(format!("the web hook at {host} answered {}", response.status().as_u16())),
            Err(e) if e.is_timeout() => Err(format!("the web hook at {host} did not answer in time")),
            Err(e) => {
                Err(format!("the web hook at {host} can not be reached: {}", crate::http_client::error_chain(&e)))
            }
        }
    }
}

/// What a web hook is told.
#[derive(Serialize)]
struct Story<'a> {
    event: &'static str,
    id: String,
    at: Timestamp,
    tenant: &'a Tenant,
    user: &'a User,
    session: Export,
}

fn story(session: &Session, why: Ending) -> serde_json::Result<String> {
    let event = match why {
        Ending::Expired => "session.expired",
        Ending::Evicted => "session.evicted",
    };
    let (id, at) = (delivery_id(session, event), clock::now());
    // Straight to text: messages are told byte for byte.
    let (tenant, user) = (&session.tenant, &session.user);
    serde_json::to_string(&Story { event, id, at, tenant, user, session: Export::from(session.clone()) })
}

/// The same for every attempt to tell of one ending; another for the next time that the session ends.
fn delivery_id(session: &Session, event: &str) -> String {
    let mut hash = blake3::Hasher::new();
    let times = format!("{} {}", session.active_at, session.status_at);
    for part in [session.tenant.as_str(), session.info.session_id.as_str(), event, &times] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("end_{}", &hash.finalize().to_hex()[..32])
}

/// When to sweep next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Again {
    AtOnce,
    Soon,
    InTime,
}

/// Sweeps until the server stops: every quarter of the shortest time to live, at most hourly, at least each minute.
pub async fn sweep_for_ever(app: &App) {
    loop {
        // What is broken off by a stop is begun again after it.
        let again = tokio::select! {
            again = sweep(&app.tenure) => again,
            () = app.tasks.stopping() => return,
        };
        let watch = Stopwatch::start();
        loop {
            // Asked each minute: an assistant with a short time to live may have been made since.
            let wait = match again {
                Again::AtOnce => Duration::from_millis(100),
                Again::Soon => SOON,
                Again::InTime => pause(&app.tenure),
            };
            let left = wait.saturating_sub(watch.elapsed());
            if left.is_zero() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(SOON)) => {}
                () = app.tasks.stopping() => return,
            }
        }
    }
}

fn pause(tenure: &Tenure) -> Duration {
    (tenure.shortest_ttl().unwrap_or(Duration::MAX) / 4).clamp(SOON, AT_LEAST)
}

/// One pass.
async fn sweep(tenure: &Tenure) -> Again {
    let watch = Stopwatch::start();
    match tenure.sweep().await {
        Ok(report) => {
            crate::observability::metrics::sweep(&report, watch.elapsed());
            let (expired, evicted, purged) = (report.expired.len(), report.evicted.len(), report.purged.len());
            let failed = report.failed.len();
            if expired + evicted + purged + failed > 0 {
                tracing::info!(expired, evicted, purged, failed, "swept");
            }
            for (key, why) in &report.failed {
                tracing::warn!(session_id = %key.session, why, "a session could not be swept; it is tried again");
            }
            match expired + evicted + purged + report.items > 0 || failed == 0 {
                true if report.more => Again::AtOnce,
                _ if failed > 0 => Again::Soon,
                _ => Again::InTime,
            }
        }
        Err(e) => {
            tracing::warn!(error = %e, "the sweep failed; it is tried again");
            Again::Soon
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenure::{Assistant, Principal, Reach};

    #[tokio::test]
    async fn an_assistant_made_later_makes_the_sweep_come_sooner() {
        let tenure = Tenure::open("memory:").await.unwrap();
        assert_eq!(pause(&tenure), AT_LEAST);
        let minutes = |m: u64| Duration::from_secs(m * 60);
        for (ttl, want) in [("2h", minutes(30)), ("20m", minutes(5)), ("1s", SOON)] {
            let mut assistant = Assistant { name: format!("a-{ttl}"), ..Assistant::default() };
            assistant.sessions.ttl = Some(ttl.parse().unwrap());
            let who = Principal { reach: Reach::Tenant, ..Principal::default() };
            tenure.put_assistant(&who, assistant).await.unwrap();
            assert_eq!(pause(&tenure), want);
        }
    }

    #[test]
    fn what_can_not_work_is_told_at_once() {
        let install = |yaml: &str| {
            Config::parse(yaml).and_then(|config| {
                let tenure = Tenure::on(Arc::new(tenure::store::MemoryStore::new()), config.options());
                super::install(&tenure, &config)
            })
        };
        for (yaml, want) in [
            ("on_expire: {webhooks: [{url: nowhere}]}", "on_expire.webhooks[0].url"),
            ("on_expire: {webhooks: [{url: 'ftp://x/'}]}", "http://"),
            ("on_expire: {webhooks: [{url: 'http://x/', timeout: never}]}", "timeout"),
            ("on_expire: {webhooks: [{url: 'http://x/', secret_env: NOT_SET_ANYWHERE}]}", "NOT_SET_ANYWHERE"),
            ("workspaces: {root: /dev/null/y}", "workspaces.root: can not use /dev/null/y"),
            ("workspaces: {rot: y}", "did you mean `root`"),
            ("cors: {origins: ['*']}", "cors.origins[0]"),
            ("cors: {origins: ['https://a.b/']}", "\"https://a.b\""),
            ("telemetry: {otlp: collector}", "telemetry.otlp"),
            ("limits: {max_connections: 0}", "max_connections"),
        ] {
            let error = format!("{:#}", install(yaml).unwrap_err());
            assert!(error.contains(want), "{yaml}: {error}");
        }
    }
}
