//! Transports between ranks: checks `--plaintext`, and hints for errors.

use std::env;

use paceline_comm::tcp::JoinError;
use paceline_comm::{Backend, InitError, Plaintext};
use paceline_comm_interop::mpi::StartError;
use paceline_comm_interop::{MlxError, mlx_ring};
use paceline_comm_rdma::{RdmaError, SettingsError};

use crate::error::{Error, misused};

/// Rejects an unencrypted transport without `--plaintext`.
pub(crate) fn asked_for(backend: Backend, plaintext: bool) -> Result<Plaintext, Error> {
    match (backend.is_plaintext(), plaintext) {
        (_, true) => Ok(Plaintext::Allowed),
        (false, false) => Ok(Plaintext::Refused),
        (true, false) => Err(misused(
            format!("{backend} is plaintext: what ranks say to each other can be read by others"),
            TRUSTED,
        )),
    }
}

pub(crate) fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

const BUILD_WITH_MPI: &str = "build paceline with `--features mpi`, which needs mpicc and libclang";

const TRUSTED: &str = "--plaintext allows it, for cables and networks that you trust";

/// The hint for a missing or untrusted transport.
pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let launched =
        "`paceline launch --backend ring|jaccl|nccl|mpi -- PROGRAM` sets it for its ranks";
    if let Some(JoinError::Unprotected { .. }) = join_error(cause) {
        return Some(
            "a group key encrypts: give all ranks the same, or addresses of this machine alone"
                .to_owned(),
        );
    }
    let text = match (
        cause.downcast_ref(),
        cause.downcast_ref(),
        cause.downcast_ref(),
    ) {
        (Some(SettingsError::Missing { .. }), ..) => launched,
        (_, Some(InitError::Wire(error)), _)
            if matches!(error.downcast_ref(), Some(StartError::Unavailable)) =>
        {
            BUILD_WITH_MPI
        }
        (_, _, Some(MlxError::Mpi(StartError::Unavailable))) => BUILD_WITH_MPI,
        (_, _, Some(MlxError::Missing { .. })) => launched,
        (_, _, Some(MlxError::Plaintext { .. }))
        | (_, _, Some(MlxError::Ring(mlx_ring::JoinError::Plaintext { .. }))) => TRUSTED,
        (_, _, Some(MlxError::Ring(mlx_ring::JoinError::Strangers { .. }))) => {
            "something else connects to this port: end it, or give the ring other ports \
             (`paceline launch --starting-port`)"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

/// The join error inside any wrapper: transparent errors are not a link of the chain of causes.
fn join_error<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a JoinError> {
    let of_rdma = |error: &'a RdmaError| match error {
        RdmaError::Join(error) => Some(error),
        _ => None,
    };
    let of_init = |error: &'a InitError| match error {
        InitError::Join(error) => Some(error),
        InitError::Wire(error) => error.downcast_ref::<RdmaError>().and_then(of_rdma),
        _ => None,
    };
    if let Some(error) = cause.downcast_ref() {
        return of_init(error);
    }
    match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(paceline_worker::Error::Join(error)), _) => of_init(error),
        (_, Some(MlxError::Jaccl(error))) => of_init(error),
        _ => cause.downcast_ref(),
    }
}

#[cfg(test)]
mod tests {
    use paceline_base::Rank;

    use super::*;

    #[test]
    fn an_unprotected_address_has_advice_in_whatever_wrapping() {
        let error = || JoinError::Unprotected {
            addr: "192.0.2.1:1".parse().unwrap(),
        };
        let wrapped: [Box<dyn std::error::Error>; 5] = [
            Box::new(error()),
            Box::new(InitError::Join(error())),
            Box::new(InitError::wire(RdmaError::Join(error()))),
            Box::new(MlxError::Jaccl(InitError::wire(RdmaError::Join(error())))),
            Box::new(paceline_worker::Error::Join(InitError::Join(error()))),
        ];
        for wrapped in &wrapped {
            let hint = hint(&**wrapped).unwrap();
            assert!(hint.starts_with("a group key encrypts"), "{hint}");
        }
        let backend = Backend::Rdma;
        assert_eq!(hint(&InitError::NoProvider { backend }), None);
    }

    #[test]
    fn a_strangers_port_has_advice() {
        let error = MlxError::Ring(mlx_ring::JoinError::Strangers {
            rank: Rank(1),
            addr: "127.0.0.1:1".parse().unwrap(),
            callers: Vec::new(),
        });
        assert!(hint(&error).unwrap().contains("--starting-port"));
    }

    #[test]
    fn plaintext_is_asked_for_by_name() {
        for backend in Backend::ALL {
            assert_eq!(asked_for(backend, true).unwrap(), Plaintext::Allowed);
            let unasked = asked_for(backend, false);
            assert_eq!(unasked.is_err(), backend.is_plaintext(), "{backend}");
        }
        let error = asked_for(Backend::Rdma, false).unwrap_err().to_string();
        assert!(error.starts_with("rdma is plaintext"), "{error}");
    }
}
