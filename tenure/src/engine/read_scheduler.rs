//! Fair scheduling of reads: bounds the number of concurrent store calls of each principal, and
//! decides which waiting call is next.
//!
//! Lists, searches and other reads that are not part of a turn go through a [`Scheduler`]. It
//! admits fewer of them than the store can serve concurrently; the rest is reserved for turns,
//! which do not wait behind lists. Waiting calls are served round robin, first by tenant and then
//! by user, because the holder of a key without a user can name any user (D-106).

use crate::types::error::{Error, Result};
use crate::types::id::{Principal, Tenant, User};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Limits on concurrent calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The maximum number of concurrent calls in total.
    pub total: usize,
    /// The maximum number of concurrent calls of one tenant.
    pub per_tenant: usize,
    /// The maximum number of concurrent calls of one user of a tenant.
    pub per_principal: usize,
    /// The maximum number of waiting calls of one user of a tenant; more are rejected (`max_waiting_reads`).
    pub waiting: usize,
}

impl Bounds {
    /// The limits for reads that are not part of a turn, on a store that serves `capacity`
    /// concurrent calls. A quarter of the capacity is reserved for turns.
    pub fn of_browsing(capacity: usize, waiting: usize) -> Self {
        let part = |of: usize| (capacity / of).max(1);
        let total = capacity.saturating_sub(part(4)).max(1);
        Self { total, per_tenant: part(2).min(total), per_principal: part(4).min(total), waiting }
    }

    /// The limits for reads and writes of turns, on a store where each call takes one of `capacity`
    /// connections. One tenant leaves a quarter of them to others.
    pub fn of_turns(capacity: usize) -> Self {
        let per_tenant = capacity.saturating_sub((capacity / 4).max(1)).max(1);
        Self { total: capacity, per_tenant, per_principal: per_tenant, waiting: usize::MAX }
    }
}

/// Admits store calls within the limits, in fair order.
#[derive(Debug)]
pub(crate) struct Scheduler {
    bounds: Bounds,
    state: Mutex<SchedulerState>,
}

#[derive(Debug, Default)]
struct SchedulerState {
    running: usize,
    tenants: HashMap<Tenant, Lane>,
    /// Tenants with waiting calls, in the order in which they are served.
    ring: VecDeque<Tenant>,
}

/// The calls of one tenant.
#[derive(Debug, Default)]
struct Lane {
    running: usize,
    users: HashMap<User, WaitQueue>,
    /// Users with waiting calls, in the order in which they are served.
    ring: VecDeque<User>,
}

/// The calls of one user of a tenant.
#[derive(Debug, Default)]
struct WaitQueue {
    running: usize,
    waiting: VecDeque<oneshot::Sender<Permit>>,
}

/// The permission for one store call. Dropping it releases the capacity and admits the next call.
#[derive(Debug)]
pub(crate) struct Permit {
    scheduler: Arc<Scheduler>,
    tenant: Tenant,
    user: User,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.scheduler.release(&self.tenant, &self.user);
    }
}

impl Scheduler {
    /// Creates a scheduler with these limits.
    pub fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, state: Mutex::default() })
    }

    /// Waits until this principal may make a call. It is an error if too many calls of the
    /// principal are waiting already.
    pub async fn acquire(self: &Arc<Self>, principal: &Principal) -> Result<Permit> {
        let waiting = {
            let mut state = self.state();
            let lane = state.tenants.entry(principal.tenant.clone()).or_default();
            let queue = lane.users.entry(principal.user.clone()).or_default();
            if queue.waiting.len() >= self.bounds.waiting {
                let description = format!("the number of waiting reads of user {}", principal.user);
                return Err(Error::TooLarge {
                    subject: description,
                    limit: "max_waiting_reads",
                    max: self.bounds.waiting as u64,
                });
            }
            let (grant, granted) = oneshot::channel();
            queue.waiting.push_back(grant);
            if queue.waiting.len() == 1 {
                lane.ring.push_back(principal.user.clone());
            }
            if !state.ring.contains(&principal.tenant) {
                state.ring.push_back(principal.tenant.clone());
            }
            let grants = self.grant(&mut state);
            drop(state);
            send_permits(grants);
            granted
        };
        waiting.await.map_err(Error::unavailable_from)
    }

    fn release(self: &Arc<Self>, tenant: &Tenant, user: &User) {
        let mut state = self.state();
        state.running -= 1;
        if let Some(lane) = state.tenants.get_mut(tenant) {
            lane.running -= 1;
            if let Some(queue) = lane.users.get_mut(user) {
                queue.running -= 1;
                if queue.running == 0 && queue.waiting.is_empty() {
                    lane.users.remove(user);
                }
            }
            if lane.users.is_empty() {
                state.tenants.remove(tenant);
            }
        }
        let grants = self.grant(&mut state);
        drop(state);
        send_permits(grants);
    }

    /// Removes the calls that may run now from the queues, tenant by tenant and user by user.
    fn grant(self: &Arc<Self>, state: &mut SchedulerState) -> Vec<(oneshot::Sender<Permit>, Permit)> {
        let mut grants = Vec::new();
        // The ring is served until every tenant in it, in turn, had no call that may run.
        let mut refusals = 0;
        while state.running < self.bounds.total && refusals < state.ring.len() {
            let Some(tenant) = state.ring.pop_front() else { break };
            let Some(lane) = state.tenants.get_mut(&tenant) else { continue };
            let next = if lane.running < self.bounds.per_tenant { lane.next(self.bounds.per_principal) } else { None };
            let has_waiting = !lane.ring.is_empty();
            match next {
                Some((user, grant)) => {
                    lane.running += 1;
                    state.running += 1;
                    refusals = 0;
                    grants.push((grant, Permit { scheduler: self.clone(), tenant: tenant.clone(), user }));
                }
                None => refusals += 1,
            }
            if has_waiting {
                state.ring.push_back(tenant);
            }
        }
        grants
    }

    fn state(&self) -> MutexGuard<'_, SchedulerState> {
        // Poisoning is ignored: no code that holds the lock panics, so the counts stay consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    /// The next user who may make a call, with that user's oldest waiting call.
    fn next(&mut self, per_principal: usize) -> Option<(User, oneshot::Sender<Permit>)> {
        for _ in 0..self.ring.len() {
            let user = self.ring.pop_front()?;
            let queue = self.users.get_mut(&user)?;
            let next = if queue.running < per_principal { queue.waiting.pop_front() } else { None };
            if !queue.waiting.is_empty() {
                self.ring.push_back(user.clone());
            }
            if let Some(grant) = next {
                queue.running += 1;
                return Some((user, grant));
            }
        }
        None
    }
}

/// Sends the permits to the waiting calls. Must be called without the lock: the permit of a
/// cancelled call is dropped here, which takes the lock.
fn send_permits(grants: Vec<(oneshot::Sender<Permit>, Permit)>) {
    for (grant, permit) in grants {
        drop(grant.send(permit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    fn principal(tenant: &str, user: &str) -> Principal {
        Principal::new(tenant, user).unwrap()
    }

    /// A call that was polled once: it runs or it waits.
    enum Call {
        Runs(#[expect(dead_code, reason = "the permit is held until the call is dropped")] Permit),
        Waits(std::pin::Pin<Box<dyn Future<Output = Result<Permit>> + Send>>),
    }

    fn call(scheduler: &Arc<Scheduler>, principal: &Principal) -> Call {
        let scheduler = scheduler.clone();
        let principal = principal.clone();
        let mut call: std::pin::Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(async move { scheduler.acquire(&principal).await });
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(permit) => Call::Runs(permit.unwrap()),
            Poll::Pending => Call::Waits(call),
        }
    }

    /// Polls the waiting calls once more. Returns the names of all running calls.
    fn settle(calls: &mut [(&'static str, Call)]) -> Vec<&'static str> {
        let mut running = Vec::new();
        for (name, call) in calls {
            if let Call::Waits(waiting) = call
                && let Poll::Ready(permit) = waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                *call = Call::Runs(permit.unwrap());
            }
            if matches!(call, Call::Runs(_)) {
                running.push(*name);
            }
        }
        running
    }

    const BOUNDS: Bounds = Bounds { total: 6, per_tenant: 4, per_principal: 2, waiting: 3 };

    #[test]
    fn a_principal_has_no_more_calls_than_its_bound_and_others_proceed() {
        let scheduler = Scheduler::new(BOUNDS);
        let (mallory, eve) = (principal("a", "mallory"), principal("a", "eve"));
        let mut calls: Vec<_> = (0..5).map(|_| ("mallory", call(&scheduler, &mallory))).collect();
        calls.extend((0..3).map(|_| ("eve", call(&scheduler, &eve))));
        calls.push(("third", call(&scheduler, &principal("a", "third"))));
        assert_eq!(settle(&mut calls), ["mallory", "mallory", "eve", "eve"], "two each, four of the tenant");
        calls.extend((0..3).map(|_| ("other", call(&scheduler, &principal("b", "bob")))));
        assert_eq!(settle(&mut calls)[4..], ["other", "other"], "another tenant does not wait");
        assert!(matches!(call(&scheduler, &principal("c", "c")), Call::Waits(_)), "six in all");
    }

    #[test]
    fn waiting_calls_are_served_round_robin() {
        let scheduler = Scheduler::new(Bounds { total: 1, per_tenant: 1, per_principal: 1, waiting: 9 });
        let mut calls: Vec<_> = (0..4).map(|_| ("mallory", call(&scheduler, &principal("a", "mallory")))).collect();
        calls.push(("eve", call(&scheduler, &principal("a", "eve"))));
        calls.push(("bob", call(&scheduler, &principal("b", "bob"))));
        let mut order = Vec::new();
        while !calls.is_empty() {
            settle(&mut calls);
            let index = calls.iter().position(|(_, call)| matches!(call, Call::Runs(_))).unwrap();
            order.push(calls.remove(index).0);
        }
        assert_eq!(order, ["mallory", "mallory", "bob", "eve", "mallory", "mallory"]);
        assert!(
            scheduler.state().tenants.is_empty() && scheduler.state().ring.is_empty(),
            "all queues are empty again"
        );
    }

    #[test]
    fn a_cancelled_call_uses_no_capacity() {
        let scheduler = Scheduler::new(Bounds { total: 1, per_tenant: 1, per_principal: 1, waiting: 3 });
        let (a, b) = (principal("a", "a"), principal("b", "b"));
        let first = call(&scheduler, &a);
        let cancelled = call(&scheduler, &a);
        let waiting = call(&scheduler, &b);
        drop(cancelled);
        drop(first);
        let mut calls = [("b", waiting)];
        assert_eq!(settle(&mut calls), ["b"]);
        drop(calls);
        assert!(matches!(call(&scheduler, &a), Call::Runs(_)));
        assert_eq!(scheduler.state().running, 0);
    }

    #[test]
    fn too_many_waiting_calls_are_refused() {
        let scheduler = Scheduler::new(Bounds { total: 1, per_tenant: 1, per_principal: 1, waiting: 2 });
        let _calls: Vec<_> = (0..3).map(|_| call(&scheduler, &principal("a", "a"))).collect();
        let (mallory, bob) = (principal("a", "a"), principal("a", "b"));
        let mut one_more = Box::pin(scheduler.acquire(&mallory));
        match one_more.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(Error::TooLarge { limit: "max_waiting_reads", max: 2, .. })) => {}
            other => panic!("{other:?}"),
        }
        assert!(matches!(call(&scheduler, &bob), Call::Waits(_)), "another user may wait");
    }

    #[test]
    fn a_part_is_reserved_for_turns() {
        for capacity in 1..64 {
            let bounds = Bounds::of_browsing(capacity, 9);
            assert!(bounds.total >= 1 && bounds.per_tenant <= bounds.total && bounds.per_principal >= 1);
            assert!(capacity < 2 || bounds.total < capacity, "{capacity}: {bounds:?}");
            let turns = Bounds::of_turns(capacity);
            assert!(turns.per_tenant >= 1 && (capacity < 2 || turns.per_tenant < capacity), "{capacity}: {turns:?}");
        }
        assert_eq!(Bounds::of_browsing(8, 9), Bounds { total: 6, per_tenant: 4, per_principal: 2, waiting: 9 });
    }
}
