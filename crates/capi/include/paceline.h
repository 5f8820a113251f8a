// Made by cbindgen of crates/capi; do not edit. Link with -lpaceline_c.

#ifndef PACELINE_H
#define PACELINE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Result of a call.
typedef enum PacelineStatus {
  // Success.
  PACELINE_STATUS_OK = 0,
  // An argument is wrong: a null pointer, a length, a name.
  PACELINE_STATUS_INVALID = 1,
  // The deadline passed.
  PACELINE_STATUS_TIMEOUT = 2,
  // Another rank ended, or was silent for too long.
  PACELINE_STATUS_PEER_LOST = 3,
  // The ranks made different calls.
  PACELINE_STATUS_MISMATCH = 4,
  // The callback stopped the generation.
  PACELINE_STATUS_CANCELLED = 5,
  // Any other failure: `paceline_last_error` has its text.
  PACELINE_STATUS_FAILED = 6,
} PacelineStatus;

// Type of elements.
typedef enum PacelineDtype {
  // 8 bits, unsigned.
  PACELINE_DTYPE_U8 = 0,
  // 32 bits, signed.
  PACELINE_DTYPE_I32 = 1,
  // 64 bits, signed.
  PACELINE_DTYPE_I64 = 2,
  // IEEE half precision.
  PACELINE_DTYPE_F16 = 3,
  // bfloat16.
  PACELINE_DTYPE_BF16 = 4,
  // IEEE single precision.
  PACELINE_DTYPE_F32 = 5,
  // IEEE double precision.
  PACELINE_DTYPE_F64 = 6,
} PacelineDtype;

// How the elements of all ranks are combined.
typedef enum PacelineReduce {
  // Their sum.
  PACELINE_REDUCE_SUM = 0,
  // The largest.
  PACELINE_REDUCE_MAX = 1,
  // The smallest.
  PACELINE_REDUCE_MIN = 2,
  // Their product.
  PACELINE_REDUCE_PRODUCT = 3,
} PacelineReduce;

// A rank's handle to a group.
typedef struct PacelineGroup PacelineGroup;

// A loaded model.
typedef struct PacelineModel PacelineModel;

// How text is generated. All zeros: greedy, up to 256 tokens, no deadline.
typedef struct PacelineOptions {
  // Maximum number of tokens; 0 for 256.
  uint32_t max_tokens;
  // Sampling temperature; 0 for the likeliest token each time.
  float temperature;
  // Nucleus sampling: probability mass to sample from, in (0, 1]; 0 for all of it.
  float top_p;
  // Seed of the sampler.
  uint64_t seed;
  // Whether the prompt is text to continue; else it is a user's message to a chat model.
  bool raw;
  // Longest wait for the whole answer in seconds; 0 for none.
  double seconds;
} PacelineOptions;

// Receives each fragment of text as soon as it is final; returns false to stop the generation.
// `user` is the pointer that the caller passed. It may not call functions of the same model.
typedef bool (*PacelineTextCallback)(const char *text, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Joins the ranks at `addrs`, `size` strings `host:port` in rank order: by shared memory on one
// machine, else by TCP. Collective: returns when all ranks have joined, or after `seconds`.
// This rank listens at `addrs[rank]`.
//
// `key` is null or 32 bytes, the same on all ranks; without it all addresses must be loopback.
// `*out` receives the group, which `paceline_group_free` releases.
//
// # Safety
// `addrs` points to `size` strings, `key` to 32 bytes if it is not null, `out` to a writable
// pointer.
enum PacelineStatus paceline_group_join(uint32_t rank,
                                        uint32_t size,
                                        const char *const *addrs,
                                        const uint8_t *key,
                                        double seconds,
                                        struct PacelineGroup **out);

// This rank's number; `UINT32_MAX` for a null pointer.
//
// # Safety
// `group` is null or a group that was not freed.
uint32_t paceline_group_rank(const struct PacelineGroup *group);

// Number of ranks; 0 for a null pointer.
//
// # Safety
// `group` is null or a group that was not freed.
uint32_t paceline_group_size(const struct PacelineGroup *group);

// Leaves the group: other ranks' calls fail from now on. Null is allowed.
//
// # Safety
// `group` is null or a group that was not freed and that no other thread uses.
void paceline_group_free(struct PacelineGroup *group);

// Returns when all ranks have called it. Collective.
//
// # Safety
// `group` is a group that was not freed.
enum PacelineStatus paceline_barrier(const struct PacelineGroup *group, double seconds);

// Reduces `count` elements at `data` over all ranks, in place: all ranks get the same bits.
// Collective.
//
// # Safety
// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
enum PacelineStatus paceline_all_reduce(const struct PacelineGroup *group,
                                        uint8_t *data,
                                        size_t count,
                                        uint32_t dtype,
                                        uint32_t op,
                                        double seconds);

// Gathers `count` elements of every rank into `output`, which has room for `size * count`, in rank
// order. Collective.
//
// # Safety
// `group` is a group that was not freed; `input` points to `count` elements, `output` to its room,
// and they do not overlap.
enum PacelineStatus paceline_all_gather(const struct PacelineGroup *group,
                                        const uint8_t *input,
                                        uint8_t *output,
                                        size_t count,
                                        uint32_t dtype,
                                        double seconds);

// Overwrites `count` elements at `data` with those of rank `root`. Collective.
//
// # Safety
// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
enum PacelineStatus paceline_broadcast(const struct PacelineGroup *group,
                                       uint8_t *data,
                                       size_t count,
                                       uint32_t dtype,
                                       uint32_t root,
                                       double seconds);

// Sends `count` elements to rank `to`; `tag` distinguishes messages. `data` may be reused when it
// returns.
//
// # Safety
// `group` is a group that was not freed; `data` points to `count` elements.
enum PacelineStatus paceline_send(const struct PacelineGroup *group,
                                  const uint8_t *data,
                                  size_t count,
                                  uint32_t dtype,
                                  uint32_t to,
                                  uint32_t tag,
                                  double seconds);

// Receives `count` elements from rank `from`, sent with the same `tag`.
//
// # Safety
// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
enum PacelineStatus paceline_recv(const struct PacelineGroup *group,
                                  uint8_t *data,
                                  size_t count,
                                  uint32_t dtype,
                                  uint32_t from,
                                  uint32_t tag,
                                  double seconds);

// Loads the model at `path`: a GGUF file, or a folder in Hugging Face's format. `threads` 0 uses
// all cores, `context` 0 uses 4096 positions. Blocks while weights are read.
//
// # Safety
// `path` is a string, `out` a writable pointer.
enum PacelineStatus paceline_model_open(const char *path,
                                        uint32_t threads,
                                        uint32_t context,
                                        struct PacelineModel **out);

// Unloads a model and frees its memory. Null is allowed.
//
// # Safety
// `model` is null or a model that was not freed and that no other thread uses.
void paceline_model_free(struct PacelineModel *model);

// Generates text after `prompt` and passes it to `callback` in fragments, on the calling thread.
// Returns when the answer is complete, the callback returned false (`PACELINE_STATUS_CANCELLED`)
// or the deadline passed. Several threads may generate at once: their steps are batched.
//
// # Safety
// `model` is a model that was not freed, `prompt` a string, `options` null or valid options.
enum PacelineStatus paceline_generate(const struct PacelineModel *model,
                                      const char *prompt,
                                      const struct PacelineOptions *options,
                                      PacelineTextCallback callback,
                                      void *user);

// Text of this thread's last failure, empty before the first. It stays valid until the thread's
// next call of this library.
const char *paceline_last_error(void);

// Version of the library, such as `0.1.0`.
const char *paceline_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PACELINE_H */
