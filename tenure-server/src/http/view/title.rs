//! The display title of a session: what to show in a list where a session has no title of its own.

use tenure::Role;
use tenure::session::StoredMessage;

/// Maximum length of a title made from a message, in characters.
const MAX_CHARS: usize = 60;

/// Number of messages from the beginning of a session among which the first user message is looked for.
pub const SCANNED_MESSAGES: usize = 8;

/// Returns the title of a session, or the first words of its first user message. `None` if there is neither. It is
/// computed, never stored, so it changes with the messages.
pub fn display_title(title: Option<&str>, first_messages: &[StoredMessage]) -> Option<String> {
    if let Some(title) = title {
        return Some(title.to_owned());
    }
    let first = first_messages.iter().take(SCANNED_MESSAGES).find(|m| m.message.role() == Role::User)?;
    first_words(&first.message.text())
}

/// The first words of a text, on one line, without control characters. Text that is left out is marked by `…`.
fn first_words(text: &str) -> Option<String> {
    let mut title = String::new();
    let mut length = 0;
    for word in text.split_whitespace() {
        let word: String = word.chars().filter(|c| !c.is_control()).take(MAX_CHARS + 1).collect();
        let word_length = word.chars().count();
        if word_length == 0 {
            continue;
        }
        let space = usize::from(length > 0);
        if length + space + word_length > MAX_CHARS {
            if length == 0 {
                title.extend(word.chars().take(MAX_CHARS));
            }
            title.push('…');
            break;
        }
        if space > 0 {
            title.push(' ');
        }
        title.push_str(&word);
        length += space + word_length;
    }
    (!title.is_empty()).then_some(title)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_words_fit_on_a_line() {
        assert_eq!(first_words("  Where is\n\tthe ferry? "), Some("Where is the ferry?".to_owned()));
        assert_eq!(first_words(" \n"), None);
        assert_eq!(first_words("a\u{1b}[31mb"), Some("a[31mb".to_owned()));
        let long = "word ".repeat(100);
        let title = first_words(&long).unwrap();
        assert_eq!(title, format!("{}…", "word ".repeat(12).trim_end()));
        assert_eq!(first_words(&"ü".repeat(100)).unwrap(), format!("{}…", "ü".repeat(60)));
        assert_eq!(first_words(&"ü".repeat(60)).unwrap(), "ü".repeat(60));
    }
}
