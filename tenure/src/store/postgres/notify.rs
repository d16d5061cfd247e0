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
const NOTIFY_INTERVAL: Duration = Duration::from_millis(10);
/// Delay before reconnecting after the connection was lost.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);
/// Maximum time for the server to confirm LISTEN.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Capacity of the channel to subscribers. A subscriber that falls further behind misses
/// notifications.
const QUEUE_CAPACITY: usize = 4096;

/// The notifier: sends change notifications, and distributes received ones to subscribers.
pub(super) struct PgNotifier {
    hosts: Arc<Hosts>,
    schema: Option<String>,
    prepare: Prepare,
    /// The id of this sender, by which it ignores its own notifications.
    sender_id: String,
    received: broadcast::Sender<Option<SessionKey>>,
    listener: Mutex<Option<AbortHandle>>,
    pending: Arc<Mutex<PendingNotices>>,
}

/// Changes that have not been announced yet.
#[derive(Default)]
struct PendingNotices {
    keys: HashSet<SessionKey>,
    /// Whether a task is sending notifications.
    is_sending: bool,
}

impl PgNotifier {
    pub fn new(settings: &Settings, hosts: Arc<Hosts>) -> Self {
        let schema = settings.schema.clone();
        let prepare = settings.prepare;
        let sender_id = uuid::Uuid::now_v7().simple().to_string();
        let received = broadcast::channel(QUEUE_CAPACITY).0;
        Self { hosts, schema, prepare, sender_id, received, listener: Mutex::default(), pending: Arc::default() }
    }

    /// Queues a notification. At most one task sends at a time; it ends when the queue is empty.
    #[expect(clippy::disallowed_methods, reason = "notifications are best effort and may be lost on shutdown")]
    pub fn notify(&self, connection: &Arc<PgConnection>, key: &SessionKey) {
        let mut pending = lock(&self.pending);
        pending.keys.insert(key.clone());
        if !std::mem::replace(&mut pending.is_sending, true) {
            let connection = connection.clone();
            let pending = self.pending.clone();
            let source = self.source();
            tokio::spawn(async move { send_pending(&connection, &pending, &source).await });
        }
    }

    /// Subscribes, and connects on the first call. Returns `None` behind a pooler in transaction
    /// mode, which provides no connection to listen on.
    #[expect(clippy::disallowed_methods, reason = "it ends with the store")]
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Option<SessionKey>>> {
        if self.prepare == Prepare::Never {
            return None;
        }
        let mut listener = lock(&self.listener);
        if listener.is_none() {
            let hosts = self.hosts.clone();
            let received = self.received.clone();
            let source = self.source();
            *listener = Some(tokio::spawn(async move { listen(&hosts, &received, &source).await }).abort_handle());
        }
        Some(self.received.subscribe())
    }

    fn source(&self) -> [String; 2] {
        [self.schema.clone().unwrap_or_default(), self.sender_id.clone()]
    }
}

impl Drop for PgNotifier {
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
async fn send_pending(connection: &PgConnection, pending: &Mutex<PendingNotices>, [schema, sender_id]: &[String; 2]) {
    // Notifications need not be durable.
    let sql = "SELECT pg_notify($1, payload), set_config('synchronous_commit', 'off', true) FROM unnest($2) AS payload";
    loop {
        let keys = {
            let mut pending = lock(pending);
            if pending.keys.is_empty() {
                pending.is_sending = false;
                return;
            }
            std::mem::take(&mut pending.keys)
        };
        let payloads =
            keys.iter().map(|key| serde_json::json!([schema, sender_id, key.tenant, key.session]).to_string());
        let payloads: Vec<String> = payloads.collect();
        if let Err(e) = connection.rows_once(sql, &[(&CHANNEL, Type::TEXT), (&payloads, Type::TEXT_ARRAY)]).await {
            tracing::debug!(error = ?e, "could not notify other nodes of a change; they poll");
        }
        sleep(NOTIFY_INTERVAL).await;
    }
}

/// Listens until the store is dropped. After a failover the old connection is closed, because it
/// may stay silent forever.
async fn listen(hosts: &Hosts, received: &broadcast::Sender<Option<SessionKey>>, source: &[String; 2]) {
    loop {
        let outcome = match hosts.connect().await {
            Ok((client, connection)) => {
                let generation = hosts.generation();
                tokio::select! {
                    outcome = listen_on(&client, connection, received, source) => outcome,
                    () = hosts.wait_for_failover(generation) => Err(FailureKind::lost("another host has become the primary")),
                }
            }
            Err(failure) => Err(failure),
        };
        if let Err(e) = outcome {
            tracing::debug!(error = ?e, "not listening for notifications of other nodes; reconnecting");
        }
        sleep(RECONNECT_DELAY).await;
    }
}

/// Listens on a connection until it ends.
async fn listen_on<S, T>(
    client: &Client,
    mut connection: Connection<S, T>,
    received: &broadcast::Sender<Option<SessionKey>>,
    source: &[String; 2],
) -> Result<(), FailureKind>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let sql = format!("LISTEN {CHANNEL}");
    let listen_statement = client.batch_execute(&sql);
    let listen_timeout = sleep(LISTEN_TIMEOUT);
    tokio::pin!(listen_statement, listen_timeout);
    let mut is_listening = false;
    loop {
        tokio::select! {
            () = &mut listen_timeout, if !is_listening => return Err(FailureKind::lost("timeout: no response to LISTEN")),
            outcome = &mut listen_statement, if !is_listening => {
                outcome?;
                is_listening = true;
                // Earlier notifications may have been missed: report a gap. A send without
                // subscribers is not an error.
                let _ = received.send(None);
            }
            message = poll_fn(|cx| connection.poll_message(cx)) => match message {
                None => return Ok(()),
                Some(Ok(AsyncMessage::Notification(notification))) => {
                    if let Some(key) = parse_notification(notification.payload(), source) {
                        let _ = received.send(Some(key));
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(e)) => return Err(e.into()),
            },
        }
    }
}

/// Parses a notification of another sender for this schema. Any other payload is ignored.
fn parse_notification(payload: &str, [schema, sender_id]: &[String; 2]) -> Option<SessionKey> {
    let [payload_schema, payload_sender, tenant, session]: [String; 4] = serde_json::from_str(payload).ok()?;
    let is_relevant = payload_schema == *schema && payload_sender != *sender_id;
    is_relevant
        .then(|| Some(SessionKey { tenant: Tenant::new(tenant).ok()?, session: SessionId::new(session).ok()? }))?
}
