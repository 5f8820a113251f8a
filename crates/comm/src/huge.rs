//! Buffers in huge pages.

/// Smallest size of a page; advice is for whole ones.
#[cfg(any(target_os = "linux", test))]
const PAGE: usize = 4 << 10;

/// Shortest buffer that can have a huge page in it, on x86-64 and on AArch64 with small pages of
/// 4 KiB.
#[cfg(any(target_os = "linux", test))]
const LEAST: usize = 2 << 20;

/// `count` zeros, in huge pages where the system has them (Linux, `transparent_hugepage` not
/// `never`) and as far as whole ones fit.
///
/// For buffers of several MiB that ranks of one machine reduce or gather: these read each other's
/// memory, and the system looks up every page of it (figures: docs/measurements.md). Any other
/// memory works as well.
pub fn zeros<T: Clone + Default>(count: usize) -> Vec<T> {
    let mut zeros = Vec::with_capacity(count);
    advise(zeros.spare_capacity_mut());
    zeros.resize(count, T::default());
    zeros
}

/// Asks for huge pages for memory that has not been touched, and for the page that it begins in:
/// where the allocator has put only its header before it, a huge page may begin there.
#[cfg(target_os = "linux")]
fn advise<T>(memory: &mut [std::mem::MaybeUninit<T>]) {
    use rustix::mm::{Advice, madvise};
    let start: *mut u8 = memory.as_mut_ptr().cast();
    let before = start as usize % PAGE;
    let whole = (before + size_of_val(memory)) / PAGE * PAGE;
    if size_of_val(memory) >= LEAST {
        // SAFETY: pages that are mapped and in use; the advice changes how they are mapped, not
        // what they hold. Refused, they are only slower.
        let _ = unsafe { madvise(start.sub(before).cast(), whole, Advice::LinuxHugepage) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_memory: &mut [std::mem::MaybeUninit<T>]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_all_lengths() {
        let lengths = [0, 1, PAGE, LEAST / 4, LEAST + 3, 5 * LEAST / 4];
        for length in lengths {
            let mut zeros = zeros::<f32>(length);
            assert_eq!(zeros.len(), length);
            assert!(zeros.iter().all(|zero| *zero == 0.0), "{length}");
            zeros.iter_mut().for_each(|number| *number = 1.0);
        }
    }
}
