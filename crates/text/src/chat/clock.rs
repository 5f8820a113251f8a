//! The date for templates that write it into the prompt (`strftime_now`).
//!
//! The time is always passed in: a prompt must not depend on when it was rendered a second time.

/// Civil time in UTC.
#[derive(Clone, Copy, Debug)]
struct Civil {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

const SECONDS_PER_DAY: i64 = 86_400;
const DAYS_PER_400_YEARS: i64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01.
const DAYS_TO_1970: i64 = 719_468;

impl Civil {
    /// `unix_s`: seconds since 1970-01-01 00:00 UTC.
    ///
    /// Source: Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`;
    /// the year begins in March there, so that the leap day is its last.
    fn new(unix_s: i64) -> Self {
        let days = unix_s.div_euclid(SECONDS_PER_DAY);
        let second_of_day = unix_s.rem_euclid(SECONDS_PER_DAY);
        let shifted = days + DAYS_TO_1970;
        let era = shifted.div_euclid(DAYS_PER_400_YEARS);
        let day_of_era = shifted.rem_euclid(DAYS_PER_400_YEARS);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let february = 28 + i64::from(is_leap);
        let day_of_year = if month > 2 {
            31 + february + from_march + 1
        } else {
            from_march - 306 + 1
        };
        Self {
            year,
            month,
            day: from_march - (153 * month_from_march + 2) / 5 + 1,
            day_of_year,
            weekday: (days + 4).rem_euclid(7) as usize, // 1970-01-01 was a Thursday
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    /// The text of one letter of Python's `strftime`.
    fn field(&self, letter: char) -> Option<String> {
        let month = MONTHS[self.month as usize - 1];
        let day = DAYS[self.weekday];
        let hour12 = (self.hour + 11) % 12 + 1;
        Some(match letter {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'A' => day.to_owned(),
            'a' => day[..3].to_owned(),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// `format` with the fields of the time `unix_s` (seconds since 1970, UTC), as Python's
/// `datetime.strftime`. Unknown fields are left as they are. `%-d` has no leading zeros.
pub(super) fn strftime(unix_s: i64, format: &str) -> String {
    // Beyond year 9999 Python refuses; the nearest day it knows keeps the arithmetic in range.
    const YEAR_1: i64 = -62_135_596_800;
    const YEAR_9999_END: i64 = 253_402_300_799;
    let civil = Civil::new(unix_s.clamp(YEAR_1, YEAR_9999_END));
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let spec = &rest[at + 1..];
        let (bare, is_bare) = spec.strip_prefix('-').map_or((spec, false), |s| (s, true));
        let Some(field) = bare.chars().next().and_then(|c| Some((c, civil.field(c)?))) else {
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
            (43_200, "%-d %e %I%p %-H %-M", "1  1 12PM 12 0"),
            (0, "100%% %Q % ä%", "100% %Q % ä%"),
            (i64::MAX, "%Y", "9999"),
            (i64::MIN, "%Y", "1"),
        ] {
            assert_eq!(strftime(unix_s, format), expected, "{unix_s} {format}");
        }
    }
}
