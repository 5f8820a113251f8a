//! Progress on stderr: bars on a terminal, else occasional lines.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use indicatif::{
    HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle,
};
use paceline_board::previews::announcement;
use paceline_cluster::machine;
use paceline_store::{FileProgress, PlainProgress, PullPreview, PullProgress};

use crate::output::print_err;
use crate::terminal;

/// Redraw interval of an idle bar (spinner and clock).
const TICK: Duration = Duration::from_millis(120);

/// The kind of progress for this process's stderr.
pub(crate) fn on_stderr() -> Box<dyn PullProgress> {
    if std::io::stderr().is_terminal() {
        let target = ProgressDrawTarget::stderr();
        Box::new(ProgressLines::new(target, terminal::columns()))
    } else {
        Box::new(AnnouncedLines(PlainProgress::new(|line: &str| {
            print_err(line)
        })))
    }
}

/// Text lines, and a selected model's size and licence.
struct AnnouncedLines<P>(P);

impl<P: PullProgress> PullProgress for AnnouncedLines<P> {
    fn selected(&mut self, model: &PullPreview) {
        for line in announcement(model, machine::memory()) {
            self.0.message(&line);
        }
    }

    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.0.start(label, total, done);
    }

    fn advance(&mut self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn message(&mut self, text: &str) {
        self.0.message(text);
    }

    fn finish(&mut self) {
        self.0.finish();
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

/// Bars with speed and remaining time, or a spinner with elapsed time: one for the current part,
/// below those of its files.
struct ProgressLines {
    lines: MultiProgress,
    columns: Option<u16>,
    part: Option<ProgressBar>,
    /// A bar for each connection that has a file, with the file's label.
    files: Vec<Option<(String, ProgressBar)>>,
}

impl ProgressLines {
    fn new(target: ProgressDrawTarget, columns: Option<u16>) -> Self {
        Self {
            lines: MultiProgress::with_draw_target(target),
            columns,
            part: None,
            files: Vec::new(),
        }
    }

    /// A bar above the part's.
    fn add(&self, label: &str, total: Option<u64>, done: u64) -> ProgressBar {
        let bar = match &self.part {
            Some(part) => self.lines.insert_before(part, ProgressBar::hidden()),
            None => self.lines.add(ProgressBar::hidden()),
        };
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_style(style(total.is_some(), self.columns));
        bar.set_message(short(label, self.columns));
        // Excludes bytes of an earlier run from the speed.
        bar.set_position(done);
        bar.reset_eta();
        bar.enable_steady_tick(TICK);
        bar
    }

    fn show(&mut self, connection: usize, file: &FileProgress) {
        let shown = self.files[connection].take();
        let same = shown.filter(|(label, bar)| {
            let same = *label == file.label && file.done >= bar.position();
            if !same {
                self.lines.remove(bar);
            }
            same
        });
        if file.label.is_empty() {
            return;
        }
        let (label, bar) = same.unwrap_or_else(|| {
            let bar = self.add(&file.label, file.total, file.done);
            (file.label.clone(), bar)
        });
        bar.set_position(file.done);
        self.files[connection] = Some((label, bar));
    }
}

impl PullProgress for ProgressLines {
    fn selected(&mut self, model: &PullPreview) {
        for line in announcement(model, machine::memory()) {
            self.message(&line);
        }
    }

    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        if let Some(part) = self.part.take() {
            self.lines.remove(&part);
        }
        self.part = Some(self.add(label, total, done));
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(part) = &self.part {
            part.inc(bytes);
        }
    }

    fn files(&mut self, current: &[FileProgress]) {
        self.files.resize(current.len(), None);
        for (connection, file) in current.iter().enumerate() {
            self.show(connection, file);
        }
    }

    fn message(&mut self, text: &str) {
        self.lines.suspend(|| print_err(text));
    }

    fn finish(&mut self) {
        let files = self.files.drain(..).flatten().map(|(_, bar)| bar);
        for bar in files.chain(self.part.take()) {
            bar.finish_and_clear();
            self.lines.remove(&bar);
        }
    }
}

impl Drop for ProgressLines {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Columns of a bar without its label: speed, remaining time, and a bar of ten columns.
const BESIDE: usize = 60;
/// Least columns of a label before a bar: the number of a split model's part.
const LABEL_MIN: usize = 20;

/// Style of a bar for a terminal of `columns`. It never exceeds a line: a narrow terminal has no
/// bar.
fn style(sized: bool, columns: Option<u16>) -> ProgressStyle {
    let template = match sized {
        true if label_columns(columns) >= LABEL_MIN => {
            "{spinner} {msg} {wide_bar} {percent:>3} % of {binary_total_bytes}, \
             {binary_bytes_per_sec}, {eta} left"
        }
        true => "{spinner} {wide_msg} {percent:>3} %",
        false => "{spinner} {wide_msg} {binary_bytes}, {elapsed}",
    };
    let style = ProgressStyle::with_template(template).expect("the templates are constant");
    // Before the first bytes indicatif says that 0 s are left.
    style.with_key("eta", |state: &ProgressState, out: &mut dyn Write| {
        let left = HumanDuration(state.eta());
        let _ = match state.per_sec() > 0.0 {
            true => write!(out, "{left:#}"),
            false => write!(out, "?"),
        };
    })
}

/// Columns for a label before a bar.
fn label_columns(columns: Option<u16>) -> usize {
    columns.map_or(usize::MAX, |columns| {
        usize::from(columns).saturating_sub(BESIDE)
    })
}

/// The end of a label that is too long, which tells the parts of a model apart.
fn short(label: &str, columns: Option<u16>) -> String {
    let (room, length) = (label_columns(columns), label.chars().count());
    match room {
        room if length <= room || room < LABEL_MIN => label.to_owned(),
        room => std::iter::once('…')
            .chain(label.chars().skip(length + 1 - room))
            .collect(),
    }
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
    fn long_labels_keep_their_end() {
        let label = "Kimi-K2-Instruct-UD-Q2_K_XL-00003-of-00008.gguf";
        assert_eq!(short(label, Some(80)), "…00003-of-00008.gguf");
        assert_eq!(short(label, Some(120)).chars().count(), 47);
        assert_eq!(short(label, Some(40)), label, "cut by its style");
        assert_eq!(short(label, None), label);
    }

    #[test]
    fn each_bar_takes_one_line_of_any_terminal() {
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
                let mut lines = ProgressLines::new(target, Some(columns));
                lines.start("5 files", total, 0);
                let file = |label: &str| FileProgress {
                    label: label.to_owned(),
                    total,
                    done: 7 << 20,
                };
                lines.files(&[file(label), FileProgress::default(), file("b.gguf")]);
                assert_eq!(lines.files.iter().flatten().count(), 2);
                lines.advance(7 << 20);
                for (_, bar) in lines.files.iter().flatten() {
                    bar.tick();
                }
                lines.finish();
                assert!(lines.files.is_empty() && lines.part.is_none());
                let widest = widest.load(Ordering::Relaxed);
                assert!(
                    (1..=usize::from(columns)).contains(&widest),
                    "{label} {columns}: {widest}"
                );
            }
        }
    }
}
