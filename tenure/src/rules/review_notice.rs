//! The text that is shown in place of an answer while a review is open, and how it is recognised when a client sends it back.

use crate::rules::session::{Review, Session};
use crate::types::id::{ReviewId, SessionId};
use crate::types::message::{Message, Role};

impl Session {
    /// What is said instead of an answer while a review is open. It is not part of the session.
    pub fn notice(&self) -> Option<String> {
        let what = |r: &Review| {
            let ask = if r.opened.lost { "Was this done" } else { "May it be done" };
            let queue = r.opened.queue.as_ref().map(|q| format!(", queue {q}")).unwrap_or_default();
            format!("- {} (review {}{queue}): {ask}?", r.opened.step, r.opened.review)
        };
        let list: Vec<String> = self.open_reviews().map(what).collect();
        let end = "Once that is decided, the work goes on by itself; ask again later.";
        (!list.is_empty()).then(|| format!("{NOTICE}\n{}\n{end}", list.join("\n")))
    }
}

/// How a notice begins. Clients that send everything back send it too; it is not taken for something that was said.
const NOTICE: &str = "A person has to decide before this can go on:";

/// Whether a message is a notice that comes back.
pub(crate) fn is_notice(message: &Message) -> bool {
    let may_be = message.role() == Role::Assistant && message.as_str().contains(NOTICE);
    may_be && message.text().starts_with(NOTICE)
}

/// The message of a session that a notice stood in for: the last one that its run has said.
pub(crate) fn notice_answer<'a>(session: &'a Session, notice: &Message) -> Option<&'a Message> {
    let text = notice.text();
    let named = |r: &&Review| text.contains(&format!("(review {}", r.opened.review));
    let run = session.reviews.iter().find(named)?.opened.run.as_ref()?;
    let said = session.messages.iter().rev().filter(|m| m.run.as_ref() == Some(run));
    said.map(|m| &m.message).find(|m| m.role() == Role::Assistant)
}

/// The session that a notice is about.
pub(crate) fn noticed(message: &Message) -> Option<SessionId> {
    let text = is_notice(message).then(|| message.text())?;
    let id = text.split_once("(review ")?.1.split([',', ')']).next()?;
    ReviewId::new(id).ok()?.session()
}
