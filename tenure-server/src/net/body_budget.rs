//! The memory budget of request bodies: one for all of them, and one per principal (D-108).
//!
//! A reservation grows with the body as it is received and is released with the body's bytes, so that unfinished
//! bodies count as well as those of requests that are being handled.

use crate::config::Limits;
use crate::error::ApiError;
use axum::http::{StatusCode, header};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The budget of request body bytes in memory.
#[derive(Debug)]
pub struct BodyBudget {
    max: usize,
    max_per_principal: usize,
    used: Mutex<BudgetUse>,
}

#[derive(Debug, Default)]
struct BudgetUse {
    total: usize,
    by_principal: HashMap<String, usize>,
}

/// A share of the budget. Dropping it releases its bytes.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<BodyBudget>,
    principal: String,
    bytes: usize,
}

impl BodyBudget {
    /// Creates an unused budget with the configured limits.
    pub fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            max: limits.max_inflight_body_bytes,
            max_per_principal: limits.max_principal_body_bytes,
            used: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BudgetUse> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an empty reservation for a principal.
    pub fn reserve(self: &Arc<Self>, principal: String) -> Reservation {
        Reservation { budget: self.clone(), principal, bytes: 0 }
    }
}

impl Reservation {
    /// Reserves `additional` bytes. Fails with 429 if the principal's budget is exceeded and with 503 if the total
    /// budget is; nothing is reserved then.
    pub fn grow(&mut self, additional: usize) -> Result<(), ApiError> {
        let mut used = self.budget.lock();
        let own = used.by_principal.get(&self.principal).copied().unwrap_or(0);
        let max = self.budget.max_per_principal;
        if own + additional > max {
            let message = format!(
                "the concurrent request bodies of this principal exceed the limit `max_principal_body_bytes` of {max}; send fewer at once"
            );
            return Err(exceeded(StatusCode::TOO_MANY_REQUESTS, "max_principal_body_bytes", message));
        }
        let max = self.budget.max;
        if used.total + additional > max {
            let message = format!(
                "all concurrent request bodies exceed the limit `max_inflight_body_bytes` of {max}; retry shortly"
            );
            return Err(exceeded(StatusCode::SERVICE_UNAVAILABLE, "max_inflight_body_bytes", message));
        }
        used.total += additional;
        *used.by_principal.entry(self.principal.clone()).or_default() += additional;
        self.bytes += additional;
        Ok(())
    }
}

fn exceeded(status: StatusCode, limit: &'static str, message: String) -> ApiError {
    ApiError::new(status, "body_budget_exceeded", message).with_param(limit).with_header(header::RETRY_AFTER, "1")
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut used = self.budget.lock();
        used.total -= self.bytes;
        if let Some(own) = used.by_principal.get_mut(&self.principal) {
            *own -= self.bytes;
            if *own == 0 {
                used.by_principal.remove(&self.principal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_shared_between_principals_and_released() {
        let limits = Limits { max_inflight_body_bytes: 100, max_principal_body_bytes: 60, ..Default::default() };
        let budget = BodyBudget::new(&limits);
        let mut a = budget.reserve("a".into());
        let mut b = budget.reserve("b".into());
        a.grow(50).unwrap();
        let mut second = budget.reserve("a".into());
        assert_eq!(second.grow(11).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        b.grow(50).unwrap();
        assert_eq!(b.grow(1).unwrap_err().status, StatusCode::SERVICE_UNAVAILABLE);
        drop(a);
        second.grow(50).unwrap();
        drop((b, second));
        let used = budget.lock();
        assert_eq!((used.total, used.by_principal.len()), (0, 0));
    }
}
