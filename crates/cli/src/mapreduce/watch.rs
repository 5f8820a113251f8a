//! A job's progress on stderr.

use paceline_mapreduce::jobs::Watcher;
use paceline_mapreduce::{Progress, Task};

use crate::output::tell;
use crate::progress;

/// Minimum bytes of a job for a bar; smaller ones are too fast.
const BAR_BYTES: u64 = 1 << 30;

/// Shows the progress of jobs, and reports lost workers.
#[derive(Default)]
pub(super) struct Watches(Option<Watch>);

impl Watcher for Watches {
    fn begin(&mut self, task: &Task) {
        self.0 = Some(Watch::new(task));
    }

    fn hear(&mut self, progress: Progress) {
        if let Some(watch) = &mut self.0 {
            watch.hear(progress);
        }
    }

    fn end(&mut self) {
        self.0 = None;
    }
}

struct Watch {
    bar: Option<Box<dyn paceline_store::Progress>>,
    row_bytes: u64,
    done: u64,
}

impl Watch {
    fn new(task: &Task) -> Self {
        let bytes = task.bytes();
        let bar = (bytes >= BAR_BYTES).then(|| {
            let mut bar = progress::on_stderr();
            bar.start("reading", Some(bytes), 0);
            bar
        });
        Self {
            bar,
            row_bytes: bytes / task.rows().max(1),
            done: 0,
        }
    }

    fn hear(&mut self, progress: Progress) {
        match progress {
            Progress::Rows { done, .. } => {
                if let Some(bar) = &mut self.bar {
                    bar.advance((done - self.done) * self.row_bytes);
                }
                self.done = done;
            }
            Progress::Lost { why, parts } => {
                let text = match parts {
                    0 => format!("{why}; the others go on without it"),
                    _ => format!("{why}; the others compute its {parts} parts"),
                };
                match &mut self.bar {
                    Some(bar) => bar.message(&text),
                    None => tell(text),
                }
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(bar) = &mut self.bar {
            bar.finish();
        }
    }
}
