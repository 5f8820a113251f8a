//! Progress as text lines.

use std::time::{Duration, Instant};

use paceline_base::Bytes;

use crate::PullProgress;

/// Interval of lines: the log of a long download stays readable.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Reports start, end, and a line every few seconds between: for logs without a terminal.
#[derive(Debug)]
pub struct PlainProgress<T> {
    tell: T,
    part: Option<ProgressPart>,
}

impl<T: Fn(&str)> PlainProgress<T> {
    /// Passes lines to `tell`.
    pub const fn new(tell: T) -> Self {
        Self { tell, part: None }
    }
}

#[derive(Debug)]
struct ProgressPart {
    label: String,
    total: Option<u64>,
    done: u64,
    fresh: u64,
    started: Instant,
    told: Instant,
}

impl ProgressPart {
    fn line(&self) -> String {
        let speed =
            Bytes((self.fresh as f64 / self.started.elapsed().as_secs_f64().max(1e-3)) as u64);
        let (label, done) = (&self.label, Bytes(self.done));
        match self.total.filter(|total| *total > 0) {
            Some(total) => {
                let percent = u128::from(self.done) * 100 / u128::from(total);
                format!(
                    "{label}: {done} of {} ({percent} %), {speed}/s",
                    Bytes(total)
                )
            }
            None => format!("{label}: {done}, {speed}/s"),
        }
    }
}

impl<T: Fn(&str)> PullProgress for PlainProgress<T> {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        let size = total.map_or(String::new(), |total| format!(", {}", Bytes(total)));
        let resumed = if done > 0 {
            format!(", {} there already", Bytes(done))
        } else {
            String::new()
        };
        (self.tell)(&format!("{label}{size}{resumed}"));
        let now = Instant::now();
        let label = label.to_owned();
        self.part = Some(ProgressPart {
            label,
            total,
            done,
            fresh: 0,
            started: now,
            told: now,
        });
    }

    fn advance(&mut self, bytes: u64) {
        let Some(part) = &mut self.part else { return };
        part.done += bytes;
        part.fresh += bytes;
        if part.told.elapsed() >= LINE_EVERY {
            part.told = Instant::now();
            (self.tell)(&part.line());
        }
    }

    fn message(&mut self, text: &str) {
        (self.tell)(text);
    }

    fn finish(&mut self) {
        if let Some(part) = self.part.take()
            && Some(part.done) == part.total
        {
            let seconds = part.started.elapsed().as_secs_f64();
            let fresh = Bytes(part.fresh);
            (self.tell)(&format!("{}: {fresh} in {seconds:.1} s", part.label));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_share_and_speed() {
        let started = Instant::now();
        let part = |total, done| ProgressPart {
            label: "x".into(),
            total,
            done,
            fresh: 0,
            started,
            told: started,
        };
        assert_eq!(
            part(Some(2048), 1024).line(),
            "x: 1.0 KiB of 2.0 KiB (50 %), 0 B/s"
        );
        assert_eq!(part(Some(0), 0).line(), "x: 0 B, 0 B/s");
        assert_eq!(part(None, u64::MAX / 2).line(), "x: 8192.0 PiB, 0 B/s");
    }
}
