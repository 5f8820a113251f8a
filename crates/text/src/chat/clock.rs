//! The date for templates that write it into the prompt (`strftime_now`).
//!
//! The time is always passed in: a prompt must not depend on when it was rendered a second time.

use time::OffsetDateTime;

/// The text of one letter of Python's `strftime`.
fn field(date: OffsetDateTime, letter: char) -> Option<String> {
    let (month, weekday) = (date.month().to_string(), date.weekday().to_string());
    Some(match letter {
        'Y' => date.year().to_string(),
        'y' => format!("{:02}", date.year() % 100),
        'm' => format!("{:02}", u8::from(date.month())),
        'B' => month,
        'b' | 'h' => month[..3].to_owned(),
        'd' => format!("{:02}", date.day()),
        'e' => format!("{:2}", date.day()),
        'j' => format!("{:03}", date.ordinal()),
        'A' => weekday,
        'a' => weekday[..3].to_owned(),
        'H' => format!("{:02}", date.hour()),
        'I' => format!("{:02}", (date.hour() + 11) % 12 + 1),
        'M' => format!("{:02}", date.minute()),
        'S' => format!("{:02}", date.second()),
        'p' => if date.hour() < 12 { "AM" } else { "PM" }.to_owned(),
        'F' => ['Y', 'm', 'd']
            .map(|it| field(date, it).unwrap_or_default())
            .join("-"),
        'T' => ['H', 'M', 'S']
            .map(|it| field(date, it).unwrap_or_default())
            .join(":"),
        'Z' => "UTC".to_owned(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

/// `format` with the fields of the time `unix_s` (seconds since 1970, UTC), as Python's
/// `datetime.strftime`. Unknown fields are left as they are. `%-d` has no leading zeros.
pub fn strftime(unix_s: i64, format: &str) -> String {
    // Beyond year 9999 Python refuses; the nearest day it knows keeps the arithmetic in range.
    const YEAR_1: i64 = -62_135_596_800;
    const YEAR_9999_END: i64 = 253_402_300_799;
    let date = OffsetDateTime::from_unix_timestamp(unix_s.clamp(YEAR_1, YEAR_9999_END));
    let date = date.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let spec = &rest[at + 1..];
        let (bare, is_bare) = spec.strip_prefix('-').map_or((spec, false), |s| (s, true));
        let Some(field) = bare.chars().next().and_then(|c| Some((c, field(date, c)?))) else {
            out.push('%');
            rest = spec;
            continue;
        };
        let (letter, text) = field;
        match text.trim_start_matches('0') {
            _ if !is_bare => out.push_str(&text),
            "" => out.push('0'),
            trimmed => out.push_str(trimmed.trim_start()),
        }
        rest = &bare[letter.len_utf8()..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        for (unix_s, format, expected) in [
            (
                0,
                "%Y-%m-%d %H:%M:%S %A %j",
                "1970-01-01 00:00:00 Thursday 001",
            ),
            (
                1_785_056_887,
                "%d %b %Y %y %B %a %p %I",
                "26 Jul 2026 26 July Sun AM 09",
            ),
            (951_782_400, "%F %j", "2000-02-29 060"),
            (951_868_800, "%F %j", "2000-03-01 061"),
            (4_107_542_400, "%F %j", "2100-03-01 060"),
            (1_735_603_200, "%F %j %A", "2024-12-31 366 Tuesday"),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (951_782_399, "%FT%TZ", "2000-02-28T23:59:59Z"),
            (43_200, "%-d %e %I%p %-H %-M", "1  1 12PM 12 0"),
            (0, "100%% %Q % ä%", "100% %Q % ä%"),
            (i64::MAX, "%Y", "9999"),
            (i64::MIN, "%Y", "1"),
        ] {
            assert_eq!(strftime(unix_s, format), expected, "{unix_s} {format}");
        }
    }
}
