//! Reads memory of other processes of this machine.

/// Copies `into.len()` bytes at `address` of a process of this user; false if any of them cannot be
/// read. The process may have ended, the address may be unmapped, or the system forbids reads
/// between processes (`kernel.yama.ptrace_scope`, containers). Blocks for the copy only.
#[cfg(target_os = "linux")]
pub(crate) fn read(process: u32, address: u64, into: &mut [u8]) -> bool {
    let Ok(process) = libc::pid_t::try_from(process) else {
        return false;
    };
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        let local = libc::iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        };
        let Ok(from) = usize::try_from(address.wrapping_add(done as u64)) else {
            return false;
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(from),
            iov_len: rest.len(),
        };
        // SAFETY: `local` is memory that this function may write to. The kernel looks the remote
        // address up in the other process and refuses unmapped memory.
        let count = unsafe { libc::process_vm_readv(process, &local, 1, &remote, 1, 0) };
        match usize::try_from(count) {
            Ok(count) if count > 0 => done += count,
            _ => return false,
        }
    }
    true
}

/// Other systems do not allow this without privileges.
#[cfg(not(target_os = "linux"))]
pub(crate) fn read(_process: u32, _address: u64, _into: &mut [u8]) -> bool {
    false
}

/// Permits the process `reader` to read this one's memory, where Yama demands that.
#[cfg(target_os = "linux")]
pub(crate) fn allow(reader: u32) {
    use rustix::process::{PTracer, Pid, set_ptracer};
    let reader = i32::try_from(reader).ok().and_then(Pid::from_raw);
    // Fails where Yama is absent.
    let _ = reader.map(|reader| set_ptracer(PTracer::ProcessID(reader)));
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allow(_reader: u32) {}
