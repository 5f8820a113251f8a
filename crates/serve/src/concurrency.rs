//! Concurrency limit of requests to the model: in total, and per client if there are several.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::access::ClientIdentity;
use crate::rejection::Rejection;

#[derive(Debug)]
pub(crate) struct ConcurrencyLimit {
    all: usize,
    of_one: usize,
    taken: Mutex<PermitCounts>,
}

#[derive(Debug, Default)]
struct PermitCounts {
    all: usize,
    /// Entries are above 0, so there are at most as many as permits.
    by_client: HashMap<ClientIdentity, usize>,
}

/// A permit; dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct ConcurrencyPermit {
    places: Arc<ConcurrencyLimit>,
    client: ClientIdentity,
}

impl ConcurrencyLimit {
    pub(crate) fn new(all: usize, of_one: usize) -> Self {
        let taken = Mutex::default();
        Self { all, of_one, taken }
    }

    fn lock(&self) -> MutexGuard<'_, PermitCounts> {
        self.taken.lock().expect("nothing panics with the lock")
    }

    pub(crate) fn taken(&self) -> usize {
        self.lock().all
    }

    /// A permit for `client`; with `shares` its own limit applies too.
    pub(crate) fn take(
        self: &Arc<Self>,
        client: &ClientIdentity,
        shares: bool,
    ) -> Result<ConcurrencyPermit, Rejection> {
        let mut taken = self.lock();
        let own = taken.by_client.get(client).copied().unwrap_or(0);
        if shares && own >= self.of_one {
            let limit = self.of_one;
            return Err(Rejection::TooManyOfOne { limit });
        }
        if taken.all >= self.all {
            let limit = self.all;
            return Err(Rejection::TooManyRequests { limit });
        }
        taken.all += 1;
        taken.by_client.insert(client.clone(), own + 1);
        Ok(ConcurrencyPermit {
            places: Arc::clone(self),
            client: client.clone(),
        })
    }
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.all -= 1;
        if let Some(own) = taken.by_client.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                taken.by_client.remove(&self.client);
            }
        }
    }
}
