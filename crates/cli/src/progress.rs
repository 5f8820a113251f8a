//! Progress on stderr: a bar on a terminal, else occasional lines.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use paceline_store::{PlainProgress, PullProgress};

use crate::output::print_err;
use crate::terminal;

/// Redraw interval of an idle bar (spinner and clock).
const TICK: Duration = Duration::from_millis(120);

/// The kind of progress for this process's stderr.
pub(crate) fn on_stderr() -> Box<dyn PullProgress> {
    if std::io::stderr().is_terminal() {
        Box::new(ProgressLine { bar: None })
    } else {
        Box::new(PlainProgress::new(|line: &str| print_err(line)))
    }
}

/// Delay and interval of notices about silent work.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Prints every few seconds that work continues, until dropped.
pub(crate) struct BusyNotice {
    // Its drop wakes the thread.
    _done: Sender<()>,
}

/// Prints `what` and its duration while the returned value lives. Short work prints nothing.
pub(crate) fn busy(what: impl Into<String>) -> BusyNotice {
    busy_every(SILENCE_MAX, what.into(), print_err)
}

fn busy_every(period: Duration, what: String, say: impl Fn(String) + Send + 'static) -> BusyNotice {
    let (done, wait) = channel();
    std::thread::spawn(move || {
        let start = Instant::now();
        while wait.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
            say(format!("{what} ({:.0} s)", start.elapsed().as_secs_f64()));
        }
    });
    BusyNotice { _done: done }
}

/// A bar with speed and remaining time, or a spinner with elapsed time.
struct ProgressLine {
    bar: Option<ProgressBar>,
}

impl PullProgress for ProgressLine {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.finish();
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        bar.set_style(style(total.is_some(), label, terminal::columns()));
        bar.set_message(label.to_owned());
        // Excludes bytes of an earlier run from the speed.
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
            Some(bar) => bar.suspend(|| print_err(text)),
            None => print_err(text),
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Columns of a bar without its label: speed, remaining time, and a bar of ten columns.
const BESIDE: usize = 60;

/// Style of a bar for a terminal of `columns`. It never exceeds a line: parts without room are
/// omitted, and a long label is truncated.
fn style(sized: bool, label: &str, columns: Option<u16>) -> ProgressStyle {
    let room = columns.map_or(usize::MAX, usize::from);
    let template = match sized {
        true if label.chars().count() + BESIDE <= room => {
            "{spinner} {msg} {wide_bar} {percent:>3} % of {binary_total_bytes}, \
             {binary_bytes_per_sec}, {eta} left"
        }
        true => "{spinner} {wide_msg} {percent:>3} %",
        false => "{spinner} {wide_msg} {binary_bytes}, {elapsed}",
    };
    ProgressStyle::with_template(template).expect("the templates are constant")
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use indicatif::TermLike;

    use super::*;

    #[test]
    fn long_work_speaks_and_short_work_does_not() {
        let (send, heard) = channel();
        let also = send.clone();
        let say = move |line| also.send(line).unwrap();
        let short = busy_every(Duration::from_secs(3600), "x".into(), |_| {
            panic!("too early")
        });
        let long = busy_every(Duration::from_millis(1), "starting 40 nodes".into(), say);
        for _ in 0..2 {
            let line = heard.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(line.starts_with("starting 40 nodes ("), "{line}");
        }
        drop((short, long, send));
        // Its thread ends and drops the last sender.
        while heard.recv_timeout(Duration::from_secs(60)).is_ok() {}
    }

    /// A terminal that records its widest line.
    #[derive(Debug)]
    struct NarrowTerminal {
        columns: u16,
        widest: Arc<AtomicUsize>,
    }

    impl TermLike for NarrowTerminal {
        fn width(&self) -> u16 {
            self.columns
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.widest
                .fetch_max(text.trim_end().chars().count(), Ordering::Relaxed);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bar_takes_one_line_of_any_terminal() {
        let long = "SmolLM2-135M-Instruct-with-a-name-that-goes-on-and-on.Q4_1.gguf";
        for columns in [20, 40, 80, 200] {
            for (label, total) in [
                ("a.gguf", Some(5 << 40)),
                (long, Some(98 << 20)),
                (long, None),
            ] {
                let widest = Arc::new(AtomicUsize::new(0));
                let target = ProgressDrawTarget::term_like(Box::new(NarrowTerminal {
                    columns,
                    widest: Arc::clone(&widest),
                }));
                let bar = ProgressBar::with_draw_target(total, target);
                bar.set_style(style(total.is_some(), label, Some(columns)));
                bar.set_message(label.to_owned());
                bar.set_position(7 << 20);
                bar.tick();
                bar.abandon();
                let widest = widest.load(Ordering::Relaxed);
                assert!(
                    (1..=usize::from(columns)).contains(&widest),
                    "{label} {columns}: {widest}"
                );
            }
        }
    }
}
