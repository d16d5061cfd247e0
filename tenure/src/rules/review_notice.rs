//! The notice that is shown in place of an answer while a review is open, and how it is recognized when a
//! client sends it back (D-062).

use crate::rules::session::{Review, Session};
use crate::types::id::{ReviewId, SessionId};
use crate::types::message::{Message, Role};

impl Session {
    /// Returns the notice to show instead of an answer. `None` if no review is open. The notice is not part
    /// of the session.
    pub fn notice(&self) -> Option<String> {
        let line = |r: &Review| {
            let question = if r.opened.lost { "Was this call executed" } else { "May this call be executed" };
            let queue = r.opened.queue.as_ref().map(|q| format!(", queue {q}")).unwrap_or_default();
            format!("- {} (review {}{queue}): {question}?", r.opened.step, r.opened.review)
        };
        let lines: Vec<String> = self.open_reviews().map(line).collect();
        let footer = "The run resumes automatically after the decision; check again later.";
        (!lines.is_empty()).then(|| format!("{NOTICE}\n{}\n{footer}", lines.join("\n")))
    }
}

/// The beginning of a notice. Clients that send back everything send it too, and it must not be stored as a
/// message.
const NOTICE: &str = "A person has to decide before this can go on:";

/// Returns true if a message is a notice that a client sent back.
pub(crate) fn is_notice(message: &Message) -> bool {
    let may_be = message.role() == Role::Assistant && message.as_str().contains(NOTICE);
    may_be && message.text().starts_with(NOTICE)
}

/// Returns the stored message that a notice stood for: the last assistant message of the run under review.
pub(crate) fn notice_answer<'a>(session: &'a Session, notice: &Message) -> Option<&'a Message> {
    let text = notice.text();
    let is_named = |r: &&Review| text.contains(&format!("(review {}", r.opened.review));
    let run = session.reviews.iter().find(is_named)?.opened.run.as_ref()?;
    let produced = session.messages.iter().rev().filter(|m| m.run.as_ref() == Some(run));
    produced.map(|m| &m.message).find(|m| m.role() == Role::Assistant)
}

/// Returns the session whose review a notice names.
pub(crate) fn noticed_session_id(message: &Message) -> Option<SessionId> {
    let text = is_notice(message).then(|| message.text())?;
    let id = text.split_once("(review ")?.1.split([',', ')']).next()?;
    ReviewId::new(id).ok()?.session()
}
