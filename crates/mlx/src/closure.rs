//! Functions of arrays that MLX calls: their gradients, and their compiled form.
//!
//! MLX calls such a function with arrays whose values are not there yet. A function must therefore
//! not look at values and must not evaluate. A panic does not cross MLX: it is caught, and MLX gets
//! a failure as the function's result. The panic resumes after MLX's call has returned.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use crate::library::{done, failed};
use crate::table::ObjectHandle;
use crate::{Array, Error, Library, Stream};

/// Inputs of a function and its results.
type Arrays = Vec<Array>;

/// A function that [`Stream::vjp`] differentiates.
pub type Differentiable<'a> = dyn Fn(&[Array]) -> Result<Vec<Array>, Error> + 'a;

/// A function that is noted on a stream.
type StreamFunction = dyn Fn(&Stream, &[Array]) -> Result<Arrays, Error>;

/// A vector of arrays, given back at the end.
pub(crate) struct ArrayVector<'a>(pub(crate) ObjectHandle, &'a Library);

impl<'a> ArrayVector<'a> {
    /// A handle of nothing, for a call to write to.
    pub(crate) const fn empty(library: &'a Library) -> Self {
        Self(ObjectHandle::NONE, library)
    }

    fn new(library: &'a Library, arrays: &[&Array]) -> Self {
        let handles: Vec<ObjectHandle> = arrays.iter().map(|array| array.handle).collect();
        // SAFETY: live handles, which the vector copies.
        let handle =
            unsafe { (library.table().vector_array_new_data)(handles.as_ptr(), handles.len()) };
        Self(handle, library)
    }

    pub(crate) fn arrays(&self) -> Result<Arrays, Error> {
        arrays(self.1, self.0)
    }
}

impl Drop for ArrayVector<'_> {
    fn drop(&mut self) {
        // SAFETY: a live handle or one of nothing, used nowhere else.
        unsafe { (self.1.table().vector_array_free)(self.0) };
    }
}

/// The arrays of a vector that stays another's.
fn arrays(library: &Library, vector: ObjectHandle) -> Result<Arrays, Error> {
    if vector.0.is_null() {
        return Err(failed("mlx_vector_array_new_data"));
    }
    let table = library.table();
    // SAFETY: a live handle.
    let n = unsafe { (table.vector_array_size)(vector) };
    let nth = |i| {
        // SAFETY: a live handle, and `i` is below its size.
        Array::made_by(library, "mlx_vector_array_get", |out| unsafe {
            (table.vector_array_get)(out, vector, i)
        })
    };
    (0..n).map(nth).collect()
}

/// A function's handle, given back at the end.
struct Closure<'a>(ObjectHandle, &'a Library);

impl Drop for Closure<'_> {
    fn drop(&mut self) {
        // SAFETY: a live handle or one of nothing, used nowhere else.
        unsafe { (self.1.table().closure_free)(self.0) };
    }
}

/// Failure of a function inside of MLX.
enum ClosureFailure {
    Error(Error),
    Panic(Box<dyn Any + Send>),
}

/// A function and the failure of its last call.
struct Payload<F> {
    library: Library,
    failure: RefCell<Option<ClosureFailure>>,
    function: F,
}

impl<F> Payload<F> {
    /// Answers a call from MLX; `call` has the inputs. 0 when it went well.
    fn answer(
        &self,
        (out, input): (*mut ObjectHandle, ObjectHandle),
        call: impl FnOnce(&F, &[Array]) -> Result<Arrays, Error>,
    ) -> c_int {
        let run = || {
            let inputs = arrays(&self.library, input)?;
            let results = call(&self.function, &inputs)?;
            let handles: Vec<ObjectHandle> = results.iter().map(|array| array.handle).collect();
            // SAFETY: live handles, which the vector copies; `out` is MLX's to be written to.
            done("mlx_vector_array_set_data", unsafe {
                (self.library.table().vector_array_set_data)(out, handles.as_ptr(), handles.len())
            })
        };
        let failure = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => return 0,
            Ok(Err(error)) => ClosureFailure::Error(error),
            Err(panic) => ClosureFailure::Panic(panic),
        };
        *self.failure.borrow_mut() = Some(failure);
        1
    }

    /// The result of MLX's call: the function's own failure goes before MLX's words for it.
    fn outcome(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        let told = done(call, code);
        match self.failure.take() {
            Some(ClosureFailure::Panic(panic)) => resume_unwind(panic),
            Some(ClosureFailure::Error(error)) => Err(error),
            None => told,
        }
    }
}

type BorrowedPayload<'a> = Payload<&'a dyn Fn(&[Array]) -> Result<Arrays, Error>>;

extern "C" fn call_borrowed(
    out: *mut ObjectHandle,
    input: ObjectHandle,
    payload: *mut c_void,
) -> c_int {
    // SAFETY: `Stream::vjp` made it, and it lives until MLX's call is over.
    let payload = unsafe { &*payload.cast::<BorrowedPayload<'_>>() };
    payload.answer((out, input), |function, inputs| function(inputs))
}

impl Stream {
    /// Results of `function` at `primals`, and what `cotangents`, the gradients of the results,
    /// come to at each of `primals`, in their order. Reverse mode: one pass forward, one back.
    ///
    /// `function` notes operations as every other code does; arrays that it brings along are
    /// constants.
    ///
    /// # Errors
    /// Errors of `function`; [`Error::Call`], also for an operation without a gradient.
    pub fn vjp(
        &self,
        function: &Differentiable<'_>,
        primals: &[&Array],
        cotangents: &[&Array],
    ) -> Result<(Vec<Array>, Vec<Array>), Error> {
        let (library, table) = (&self.library, self.library.table());
        let payload: BorrowedPayload<'_> = Payload {
            library: library.clone(),
            failure: RefCell::new(None),
            function,
        };
        let pointer = (&raw const payload).cast_mut().cast();
        // SAFETY: the payload outlives the handle, which is given back at the end of this function.
        let handle = unsafe { (table.closure_new_func_payload)(call_borrowed, pointer, None) };
        let closure = Closure(handle, library);
        let (at, back) = (
            ArrayVector::new(library, primals),
            ArrayVector::new(library, cotangents),
        );
        let (mut values, mut gradients) =
            (ArrayVector::empty(library), ArrayVector::empty(library));
        // SAFETY: live handles; results are written to handles of nothing.
        let code = unsafe {
            let (values, gradients) = (&raw mut values.0, &raw mut gradients.0);
            (table.vjp)(values, gradients, closure.0, at.0, back.0)
        };
        payload.outcome("mlx_vjp", code)?;
        Ok((values.arrays()?, gradients.arrays()?))
    }

    /// `function` with its runs of elementwise operations in one kernel each. MLX calls it once for
    /// each number and type of inputs, and keeps what it noted; sizes may change from call to call.
    ///
    /// On the CPU MLX starts the system's C++ compiler for it when the result is first evaluated.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn compile<F>(&self, function: F) -> Result<Compiled, Error>
    where
        F: Fn(&Stream, &[Array]) -> Result<Vec<Array>, Error> + 'static,
    {
        let (library, table) = (&self.library, self.library.table());
        let function: OwnedPayload = Rc::new(Payload {
            library: library.clone(),
            failure: RefCell::new(None),
            function: RecordedFunction {
                stream: Cell::new(std::ptr::null()),
                function: Box::new(function),
            },
        });
        let pointer = Rc::into_raw(Rc::clone(&function)).cast_mut().cast();
        // SAFETY: the payload is a count of its own, which `drop_owned` gives back.
        let handle =
            unsafe { (table.closure_new_func_payload)(call_owned, pointer, Some(drop_owned)) };
        let plain = Closure(handle, library);
        let mut compiled = ObjectHandle::NONE;
        // SAFETY: a live handle; the result is written to a handle of nothing.
        let code = unsafe { (table.compile)(&raw mut compiled, plain.0, true) };
        done("mlx_compile", code)?;
        Ok(Compiled {
            handle: compiled,
            library: library.clone(),
            function,
        })
    }
}

/// A function that is noted on the stream of the call under way.
struct RecordedFunction {
    /// Null between calls.
    stream: Cell<*const Stream>,
    function: Box<StreamFunction>,
}

type OwnedPayload = Rc<Payload<RecordedFunction>>;

extern "C" fn call_owned(
    out: *mut ObjectHandle,
    input: ObjectHandle,
    payload: *mut c_void,
) -> c_int {
    // SAFETY: `Stream::compile` made it, and MLX drops it behind its last call.
    let payload = unsafe { &*payload.cast_const().cast::<Payload<RecordedFunction>>() };
    payload.answer((out, input), |noted, inputs| {
        // SAFETY: null, or the stream that `Compiled::apply` holds during this call.
        match unsafe { noted.stream.get().as_ref() } {
            Some(stream) => (noted.function)(stream, inputs),
            None => Err(failed("mlx_closure_apply")),
        }
    })
}

extern "C" fn drop_owned(payload: *mut c_void) {
    // SAFETY: `Stream::compile` made it of such a count, and MLX calls this once, on the thread of
    // the arrays, to which all calls belong.
    drop(unsafe { Rc::from_raw(payload.cast_const().cast::<Payload<RecordedFunction>>()) });
}

/// A compiled function of arrays: see [`Stream::compile`].
#[derive(derive_more::Debug)]
#[debug("compiled function of {:?}", self.library)]
pub struct Compiled {
    handle: ObjectHandle,
    library: Library,
    function: OwnedPayload,
}

impl Compiled {
    /// Its results of `inputs`. All calls are with the same stream.
    ///
    /// # Errors
    /// Errors of the function; [`Error::Call`].
    pub fn apply(&self, stream: &Stream, inputs: &[&Array]) -> Result<Vec<Array>, Error> {
        let (library, table) = (&self.library, self.library.table());
        let (inputs, mut results) = (
            ArrayVector::new(library, inputs),
            ArrayVector::empty(library),
        );
        self.function.function.stream.set(stream);
        // SAFETY: live handles; results are written to a handle of nothing.
        let code = unsafe { (table.closure_apply)(&raw mut results.0, self.handle, inputs.0) };
        self.function.function.stream.set(std::ptr::null());
        self.function.outcome("mlx_closure_apply", code)?;
        results.arrays()
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // SAFETY: a live handle, used nowhere else.
        unsafe { (self.library.table().closure_free)(self.handle) };
    }
}
