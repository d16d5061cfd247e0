//! Index cards: finding and reading them.

use super::Done;
use super::file::File;
use crate::error::{Error, Result};
use crate::head::{Head, Status};
use crate::id::{Key, Seq, SessionId, Tenant};
use crate::store::{Glance, Order, Query, Whose};
use jiff::Timestamp;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params_from_iter};
use std::fmt::Display;

/// A card as it is stored.
pub(super) fn encode(head: &Head) -> String {
    head.to_json()
}

/// A card as it was stored.
pub(super) fn decode(file: &File, tenant: impl Display, session: impl Display, card: &str) -> Result<Head> {
    serde_json::from_str(card).map_err(|e| Error::corrupt(format!("{file}, head of session {tenant}/{session}"), e))
}

pub(super) fn head(conn: &Connection, file: &File, key: &Key) -> Done<Option<Head>> {
    match glance(conn, file, key, "")? {
        Glance::Now(head) => Ok(head.map(|head| *head)),
        Glance::Same => Ok(None),
    }
}

/// The card, unless it is the same text as the one that is known.
pub(super) fn glance(conn: &Connection, file: &File, key: &Key, known: &str) -> Done<Glance> {
    let mut find = conn.prepare_cached("SELECT card FROM head WHERE tenant = ?1 AND session = ?2")?;
    let mut rows = find.query([key.tenant.as_str(), key.session.as_str()])?;
    let Some(row) = rows.next()? else { return Ok(Glance::Now(None)) };
    let card = row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?;
    if card == known && !known.is_empty() {
        return Ok(Glance::Same);
    }
    Ok(Glance::Now(Some(Box::new(decode(file, &key.tenant, &key.session, card)?))))
}

/// Where a log ends.
pub(super) fn seq(conn: &Connection, tenant: &Tenant, session: &SessionId) -> Done<Option<Seq>> {
    let mut find = conn.prepare_cached("SELECT seq FROM head WHERE tenant = ?1 AND session = ?2")?;
    let seq = find.query_row([tenant.as_str(), session.as_str()], |r| r.get::<_, i64>(0));
    Ok(seq.optional()?.map(|seq| seq as Seq))
}

pub(super) fn heads(conn: &Connection, file: &File, query: &Query) -> Done<Vec<Head>> {
    let Select { sql, params } = Select::new(query);
    let mut find = conn.prepare_cached(&sql)?;
    let mut rows = find.query(params_from_iter(params))?;
    let mut heads = Vec::new();
    while let Some(row) = rows.next()? {
        let text = |i| row.get_ref(i).and_then(|v| v.as_str().map_err(rusqlite::Error::from));
        heads.push(decode(file, text(0)?, text(1)?, text(2)?)?);
    }
    Ok(heads)
}

/// How many sessions there are in each state. Most are active: they are what is left of all.
pub(super) fn count(conn: &Connection) -> Done<Vec<(Status, u64)>> {
    let sql = "SELECT status, count(*) FROM head WHERE status <> 'active' GROUP BY status";
    let mut find = conn.prepare_cached(sql)?;
    let rows = find.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?)))?;
    let others = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    let all: i64 = conn.prepare_cached("SELECT count(*) FROM head")?.query_row([], |r| r.get(0))?;
    Ok(Status::counts(all, &others))
}

/// A query in SQL, put together from the fragments below; every value is a parameter.
pub(super) struct Select {
    pub sql: String,
    pub params: Vec<Value>,
}

impl Select {
    pub fn new(query: &Query) -> Self {
        let mut select = Self { sql: "SELECT tenant, session, card FROM head".to_owned(), params: Vec::new() };
        select.choose_index(query);
        select.sql.push_str(" WHERE true");
        select.conditions(query);
        select.sql.push_str(match query.order {
            Order::Newest => " ORDER BY active_at DESC, session DESC, tenant DESC",
            Order::Oldest => " ORDER BY active_at, session, tenant",
            Order::Due => " ORDER BY due_at, tenant, session",
        });
        select.sql.push_str(" LIMIT ? OFFSET ?");
        for n in [query.limit, query.offset] {
            select.params.push(i64::try_from(n).unwrap_or(i64::MAX).into());
        }
        select
    }

    /// Without statistics the planner may prefer an index in the right order to one that finds the few rows that match.
    fn choose_index(&mut self, query: &Query) {
        let index = match query.whose {
            Whose::Everyone => return,
            // The few rows that match are looked up by their number.
            _ if !query.matches.is_empty() => " NOT INDEXED",
            _ if !query.hashes.is_empty() => " INDEXED BY head_hash",
            _ if query.parent.is_some() => " INDEXED BY head_parent",
            _ if query.thread.is_some() => " INDEXED BY head_thread",
            _ => return,
        };
        self.sql.push_str(index);
    }

    fn conditions(&mut self, query: &Query) {
        match &query.whose {
            Whose::User(tenant, user) => {
                self.and("tenant = ?", tenant.to_string());
                self.and("user = ?", user.to_string());
            }
            Whose::Tenant(tenant) => self.and("tenant = ?", tenant.to_string()),
            Whose::Everyone => {}
        }
        self.and_if("assistant = ?", query.assistant.clone());
        self.and_if("thread = ?", query.thread.clone());
        self.and_if("parent = ?", query.parent.as_ref().map(|p| p.to_string()));
        self.and_if("created_at >= ?", query.created_after.map(micros));
        self.and_if("created_at < ?", query.created_before.map(micros));
        self.and_if("due_at < ?", query.due_before.map(micros));
        self.and_if("lease_until < ?", query.lease_before.map(micros));
        self.and_if("instr(title, ?) > 0", query.folded_title().filter(|t| !t.is_empty()));
        self.and_any("status IN (SELECT value FROM json_each(?))", query.status.iter().map(|s| s.as_str().into()));
        self.and_any("hash IN (SELECT unhex(value) FROM json_each(?))", query.hashes.iter().map(|h| h.to_string()));
        if !query.matches.is_empty() {
            let keys = "SELECT unhex(value) FROM json_each(?)";
            let values = serde_json::Value::from(query.matches.iter().map(|h| h.to_string()).collect::<Vec<_>>());
            let tenant = match &query.whose {
                Whose::User(tenant, _) | Whose::Tenant(tenant) => tenant.to_string(),
                Whose::Everyone => String::new(),
            };
            self.and("id IN (SELECT head_id FROM head_match WHERE tenant = ?", tenant);
            self.sql.push_str(&format!(" AND key IN ({keys}))"));
            self.params.push(values.to_string().into());
        }
        let missing =
            "SELECT 1 FROM json_each(?) want WHERE want.value NOT IN (SELECT value FROM json_each(head.labels))";
        self.and_any(&format!("NOT EXISTS ({missing})"), query.labels().into_iter());
        if let (Some(cursor), Order::Newest) = (&query.cursor, query.order) {
            self.and("(active_at, session) < (?, ", cursor.active_at.as_microsecond());
            self.sql.push_str("?)");
            self.params.push(cursor.session.to_string().into());
        }
    }

    fn and(&mut self, condition: &str, value: impl Into<Value>) {
        self.sql.push_str(" AND ");
        self.sql.push_str(condition);
        self.params.push(value.into());
    }

    fn and_if(&mut self, condition: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.and(condition, value);
        }
    }

    /// A condition on a JSON list, unless that is empty.
    fn and_any(&mut self, condition: &str, values: impl Iterator<Item = String>) {
        let values: Vec<_> = values.collect();
        if !values.is_empty() {
            self.and(condition, serde_json::Value::from(values).to_string());
        }
    }
}

/// The first whole microsecond that is not before a bound.
fn micros(bound: Timestamp) -> i64 {
    let micros = bound.as_microsecond();
    let below = Timestamp::from_microsecond(micros).is_ok_and(|t| t < bound);
    if below { micros + 1 } else { micros }
}
