//! A device: opened once, used by one thread at a time.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use paceline_base::lock;
use wgpu::{
    Adapter, Backends, BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages,
    CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, ComputePipeline,
    ComputePipelineDescriptor, Device, DeviceDescriptor, DeviceType, ErrorFilter, Instance,
    InstanceDescriptor, InstanceFlags, Limits, MapMode, PipelineCompilationOptions, PollType,
    Queue, ShaderModuleDescriptor, ShaderSource,
};

use crate::Error;

/// Time limit of a submission. Drivers reset a card after 2 to 10 s; lavapipe on two busy cores
/// takes 5 s for the largest one.
const LIMIT: Duration = Duration::from_secs(60);

/// Most bytes of a buffer: 1 Mi rows of eight columns. Beyond, a submission takes longer without
/// being faster per row.
const BUFFER_BYTES_MAX: u64 = 64 << 20;

/// Rows of a block, unless the adapter's limits or wide rows reduce them: 8 MiB of a column.
const ROWS_MAX: u64 = 1 << 20;

/// Most cached kernels; users' expressions compile more.
const PIPELINES_MAX: usize = 64;

/// Bytes of shared memory of the largest kernel.
const WORKGROUP_BYTES: u32 = 16 << 10;

/// Buffers of the widest kernel: parameters, signatures, result and four columns.
const BUFFERS: u32 = 7;

/// Whether a software adapter, which runs on the CPU, counts as a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Software {
    /// It does, if there is no other: for tests.
    Allowed,
    /// It does not: the CPU's own kernels are faster.
    Refused,
}

/// A graphics processor. All methods block until the device has finished, 60 s at most; threads are
/// serialised.
pub struct Gpu {
    label: String,
    is_software: bool,
    device: Device,
    queue: Queue,
    buffer_bytes_max: u64,
    groups_max: u32,
    pipelines: Mutex<BTreeMap<String, ComputePipeline>>,
    lost: Arc<Mutex<Option<String>>>,
    turn: Mutex<()>,
}

pub(crate) struct KernelDispatch<'a> {
    pub(crate) pipeline: &'a ComputePipeline,
    pub(crate) buffers: &'a [(u32, &'a Buffer)],
    pub(crate) groups: u32,
}

/// A kernel's name and text.
#[derive(Clone, Copy)]
pub(crate) struct Kernel<'a> {
    pub(crate) entry: &'a str,
    /// Parts of its text, in order.
    pub(crate) text: &'a [&'a str],
}

impl Gpu {
    /// Opens the best adapter of this machine: a discrete card before one with shared memory,
    /// software last.
    ///
    /// # Errors
    /// [`Error::NoAdapter`], [`Error::Refused`].
    pub fn open(software: Software) -> Result<Self, Error> {
        let instance = Instance::new(InstanceDescriptor {
            backends: Backends::PRIMARY,
            flags: InstanceFlags::empty(),
            ..InstanceDescriptor::new_without_display_handle()
        });
        let found = ready(instance.enumerate_adapters(Backends::PRIMARY)).unwrap_or_default();
        let (mut fit, mut seen) = (Vec::new(), Vec::new());
        for adapter in found {
            match unfit(&adapter, software) {
                None => fit.push(adapter),
                Some(why) => seen.push(format!("{} ({why})", label(&adapter))),
            }
        }
        fit.sort_by_key(rank);
        let best = fit.into_iter().next();
        Self::on(&best.ok_or(Error::NoAdapter { seen })?)
    }

    fn on(adapter: &Adapter) -> Result<Self, Error> {
        let label = label(adapter);
        let limits = adapter.limits();
        let asked = ready(adapter.request_device(&DeviceDescriptor {
            label: Some("paceline"),
            required_limits: limits.clone(),
            ..DeviceDescriptor::default()
        }));
        let refused = |reason: String| Error::Refused {
            label: label.clone(),
            reason,
        };
        let asked = asked.ok_or_else(|| refused("it did not answer".to_owned()))?;
        let (device, queue) = asked.map_err(|error| refused(error.to_string()))?;
        let lost = Arc::new(Mutex::new(None));
        let note = Arc::clone(&lost);
        device.set_device_lost_callback(move |reason, message| {
            lock(&note).get_or_insert(format!("{reason:?} {message}"));
        });
        let note = Arc::clone(&lost);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&note).get_or_insert(error.to_string());
        }));
        Ok(Self {
            is_software: adapter.get_info().device_type == DeviceType::Cpu,
            buffer_bytes_max: buffer_bytes_max(&limits),
            groups_max: limits.max_compute_workgroups_per_dimension,
            label,
            device,
            queue,
            pipelines: Mutex::default(),
            lost,
            turn: Mutex::default(),
        })
    }

    /// The adapter, its interface, and whether it is software.
    pub fn label(&self) -> &str {
        &self.label
    }

    pub const fn is_software(&self) -> bool {
        self.is_software
    }

    /// Most rows of a call, each of `row_bytes` bytes in the widest buffer.
    pub fn rows_max(&self, row_bytes: u64) -> u64 {
        // The kernels with the fewest rows per workgroup have 64.
        let by_groups = u64::from(self.groups_max) * 64;
        let by_bytes = self.buffer_bytes_max / row_bytes.max(12);
        ROWS_MAX.min(by_groups).min(by_bytes).max(1)
    }

    /// Most bytes of a buffer.
    pub const fn bytes_max(&self) -> u64 {
        self.buffer_bytes_max
    }

    /// Most workgroups of a dispatch.
    pub(crate) const fn groups_max(&self) -> u32 {
        self.groups_max
    }

    /// Why the device is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        lock(&self.lost).clone()
    }

    /// Simulates the loss of the device, as by a driver reset.
    pub fn lose(&self) {
        self.device.destroy();
    }

    /// Locks the device for this thread.
    pub(crate) fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    pub(crate) fn pipeline(&self, kernel: Kernel<'_>) -> Result<ComputePipeline, Error> {
        let text = kernel.text.concat();
        let key = format!("{} {text}", kernel.entry);
        if let Some(pipeline) = lock(&self.pipelines).get(&key) {
            return Ok(pipeline.clone());
        }
        let scope = self.device.push_error_scope(ErrorFilter::Validation);
        let module = self.device.create_shader_module(ShaderModuleDescriptor {
            label: Some(kernel.entry),
            source: ShaderSource::Wgsl(text.into()),
        });
        let pipeline = self
            .device
            .create_compute_pipeline(&ComputePipelineDescriptor {
                label: Some(kernel.entry),
                layout: None,
                module: &module,
                entry_point: Some(kernel.entry),
                compilation_options: PipelineCompilationOptions::default(),
                cache: None,
            });
        if let Some(error) = ready(scope.pop()).flatten() {
            return Err(self.lost_error().unwrap_or_else(|| Error::Kernel {
                label: self.label.clone(),
                kernel: kernel.entry.to_owned(),
                reason: error.to_string(),
            }));
        }
        let mut kept = lock(&self.pipelines);
        if kept.len() >= PIPELINES_MAX {
            kept.clear();
        }
        kept.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// A buffer with these bytes, a nonzero multiple of four.
    pub(crate) fn filled(&self, bytes: &[u8]) -> Result<Buffer, Error> {
        let buffer = self.room(bytes.len() as u64)?;
        self.queue.write_buffer(&buffer, 0, bytes);
        Ok(buffer)
    }

    /// A buffer of zeros.
    pub(crate) fn room(&self, bytes: u64) -> Result<Buffer, Error> {
        if bytes > self.buffer_bytes_max {
            return Err(Error::Bytes {
                label: self.label.clone(),
                bytes,
                most: self.buffer_bytes_max,
            });
        }
        Ok(self.device.create_buffer(&BufferDescriptor {
            label: None,
            size: bytes.max(4),
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        }))
    }

    /// Dispatches kernels in order, and reads `result`. Each workgroup signs `done` when it ends.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Late`]: no result is valid.
    pub(crate) fn execute(
        &self,
        steps: &[KernelDispatch<'_>],
        done: &Buffer,
        result: &Buffer,
    ) -> Result<Vec<u8>, Error> {
        if let Some(error) = self.lost_error() {
            return Err(error);
        }
        let mut encoder = self
            .device
            .create_command_encoder(&CommandEncoderDescriptor { label: None });
        for step in steps {
            self.encode(&mut encoder, step);
        }
        let staging = self.device.create_buffer(&BufferDescriptor {
            label: None,
            size: result.size() + 4,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        encoder.copy_buffer_to_buffer(result, 0, &staging, 0, result.size());
        encoder.copy_buffer_to_buffer(done, 0, &staging, result.size(), 4);
        let mut bytes = self.submit(encoder, &staging)?;
        let signed = bytes.split_off(result.size() as usize);
        let signed = signed
            .first_chunk()
            .map_or(0, |word| u32::from_le_bytes(*word));
        let groups: u32 = steps.iter().map(|step| step.groups).sum();
        if signed != groups {
            return Err(self.lose_for(format!("{signed} of {groups} workgroups have ended")));
        }
        Ok(bytes)
    }

    fn encode(&self, encoder: &mut CommandEncoder, step: &KernelDispatch<'_>) {
        let entries: Vec<BindGroupEntry<'_>> = step
            .buffers
            .iter()
            .map(|(binding, buffer)| BindGroupEntry {
                binding: *binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let group = self.device.create_bind_group(&BindGroupDescriptor {
            label: None,
            layout: &step.pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        pass.set_pipeline(step.pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(step.groups, 1, 1);
    }

    fn submit(&self, encoder: CommandEncoder, staging: &Buffer) -> Result<Vec<u8>, Error> {
        let index = self.queue.submit([encoder.finish()]);
        let (sender, mapped) = channel();
        staging.slice(..).map_async(MapMode::Read, move |outcome| {
            let _ = sender.send(outcome); // nobody waits for a device that was late
        });
        let waited = self.device.poll(PollType::Wait {
            submission_index: Some(index),
            timeout: Some(LIMIT),
        });
        if let Some(error) = self.lost_error() {
            return Err(error);
        }
        match (waited, mapped.try_recv()) {
            (Ok(_), Ok(Ok(()))) => {}
            (Err(wgpu::PollError::Timeout), _) => {
                self.lose_for(format!("it has not ended within {LIMIT:?}"));
                let label = self.label.clone();
                return Err(Error::Late {
                    label,
                    limit: LIMIT,
                });
            }
            (waited, _) => return Err(self.lose_for(format!("no result after {waited:?}"))),
        }
        let view = staging.slice(..).get_mapped_range();
        let bytes = view.map(|view| view.to_vec());
        staging.unmap();
        bytes.map_err(|error| self.lose_for(error.to_string()))
    }

    /// Marks the device as lost.
    fn lose_for(&self, reason: String) -> Error {
        lock(&self.lost).get_or_insert(reason);
        self.lost_error().expect("it was just lost")
    }

    fn lost_error(&self) -> Option<Error> {
        let label = self.label.clone();
        self.lost().map(|reason| Error::Lost { label, reason })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("label", &self.label)
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

/// The adapter's name, interface, and whether it is software.
fn label(adapter: &Adapter) -> String {
    let info = adapter.get_info();
    let software = match info.device_type {
        DeviceType::Cpu => ", software",
        _ => "",
    };
    format!("{} ({}{software})", info.name, info.backend)
}

/// Discrete cards before chips with shared memory, software last.
fn rank(adapter: &Adapter) -> u8 {
    match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

/// Why an adapter is rejected.
fn unfit(adapter: &Adapter, software: Software) -> Option<String> {
    if adapter.get_info().device_type == DeviceType::Cpu && software == Software::Refused {
        return Some("not asked for".to_owned());
    }
    let limits = adapter.limits();
    let needed = [
        (
            "threads a workgroup",
            limits.max_compute_invocations_per_workgroup,
            256,
        ),
        (
            "threads a workgroup in a row",
            limits.max_compute_workgroup_size_x,
            256,
        ),
        (
            "bytes of shared memory",
            limits.max_compute_workgroup_storage_size,
            WORKGROUP_BYTES,
        ),
        (
            "buffers a kernel",
            limits.max_storage_buffers_per_shader_stage,
            BUFFERS,
        ),
    ];
    let missing = needed.into_iter().find(|(_, has, needs)| has < needs);
    missing.map(|(what, has, needs)| format!("{has} {what}, expected {needs}"))
}

fn buffer_bytes_max(limits: &Limits) -> u64 {
    let bound = limits.max_storage_buffer_binding_size;
    // Whole f64 values.
    bound.min(limits.max_buffer_size).min(BUFFER_BYTES_MAX) / 8 * 8
}

/// The outcome of a future that is ready at once, as all of wgpu's are on these interfaces.
fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}
