//! Exchange of NCCL's unique id as in MLX: rank 0 listens and sends each connection the 128 bytes.
//!
//! Connections do not identify themselves, so any counts as a rank. Source: `nccl.cpp` of
//! ml-explore/mlx at 846d1762.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use super::NcclJoinError;
use paceline_comm::Deadline;
use paceline_comm::provider::now;

/// Pause between attempts to connect. MLX waits 500 ms; a shorter pause does not disturb its rank
/// 0.
const RETRY: Duration = Duration::from_millis(50);

fn left(by: Deadline) -> Result<Duration, NcclJoinError> {
    let left = by.left(now());
    if left.is_zero() {
        Err(NcclJoinError::Late)
    } else {
        Ok(left)
    }
}

/// Sends `id` to `others` connections at `addr`.
pub(super) fn serve_id(
    addr: SocketAddr,
    others: u32,
    id: &[u8; 128],
    by: Deadline,
) -> Result<(), NcclJoinError> {
    let system = |source| NcclJoinError::Meet { addr, source };
    let listener = TcpListener::bind(addr).map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let mut told = 0;
    while told < others {
        match listener.accept() {
            Ok((mut caller, _)) => {
                caller.set_nonblocking(false).map_err(system)?;
                caller.set_write_timeout(Some(left(by)?)).map_err(system)?;
                // A connection that was closed was no rank.
                told += u32::from(caller.write_all(id).is_ok());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(RETRY.min(left(by)?));
            }
            Err(error) => return Err(system(error)),
        }
    }
    Ok(())
}

/// Fetches the id from rank 0 at `addr`.
pub(super) fn fetch_id(addr: SocketAddr, by: Deadline) -> Result<[u8; 128], NcclJoinError> {
    let mut id = [0; 128];
    loop {
        let heard = TcpStream::connect_timeout(&addr, left(by)?).and_then(|mut stream| {
            stream.set_read_timeout(Some(by.left(now()).max(RETRY)))?;
            stream.read_exact(&mut id)
        });
        match heard {
            Ok(()) => return Ok(id),
            Err(_) => thread::sleep(RETRY.min(left(by)?)),
        }
    }
}
