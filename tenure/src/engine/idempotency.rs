//! Idempotency keys. A request with a known key and an equal body is not executed again: its stored reply is
//! returned (D-047). A different body is an error. Keys expire after 24 hours.

use crate::engine::core::Engine;
use crate::store::item::{Item, Namespace};
use crate::types::error::{Error, Result};
use jiff::{SignedDuration, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Lifetime of an idempotency key.
const KEY_TTL: SignedDuration = SignedDuration::from_hours(24);

/// The stored form of a used idempotency key.
#[derive(Serialize, Deserialize)]
struct IdempotencyRecord<T> {
    /// The request body, or its digest, that the key was used with.
    body: String,
    /// The reply to the request.
    reply: T,
}

impl Engine {
    /// Returns the reply to an earlier request with this key. `None` if there is none or it has
    /// expired; [`Error::KeyReused`] if that request had a different body.
    pub(crate) async fn find_reply<T: DeserializeOwned>(
        &self,
        namespace: &Namespace,
        key: &str,
        body: &str,
    ) -> Result<Option<T>> {
        let Some(item) = self.store().get(namespace, key, None).await? else { return Ok(None) };
        if item.is_expired(self.now()) {
            return Ok(None);
        }
        let record: IdempotencyRecord<T> = serde_json::from_str(&item.value)
            .map_err(|e| Error::corrupt_from(format!("idempotency key {key:?}"), e))?;
        if record.body != body {
            return Err(Error::KeyReused { key: key.to_owned() });
        }
        Ok(Some(record.reply))
    }
}

/// Creates the item that stores the reply to a request under its key.
pub(crate) fn reply_item<T: Serialize>(key: &str, body: &str, reply: &T, now: Timestamp) -> Item {
    let record = IdempotencyRecord { body: body.to_owned(), reply };
    expiring_item(key, serde_json::to_string(&record).expect("replies serialize to JSON"), now)
}

/// Creates an item that expires together with an idempotency key that is stored now.
pub(crate) fn expiring_item(key: &str, value: String, now: Timestamp) -> Item {
    Item { expires_at: now.checked_add(KEY_TTL).ok(), ..Item::new(key, value, now) }
}
