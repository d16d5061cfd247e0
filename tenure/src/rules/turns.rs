//! The definition of a turn: it begins with a user message that does not follow another user message. System
//! messages in between do not count.

use crate::types::digest::LogDigest;
use crate::types::message::Role;

/// Returns true if a message begins a turn. `last` is the role of the message before it, ignoring system
/// messages.
pub(crate) fn begins_turn(role: Role, last: Option<Role>) -> bool {
    role == Role::User && last != Some(Role::User)
}

/// Counts turns, message by message.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TurnCounter {
    /// The number of turns that have begun.
    pub turns: usize,
    /// The role of the last message, ignoring system messages.
    pub last: Option<Role>,
}

impl TurnCounter {
    /// Creates a counter that continues after the messages of a digest.
    pub fn after(digest: &LogDigest) -> Self {
        Self { turns: digest.turns, last: digest.last }
    }

    /// Counts the next message. Returns true if it begins a turn.
    pub fn count(&mut self, role: Role) -> bool {
        let begins = begins_turn(role, self.last);
        self.turns += usize::from(begins);
        if !role.is_instruction() {
            self.last = Some(role);
        }
        begins
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Role::{Assistant, Developer, System, Tool, User};

    /// Returns the positions at which turns begin.
    fn starts(roles: &[Role]) -> Vec<usize> {
        let mut counter = TurnCounter::default();
        let starts: Vec<usize> = (0..roles.len()).filter(|i| counter.count(roles[*i])).collect();
        assert_eq!(counter.turns, starts.len());
        starts
    }

    #[test]
    fn a_turn_begins_with_a_user_message_that_does_not_follow_another() {
        assert_eq!(starts(&[]), [0; 0]);
        assert_eq!(starts(&[System, Assistant, Tool]), [0; 0]);
        assert_eq!(starts(&[System, User, Assistant, User, Assistant]), [1, 3]);
        assert_eq!(starts(&[User, User, Assistant]), [0]);
        assert_eq!(starts(&[User, System, Developer, User, Assistant]), [0], "system messages do not separate");
        assert_eq!(starts(&[User, Assistant, Tool, User]), [0, 3]);
    }

    #[test]
    fn a_counter_continues_after_a_digest() {
        let mut counter = TurnCounter::after(&LogDigest { turns: 3, last: Some(User), ..LogDigest::default() });
        assert!(!counter.count(User));
        assert!(!counter.count(Assistant));
        assert!(counter.count(User));
        assert_eq!(counter.turns, 4);
    }
}
