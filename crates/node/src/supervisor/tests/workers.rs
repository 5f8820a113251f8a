//! Simulated workers: they send messages, die, hang and blame each other.

use super::*;

impl SupervisorHarness {
    /// A worker's message arrives.
    pub(super) fn told(&mut self, rank: Rank, message: FromWorker) {
        match &message {
            FromWorker::Ready(_) => self.worker(rank).ready = true,
            FromWorker::Left { .. } => {
                let worker = self.worker(rank);
                (worker.epoch, worker.ready) = (None, false);
                worker.answers.clear();
            }
            _ => {}
        }
        let event = CrewEvent::Message { rank, message };
        self.step(Event::Worker(event));
    }

    pub(super) fn kill(&mut self, rank: Rank) {
        let worker = self.worker(rank);
        if !worker.alive {
            return;
        }
        worker.alive = false;
        let process = worker.process;
        let after = self.random.ms(60);
        self.plan(after, PlannedEvent::Exit(rank, process));
        self.blame(rank);
    }

    pub(super) fn hang(&mut self, rank: Rank) {
        let worker = self.worker(rank);
        if !worker.alive || worker.hangs {
            return;
        }
        worker.hangs = true;
        let process = worker.process;
        self.plan(
            Duration::from_millis(1500),
            PlannedEvent::Silence(rank, process),
        );
        self.blame(rank);
    }

    /// Ranks of the same epoch detect a lost one, at once or late.
    pub(super) fn blame(&mut self, lost: Rank) {
        for rank in (0..self.workers.len() as u32).map(Rank) {
            let (epoch, alive) = (self.worker(rank).epoch, self.worker(rank).alive);
            let Some(epoch) = epoch.filter(|_| rank != lost && alive) else {
                continue;
            };
            self.worker(rank).answers.clear();
            if !self.random.one_in(4) {
                let failed = FromWorker::Failed {
                    epoch,
                    reason: "the link is closed".to_owned(),
                    blamed: Some(lost.0),
                    interrupted: false,
                };
                self.says(rank, 100, failed);
            }
        }
    }

    /// A leader's next token, or the end of its answer.
    pub(super) fn token(&mut self, rank: Rank, process: u64, epoch: u64, ticket: Ticket) {
        let worker = self.worker(rank);
        let serves = worker.alive && !worker.hangs && worker.process == process;
        if !serves || worker.epoch != Some(epoch) {
            return;
        }
        let Some(&i) = worker.answers.get(&ticket) else {
            return;
        };
        let end = i == length(ticket);
        let reply = if end {
            Reply::Finished {
                text: String::new(),
                reason: Finish::Length,
                drafts: paceline_engine::DraftCounts::default(),
            }
        } else {
            Reply::Token {
                token: token(ticket, i),
                text: String::new(),
                logprobs: None,
            }
        };
        if end {
            worker.answers.remove(&ticket);
        } else {
            worker.answers.insert(ticket, i + 1);
            self.plan(
                Duration::from_millis(4),
                PlannedEvent::Token(rank, process, epoch, ticket),
            );
        }
        let at_us = Some(self.now.as_micros() as u64);
        self.told(
            rank,
            FromWorker::Reply {
                ticket,
                at_us,
                reply,
            },
        );
    }
}
