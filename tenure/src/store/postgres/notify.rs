//! Change notifications between nodes, with `NOTIFY`. They are hints: losing one loses no data.
//!
//! A notification is sent after the commit that it announces, in its own transaction: inside the
//! commit, it would serialize all commits of the database (D-037). Changes that occur while a
//! notification is being sent are batched into the next one.

use super::hosts::Hosts;
use super::url::{Prepare, Settings};
use crate::store::postgres::connection::PgConnection;
use crate::store::postgres::failure::FailureKind;
use crate::types::id::{SessionId, SessionKey, Tenant};
use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::broadcast;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Connection};

/// The notification channel. All stores of a database share it; the payload contains the schema.
const CHANNEL: &str = "tenure";
/// Minimum time between two notifications; changes in between are batched.
const PAUSE: Duration = Duration::from_millis(10);
/// Delay before reconnecting after the connection was lost.
const RECONNECT: Duration = Duration::from_secs(1);
/// Maximum time for the server to confirm LISTEN.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Capacity of the channel to subscribers. A subscriber that falls further behind misses
/// notifications.
const QUEUE: usize = 4096;

/// The notifier: sends change notifications, and distributes received ones to subscribers.
pub(super) struct Notifier {
    hosts: Arc<Hosts>,
    schema: Option<String>,
    prepare: Prepare,
    /// The id of this sender, by which it ignores its own notifications.
    name: String,
    heard: broadcast::Sender<Option<SessionKey>>,
    listener: Mutex<Option<AbortHandle>>,
    untold: Arc<Mutex<PendingNotices>>,
}

/// Changes that have not been announced yet.
#[derive(Default)]
struct PendingNotices {
    keys: HashSet<SessionKey>,
    /// Whether a task is sending notifications.
    telling: bool,
}

impl Notifier {
    pub fn new(settings: &Settings, hosts: Arc<Hosts>) -> Self {
        let (schema, prepare) = (settings.schema.clone(), settings.prepare);
        let (name, heard) = (uuid::Uuid::now_v7().simple().to_string(), broadcast::channel(QUEUE).0);
        Self { hosts, schema, prepare, name, heard, listener: Mutex::default(), untold: Arc::default() }
    }

    /// Queues a notification. At most one task sends at a time; it ends when the queue is empty.
    #[expect(clippy::disallowed_methods, reason = "a hint that is lost when the server stops is no loss")]
    pub fn tell(&self, link: &Arc<PgConnection>, key: &SessionKey) {
        let mut untold = lock(&self.untold);
        untold.keys.insert(key.clone());
        if !std::mem::replace(&mut untold.telling, true) {
            let (link, untold, from) = (link.clone(), self.untold.clone(), self.from());
            tokio::spawn(async move { tell_all(&link, &untold, &from).await });
        }
    }

    /// Subscribes, and connects on the first call. Returns `None` behind a pooler in transaction
    /// mode, which provides no connection to listen on.
    #[expect(clippy::disallowed_methods, reason = "it ends with the store")]
    pub fn hear(&self) -> Option<broadcast::Receiver<Option<SessionKey>>> {
        if self.prepare == Prepare::Never {
            return None;
        }
        let mut listener = lock(&self.listener);
        if listener.is_none() {
            let (hosts, heard, from) = (self.hosts.clone(), self.heard.clone(), self.from());
            *listener = Some(tokio::spawn(async move { listen(&hosts, &heard, &from).await }).abort_handle());
        }
        Some(self.heard.subscribe())
    }

    fn from(&self) -> [String; 2] {
        [self.schema.clone().unwrap_or_default(), self.name.clone()]
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if let Some(listener) = lock(&self.listener).take() {
            listener.abort();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Sends queued notifications until there are none. A failure is only logged.
async fn tell_all(link: &PgConnection, untold: &Mutex<PendingNotices>, [schema, name]: &[String; 2]) {
    // Notifications need not be durable.
    let sql = "SELECT pg_notify($1, told), set_config('synchronous_commit', 'off', true) FROM unnest($2) AS told";
    loop {
        let keys = {
            let mut untold = lock(untold);
            if untold.keys.is_empty() {
                untold.telling = false;
                return;
            }
            std::mem::take(&mut untold.keys)
        };
        let told = keys.iter().map(|key| serde_json::json!([schema, name, key.tenant, key.session]).to_string());
        let told: Vec<String> = told.collect();
        if let Err(e) = link.once(sql, &[(&CHANNEL, Type::TEXT), (&told, Type::TEXT_ARRAY)]).await {
            tracing::debug!(error = ?e, "other nodes were not told of a change; they look after a while");
        }
        sleep(PAUSE).await;
    }
}

/// Listens until the store is dropped. After a failover the old connection is closed, because it
/// may stay silent forever.
async fn listen(hosts: &Hosts, heard: &broadcast::Sender<Option<SessionKey>>, from: &[String; 2]) {
    loop {
        let ended = match hosts.connect().await {
            Ok((client, connection)) => {
                let since = hosts.generation();
                tokio::select! {
                    ended = take_in(&client, connection, heard, from) => ended,
                    () = hosts.changed(since) => Err(FailureKind::Lost("another host has become the primary".to_owned())),
                }
            }
            Err(fail) => Err(fail),
        };
        if let Err(e) = ended {
            tracing::debug!(error = ?e, "not listening to other nodes; trying again");
        }
        sleep(RECONNECT).await;
    }
}

/// Listens on a connection until it ends.
async fn take_in<S, T>(
    client: &Client,
    mut connection: Connection<S, T>,
    heard: &broadcast::Sender<Option<SessionKey>>,
    from: &[String; 2],
) -> Result<(), FailureKind>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let sql = format!("LISTEN {CHANNEL}");
    let asked = client.batch_execute(&sql);
    let silent = sleep(LISTEN_TIMEOUT);
    tokio::pin!(asked, silent);
    let mut listening = false;
    loop {
        tokio::select! {
            () = &mut silent, if !listening => return Err(FailureKind::Lost("no answer to LISTEN".to_owned())),
            done = &mut asked, if !listening => {
                done?;
                listening = true;
                // Earlier notifications may have been missed: report a gap. A send without
                // subscribers is not an error.
                let _ = heard.send(None);
            }
            message = poll_fn(|cx| connection.poll_message(cx)) => match message {
                None => return Ok(()),
                Some(Ok(AsyncMessage::Notification(note))) => {
                    if let Some(key) = news(note.payload(), from) {
                        let _ = heard.send(Some(key));
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(e)) => return Err(e.into()),
            },
        }
    }
}

/// Parses a notification of another sender for this schema. Any other payload is ignored.
fn news(payload: &str, [schema, name]: &[String; 2]) -> Option<SessionKey> {
    let [theirs, who, tenant, session]: [String; 4] = serde_json::from_str(payload).ok()?;
    let told = theirs == *schema && who != *name;
    told.then(|| Some(SessionKey { tenant: Tenant::new(tenant).ok()?, session: SessionId::new(session).ok()? }))?
}
