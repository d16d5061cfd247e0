//! File names of arbitrary names. Invariants: a file name is a single path component that is valid on every common
//! file system, and different names have different file names, even if the file system ignores case.

use crate::types::id::SessionId;
use std::fmt::Write as _;

/// Maximum length of a file name in bytes, without its extension. File systems allow 255 bytes.
const MAX_FILE_NAME: usize = 200;
/// Separates the beginning of a truncated name from the hash of the whole name. It is encoded everywhere else.
const HASH_MARK: char = '+';
/// Device names that Windows reserves, with any extension; `com` and `lpt` are followed by a digit.
const DEVICES: [&str; 4] = ["con", "prn", "aux", "nul"];

/// Encodes a name as a file name. `a-z`, `0-9`, `-`, `_` and `.` stay; every other byte, an upper-case letter, a dot
/// at the beginning or the end, and the first letter of a device name of Windows become `%XX`. A longer result than
/// 200 bytes is truncated, and ends with `+` and the BLAKE3 hash of the name.
pub fn file_name(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    let device = is_device(name);
    let last = name.len().saturating_sub(1);
    for (i, byte) in name.bytes().enumerate() {
        let stays = match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => !(device && i == 0),
            b'.' => i != 0 && i != last,
            _ => false,
        };
        if stays {
            encoded.push(byte.into());
        } else {
            write!(encoded, "%{byte:02X}").expect("writing to a String cannot fail");
        }
    }
    if encoded.len() > MAX_FILE_NAME {
        let hash = blake3::hash(name.as_bytes()).to_hex();
        encoded.truncate(MAX_FILE_NAME - hash.len() - HASH_MARK.len_utf8());
        write!(encoded, "{HASH_MARK}{hash}").expect("writing to a String cannot fail");
    }
    encoded
}

/// The suffix of the name of a file with a session's discarded messages.
pub(crate) const DISCARDED_SUFFIX: &str = ".discarded";

/// Encodes a session id as a file name, like [`file_name`]. A suffix that would make it the name of the file with
/// another session's discarded messages is encoded too.
pub fn session_file_name(id: &SessionId) -> String {
    let name = file_name(id.as_str());
    match name.strip_suffix(DISCARDED_SUFFIX) {
        Some(start) => format!("{start}%2E{}", &DISCARDED_SUFFIX[1..]),
        None => name,
    }
}

/// Decodes a file name. `None` if it is truncated, or not a result of [`file_name`].
pub(crate) fn decode_file_name(encoded: &str) -> Option<String> {
    decode(encoded).filter(|name| file_name(name) == encoded)
}

/// Decodes the file name of a session. `None` if it is truncated, or not a result of [`session_file_name`].
pub(crate) fn decode_session_file_name(encoded: &str) -> Option<SessionId> {
    SessionId::new(decode(encoded)?).ok().filter(|id| session_file_name(id) == encoded)
}

fn decode(encoded: &str) -> Option<String> {
    let mut parts = encoded.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// Returns true if a file name does not contain the whole name.
pub(crate) fn is_truncated(encoded: &str) -> bool {
    encoded.contains(HASH_MARK)
}

fn is_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default();
    let numbered = stem.strip_prefix("com").or(stem.strip_prefix("lpt"));
    DEVICES.contains(&stem) || numbered.is_some_and(|n| n.len() == 1 && n.as_bytes()[0].is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_names_stay_readable() {
        for (name, want) in [
            ("acme", "acme"),
            ("a.b-c_d9", "a.b-c_d9"),
            ("user@example.com", "user%40example.com"),
            ("019a8c3e-0000-7000-8000-3c6ec5dab1f0", "019a8c3e-0000-7000-8000-3c6ec5dab1f0"),
            ("Ada", "%41da"),
            ("é\\ :", "%C3%A9%5C%20%3A"),
        ] {
            assert_eq!(file_name(name), want);
        }
    }

    #[test]
    fn no_name_leaves_its_directory_or_is_reserved() {
        for (name, want) in [
            ("..", "%2E%2E"),
            (".", "%2E"),
            ("a.", "a%2E"),
            ("a/../b", "a%2F..%2Fb"),
            ("con", "%63on"),
            ("CON", "%43%4F%4E"),
            ("nul.txt", "%6Eul.txt"),
            ("com7", "%63om7"),
            ("com", "com"),
            ("console", "console"),
            ("%2e", "%252e"),
        ] {
            assert_eq!(file_name(name), want);
        }
    }

    #[test]
    fn names_differ_without_case_and_can_be_decoded() {
        let long = ["é".repeat(128), "é".repeat(127) + "e", "A".repeat(66), "A".repeat(67)];
        let names = ["a", "A", "%41", "%61", "Ünïcødé 会話", "ünïcødé 会話", "a+b", "a%2Bb", "con", "Con"];
        let names: Vec<&str> = names.into_iter().chain(long.iter().map(|n| &**n)).collect();
        let files: std::collections::BTreeSet<_> = names.iter().map(|n| file_name(n).to_lowercase()).collect();
        assert_eq!(files.len(), names.len());
        for name in names {
            let encoded = file_name(name);
            assert!(encoded.len() <= MAX_FILE_NAME);
            let decoded = decode_file_name(&encoded);
            assert_eq!(decoded, (!is_truncated(&encoded)).then(|| name.to_owned()));
        }
        assert!(is_truncated(&file_name(&"A".repeat(67))) && !is_truncated(&file_name(&"A".repeat(66))));
        for foreign in ["A", "%2e", "a b", "%4", "%", "%zz", "con", "é"] {
            assert_eq!(decode_file_name(foreign), None, "{foreign}");
        }
    }
}
