//! Progress on stderr: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use paceline_base::Bytes;
use paceline_store::Progress;

use crate::output::tell;

/// Time between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Redraws of a bar that nothing else moves (the spinner and the clock).
const TICK: Duration = Duration::from_millis(120);

/// The right kind of progress for this process's stderr.
pub(crate) fn on_stderr() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar { bar: None })
    } else {
        Box::new(Lines { part: None })
    }
}

/// A bar with speed and time left, or a spinner with the time gone.
struct Bar {
    bar: Option<ProgressBar>,
}

impl Progress for Bar {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.finish();
        let template = match total {
            Some(_) => {
                "{spinner} {msg} {wide_bar} {percent:>3} % of {binary_total_bytes}, \
                 {binary_bytes_per_sec}, {eta} left"
            }
            None => "{spinner} {msg} {binary_bytes}, {elapsed}",
        };
        let style = ProgressStyle::with_template(template).expect("the template is constant");
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        bar.set_style(style);
        bar.set_message(label.to_owned());
        // Bytes of an earlier run must not count as speed.
        bar.set_position(done);
        bar.reset_eta();
        bar.enable_steady_tick(TICK);
        self.bar = Some(bar);
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn message(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(text)),
            None => tell(text),
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Start, end, and a line every few seconds in between.
struct Lines {
    part: Option<Part>,
}

struct Part {
    label: String,
    total: Option<u64>,
    done: u64,
    fresh: u64,
    started: Instant,
    told: Instant,
}

impl Part {
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

impl Progress for Lines {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        let size = total.map_or(String::new(), |total| format!(", {}", Bytes(total)));
        let resumed = if done > 0 {
            format!(", {} there already", Bytes(done))
        } else {
            String::new()
        };
        tell(format_args!("{label}{size}{resumed}"));
        let now = Instant::now();
        let label = label.to_owned();
        self.part = Some(Part {
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
            tell(part.line());
        }
    }

    fn message(&mut self, text: &str) {
        tell(text);
    }

    fn finish(&mut self) {
        if let Some(part) = self.part.take()
            && Some(part.done) == part.total
        {
            let seconds = part.started.elapsed().as_secs_f64();
            let fresh = Bytes(part.fresh);
            tell(format_args!("{}: {fresh} in {seconds:.1} s", part.label));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_share_and_speed() {
        let started = Instant::now();
        let part = |total, done| Part {
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
