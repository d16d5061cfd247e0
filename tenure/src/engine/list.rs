//! Lists of sessions, restricted to the sessions that the principal may see.

use crate::engine::core::Engine;
use crate::store::query::{HeadPage, OwnerFilter, SessionCursor, SessionQuery};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal};
use crate::types::status::Status;

/// A page of a list of sessions.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionPage {
    /// The heads of the sessions, most recently active first.
    pub heads: Vec<Head>,
    /// The cursor of the next page. `None` means that this page is the last one.
    pub next: Option<SessionCursor>,
}

impl Engine {
    /// Lists sessions that match the query, most recently active first (D-029). Expired and deleted
    /// sessions are omitted unless the query asks for them. The status of a session is its effective one: a
    /// session past its time to live is listed as expired, whether or not a sweep has visited it. The work of one page is bounded by
    /// `max_scan`: a page may be short or empty and still have a next one.
    pub async fn list(&self, principal: &Principal, mut query: SessionQuery) -> Result<SessionPage> {
        self.ensure_assistants_loaded(&principal.tenant).await?;
        self.restrict_query(principal, &mut query)?;
        query.limit += 1;
        let HeadPage { mut heads, scan_stopped_at: stopped } =
            self.store().page(&query, self.limits().max_scan).await?;
        if query.offset > 0 && stopped.is_some() {
            let reason = "`offset` would skip more sessions than one request may scan (`max_scan`); omit it and use `cursor` to get the next page";
            return Err(Error::invalid("offset", reason));
        }
        let more = heads.len() == query.limit;
        heads.truncate(query.limit - 1);
        let next = heads.last().filter(|_| more).map(SessionCursor::of).or(stopped);
        // The stored status may be out of date: sessions may have expired since the last sweep.
        if let Some(expiry) = &query.expiry {
            heads.iter_mut().for_each(|head| head.status = expiry.status_of(head));
        }
        Ok(SessionPage { heads, next })
    }

    /// Restricts a query to the sessions that the principal may see, and to live sessions unless it
    /// asks for others. Evaluates expiry now. Checks `max_offset` and `max_page`.
    pub fn restrict_query(&self, principal: &Principal, query: &mut SessionQuery) -> Result<()> {
        query.owner = match (principal.scope, &query.owner) {
            (AccessScope::Own, _) => OwnerFilter::User(principal.tenant.clone(), principal.user.clone()),
            (AccessScope::Tenant, OwnerFilter::User(_, user)) => {
                OwnerFilter::User(principal.tenant.clone(), user.clone())
            }
            (AccessScope::Tenant, _) => OwnerFilter::Tenant(principal.tenant.clone()),
        };
        if query.status.is_empty() {
            query.status = vec![Status::Active, Status::Paused];
        }
        query.expiry = Some(self.expiry_cutoffs(&principal.tenant));
        if query.offset > self.limits().max_offset {
            let max = self.limits().max_offset;
            let reason = format!("`offset` is over the limit `max_offset` of {max}; use `cursor` to get the next page");
            return Err(Error::invalid("offset", reason));
        }
        let max = self.limits().max_page;
        if query.limit > max {
            let description = format!("a page size of {}", query.limit);
            return Err(Error::TooLarge { subject: description, limit: "max_page", max: max as u64 });
        }
        Ok(())
    }
}
