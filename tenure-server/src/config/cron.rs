//! Cron expressions: minute, hour, day of the month, month, day of the week.

use anyhow::{Context, bail, ensure};
use jiff::civil::DateTime;
use jiff::{ToSpan, Zoned};
use std::str::FromStr;

/// A parsed cron expression, evaluated in the local time of a time zone. Each field is a bit set of permitted
/// values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cron {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    weekdays: u64,
    /// True if both day fields are restricted: then a match of either is enough.
    either: bool,
}

const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

impl FromStr for Cron {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let text = match text.trim() {
            "@hourly" => "0 * * * *",
            "@daily" => "0 0 * * *",
            "@weekly" => "0 0 * * 0",
            "@monthly" => "0 0 1 * *",
            "@yearly" => "0 0 1 1 *",
            other => other,
        };
        let parts: Vec<&str> = text.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = parts[..] else {
            bail!("{text:?} must have five parts: minute, hour, day, month, day of the week");
        };
        let weekdays = parse_field(weekday, 0, 7, &WEEKDAYS, 0).context("day of the week")?;
        let cron = Self {
            minutes: parse_field(minute, 0, 59, &[], 0).context("minute")?,
            hours: parse_field(hour, 0, 23, &[], 0).context("hour")?,
            days: parse_field(day, 1, 31, &[], 0).context("day")?,
            months: parse_field(month, 1, 12, &MONTHS, 1).context("month")?,
            // Sunday is both 0 and 7.
            weekdays: (weekdays | weekdays >> 7) & 0x7f,
            either: !day.starts_with('*') && !weekday.starts_with('*'),
        };
        Ok(cron)
    }
}

/// Parses one field into a bit set: `*`, `5`, `1-5`, `*/15`, `mon-fri`, and comma-separated lists of those.
fn parse_field(text: &str, min: u64, max: u64, names: &[&str], first: u64) -> anyhow::Result<u64> {
    let number = |word: &str| -> anyhow::Result<u64> {
        let by_name = names.iter().position(|n| n.eq_ignore_ascii_case(word)).map(|i| i as u64 + first);
        let number = by_name.or(word.parse().ok()).with_context(|| format!("{word:?} is not a number"))?;
        ensure!((min..=max).contains(&number), "{number} is not between {min} and {max}");
        Ok(number)
    };
    let mut set = 0;
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => {
                (range, step.parse::<u64>().ok().filter(|s| *s > 0).context("a step must be a number over 0")?)
            }
            None => (part, 1),
        };
        let (from, to) = match range.split_once('-') {
            _ if range == "*" => (min, max),
            Some((from, to)) => (number(from)?, number(to)?),
            None if part.contains('/') => (number(range)?, max),
            None => (number(range)?, number(range)?),
        };
        ensure!(from <= to, "{range:?} ends before it begins");
        (from..=to).step_by(step as usize).for_each(|n| set |= 1u64 << n);
    }
    Ok(set)
}

impl Cron {
    /// Returns the next matching time after `after`. A local time that a clock change skips is shifted forward by
    /// the length of the gap; one that occurs twice matches once.
    pub fn next(&self, after: &Zoned) -> Option<Zoned> {
        let start = after.datetime().with().second(0).subsec_nanosecond(0).build().ok()?;
        let mut t = start.checked_add(1.minute()).ok()?;
        // The 29th of February on a given weekday may be 40 years away.
        let end = start.checked_add(41.years()).ok()?;
        while t < end {
            t = match self.skip(t)? {
                Some(later) => later,
                None => match t.to_zoned(after.time_zone().clone()) {
                    Ok(due) if due > *after => return Some(due),
                    _ => t.checked_add(1.minute()).ok()?,
                },
            };
        }
        None
    }

    /// Returns the next candidate if `t` does not match, and `Some(None)` if it does. `None` means that the
    /// calendar ends.
    fn skip(&self, t: DateTime) -> Option<Option<DateTime>> {
        let has = |set: u64, n: i8| set >> n & 1 == 1;
        let midnight = |t: DateTime| t.with().hour(0).minute(0).build();
        if !has(self.months, t.month()) {
            let next = t.with().day(1).hour(0).minute(0).build().ok()?;
            return Some(Some(next.checked_add(1.month()).ok()?));
        }
        let day = has(self.days, t.day());
        let weekday = has(self.weekdays, t.weekday().to_sunday_zero_offset());
        if !(if self.either { day || weekday } else { day && weekday }) {
            return Some(Some(midnight(t).ok()?.checked_add(1.day()).ok()?));
        }
        if !has(self.hours, t.hour()) {
            return Some(Some(t.with().minute(0).build().ok()?.checked_add(1.hour()).ok()?));
        }
        Some(if has(self.minutes, t.minute()) { None } else { Some(t.checked_add(1.minute()).ok()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(cron: &str, after: &str) -> String {
        let cron: Cron = cron.parse().unwrap();
        cron.next(&after.parse().unwrap()).map(|t| t.to_string()).unwrap_or_default()
    }

    #[test]
    fn the_next_time_is_computed() {
        for (cron, after, want) in [
            ("*/15 * * * *", "2026-03-01T10:07:30[UTC]", "2026-03-01T10:15:00+00:00[UTC]"),
            ("0 9 * * mon-fri", "2026-11-13T09:00[UTC]", "2026-11-16T09:00:00+00:00[UTC]"),
            ("30 2 29 2 *", "2026-01-01T00:00[UTC]", "2028-02-29T02:30:00+00:00[UTC]"),
            // A match of either day is enough.
            ("0 0 1 * 7", "2026-11-16T00:00[UTC]", "2026-11-22T00:00:00+00:00[UTC]"),
            ("5,10 8-9/1 * jan *", "2026-11-16T00:00[UTC]", "2027-01-01T08:05:00+00:00[UTC]"),
            ("@daily", "2026-12-31T23:59:59[UTC]", "2027-01-01T00:00:00+00:00[UTC]"),
        ] {
            assert_eq!(next(cron, after), want, "{cron}");
        }
        assert_eq!(next("0 0 31 2 *", "2026-01-01T00:00[UTC]"), "", "there is no such day");
    }

    #[test]
    fn clocks_that_are_set_forward_and_back() {
        // 02:30 does not exist on this day; the run is an hour later.
        assert_eq!(next("30 2 * * *", "2026-03-28T12:00[Europe/Berlin]"), "2026-03-29T03:30:00+02:00[Europe/Berlin]");
        // 02:30 occurs twice on this day; it matches once.
        let first = next("30 2 * * *", "2026-10-24T12:00[Europe/Berlin]");
        assert_eq!(first, "2026-10-25T02:30:00+02:00[Europe/Berlin]");
        assert_eq!(next("30 2 * * *", &first), "2026-10-26T02:30:00+01:00[Europe/Berlin]");
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (cron, want) in [
            ("* * * *", "five parts"),
            ("60 * * * *", "minute"),
            ("* * * foo *", "foo"),
            ("5-1 * * * *", "ends before"),
            ("*/0 * * * *", "step"),
        ] {
            let error = format!("{:#}", cron.parse::<Cron>().unwrap_err());
            assert!(error.contains(want), "{cron}: {error}");
        }
    }
}
