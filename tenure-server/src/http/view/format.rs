//! Numbers and times as text, without the machinery of `format!`: an answer can hold thousands.

use jiff::{Timestamp, tz::Offset};

/// Times as their `Display` has them. Messages that were said together have the same, which is written once.
#[derive(Default)]
pub struct Times {
    last: Option<Timestamp>,
    text: String,
}

impl Times {
    /// The text of a time.
    pub fn text(&mut self, at: Timestamp) -> &str {
        if self.last != Some(at) {
            self.text.clear();
            put_time(&mut self.text, at);
            self.last = Some(at);
        }
        &self.text
    }
}

fn put_time(out: &mut String, at: Timestamp) {
    let t = Offset::UTC.to_datetime(at);
    let Ok(year @ 0..=9999) = u32::try_from(t.year()) else { return out.push_str(&at.to_string()) };
    let mut text = *b"0000-00-00T00:00:00.000000000";
    digits(&mut text[..4], year);
    let parts = [t.month(), t.day(), t.hour(), t.minute(), t.second()];
    for (part, place) in parts.into_iter().zip([5, 8, 11, 14, 17]) {
        digits(&mut text[place..place + 2], part as u32);
    }
    digits(&mut text[20..], t.subsec_nanosecond() as u32);
    let text = str::from_utf8(&text).unwrap_or_default();
    // No more of the fraction than there is.
    out.push_str(text.trim_end_matches('0').trim_end_matches('.'));
    out.push('Z');
}

/// A number, as many of its last digits as there is room for.
fn digits(place: &mut [u8], mut n: u32) {
    for digit in place.iter_mut().rev() {
        *digit = b'0' + (n % 10) as u8;
        n /= 10;
    }
}

/// A number.
pub fn put_number(out: &mut String, mut n: u64) {
    let (mut text, mut start) = ([b'0'; 20], 19);
    while n > 0 {
        text[start] = b'0' + (n % 10) as u8;
        n /= 10;
        if n > 0 {
            start -= 1;
        }
    }
    out.push_str(str::from_utf8(&text[start..]).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_jiff_writes_them() {
        let seconds = [0, 1, 59, 951_782_400, 1_700_000_000, 4_102_444_800, 253_402_207_199, -1, -62_135_596_800];
        let nanos = [0, 1, 10, 1_000, 123_456_000, 100_000_000, 120_000_000, 999_999_999];
        for at in seconds.iter().flat_map(|s| nanos.map(|n| Timestamp::new(*s, if *s < 0 { -n } else { n }).unwrap())) {
            let mut text = String::from("10.00");
            put_time(&mut text, at);
            assert_eq!(text, format!("10.00{at}"));
        }
        for at in [Timestamp::MIN, Timestamp::MAX] {
            let mut text = String::new();
            put_time(&mut text, at);
            assert_eq!(text, at.to_string());
        }
    }

    #[test]
    fn numbers_are_written_as_they_are() {
        for n in [0, 7, 10, 99, 1234567890, u64::MAX] {
            let mut text = String::new();
            put_number(&mut text, n);
            assert_eq!(text, n.to_string());
        }
    }
}
