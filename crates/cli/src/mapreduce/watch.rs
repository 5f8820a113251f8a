//! A job's progress on stderr.

use paceline_mapreduce::jobs::Watcher;
use paceline_mapreduce::{JobProgress, JobSpec};

use crate::output::print_err;
use crate::progress;

/// Minimum bytes of a job for a bar; smaller ones are too fast.
const BAR_BYTES: u64 = 1 << 30;

/// Shows the progress of jobs, and reports lost workers.
#[derive(Default)]
pub(super) struct JobWatcher(Option<JobBar>);

impl Watcher for JobWatcher {
    fn begin(&mut self, task: &JobSpec) {
        self.0 = Some(JobBar::new(task));
    }

    fn on_progress(&mut self, progress: JobProgress) {
        if let Some(watch) = &mut self.0 {
            watch.hear(progress);
        }
    }

    fn end(&mut self) {
        self.0 = None;
    }
}

struct JobBar {
    bar: Option<Box<dyn paceline_store::PullProgress>>,
    row_bytes: u64,
    done: u64,
}

impl JobBar {
    fn new(task: &JobSpec) -> Self {
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

    fn hear(&mut self, progress: JobProgress) {
        match progress {
            JobProgress::Rows { done, .. } => {
                if let Some(bar) = &mut self.bar {
                    bar.advance((done - self.done) * self.row_bytes);
                }
                self.done = done;
            }
            JobProgress::Lost { why, parts } => {
                let text = match parts {
                    0 => format!("{why}; the others go on without it"),
                    _ => format!("{why}; the others compute its {parts} parts"),
                };
                match &mut self.bar {
                    Some(bar) => bar.message(&text),
                    None => print_err(text),
                }
            }
        }
    }
}

impl Drop for JobBar {
    fn drop(&mut self) {
        if let Some(bar) = &mut self.bar {
            bar.finish();
        }
    }
}
