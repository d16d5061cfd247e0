//! Some futures side by side, in one task: so many at once, and whatever is ready together.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Work that is under way, and work that waits.
pub(crate) struct Batch<F: Future> {
    waiting: std::iter::Enumerate<std::vec::IntoIter<F>>,
    under_way: Vec<(usize, Pin<Box<F>>)>,
    at_once: usize,
}

impl<F: Future> Batch<F> {
    pub fn new(work: Vec<F>, at_once: usize) -> Self {
        Self { waiting: work.into_iter().enumerate(), under_way: Vec::new(), at_once }
    }

    /// Gives up what has not begun.
    pub fn begin_no_more(&mut self) {
        self.waiting.by_ref().for_each(drop);
    }

    /// Waits until some of it is done, and gives all that is, each with its place. `None`: everything was.
    pub async fn next(&mut self) -> Option<Vec<(usize, F::Output)>> {
        let free = self.at_once.saturating_sub(self.under_way.len());
        self.under_way.extend(self.waiting.by_ref().take(free).map(|(i, f)| (i, Box::pin(f))));
        if self.under_way.is_empty() {
            return None;
        }
        let done = poll_fn(|context| {
            let mut done = Vec::new();
            self.under_way.retain_mut(|(i, work)| match work.as_mut().poll(context) {
                Poll::Ready(output) => {
                    done.push((*i, output));
                    false
                }
                Poll::Pending => true,
            });
            if done.is_empty() { Poll::Pending } else { Poll::Ready(done) }
        });
        Some(done.await)
    }
}
