//! The notice that is shown in place of an answer while a review is open or a run is paused until a time, and
//! how it is recognized when a client sends it back (D-062).

use crate::rules::session::{Review, Session};
use crate::types::id::{ReviewId, SessionId};
use crate::types::message::{Message, Role};

impl Session {
    /// Returns the notice to show instead of an answer. `None` if no review is open and the session is not
    /// paused until a time. The notice is not part of the session.
    pub fn notice(&self) -> Option<String> {
        if let (Some(until), Some(run)) = (self.head().paused_until(), &self.head().run) {
            let id = &self.head().info.session_id;
            return Some(format!("{PAUSE_NOTICE} {until:.0} (session {id}; run {run}).\n{PAUSE_FOOTER}"));
        }
        let line = |r: &Review| {
            let question = match r.question() {
                Some(question) => question.split_whitespace().collect::<Vec<_>>().join(" "),
                None if r.opened.lost => "Was this call executed?".to_owned(),
                None => "May this call be executed?".to_owned(),
            };
            let queue = r.opened.queue.as_ref().map(|q| format!(", queue {q}")).unwrap_or_default();
            format!("- {} (review {}{queue}): {question}", r.opened.step, r.opened.review)
        };
        let lines: Vec<String> = self.open_reviews().map(line).collect();
        let footer = "The run resumes automatically after the decision; check again later.";
        (!lines.is_empty()).then(|| format!("{NOTICE}\n{}\n{footer}", lines.join("\n")))
    }
}

/// The beginning of a notice. Clients that send back everything send it too, and it must not be stored as a
/// message.
const NOTICE: &str = "A person has to decide before this can go on:";

/// The beginning and the end of the notice of a run that is paused until a time.
const PAUSE_NOTICE: &str = "The model is rate limited. This run is paused until";
const PAUSE_FOOTER: &str = "It resumes automatically; check again later.";

/// Returns true if a message is a notice that a client sent back.
pub(crate) fn is_notice(message: &Message) -> bool {
    let starts_with = |notice| message.as_str().contains(notice) && message.text().starts_with(notice);
    message.role() == Role::Assistant && (starts_with(NOTICE) || starts_with(PAUSE_NOTICE))
}

/// The session and the run that the notice of a pause names.
fn paused_run(text: &str) -> Option<(SessionId, &str)> {
    let (id, run) = text.strip_prefix(PAUSE_NOTICE)?.split_once("(session ")?.1.split_once("; run ")?;
    Some((SessionId::new(id).ok()?, run.split(')').next()?))
}

/// Returns the stored message that a notice stood for: the last assistant message of the run that waited.
pub(crate) fn notice_answer<'a>(session: &'a Session, notice: &Message) -> Option<&'a Message> {
    let text = notice.text();
    let is_named = |r: &&Review| text.contains(&format!("(review {}", r.opened.review));
    let run = match paused_run(&text) {
        Some((_, run)) => session.runs.iter().find(|r| r.id.as_str() == run).map(|r| &r.id)?,
        None => session.reviews.iter().find(is_named)?.opened.run.as_ref()?,
    };
    let produced = session.messages.iter().rev().filter(|m| m.run.as_ref() == Some(run));
    produced.map(|m| &m.message).find(|m| m.role() == Role::Assistant)
}

/// Returns the session whose review or run a notice names.
pub(crate) fn noticed_session_id(message: &Message) -> Option<SessionId> {
    let text = is_notice(message).then(|| message.text())?;
    if let Some((session, _)) = paused_run(&text) {
        return Some(session);
    }
    let id = text.split_once("(review ")?.1.split([',', ')']).next()?;
    ReviewId::new(id).ok()?.session()
}
