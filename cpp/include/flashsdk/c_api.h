// flashsdk in plain C (C99), for programs in C and for other languages: docs/c.md. What an argument means, and which
// shapes it may have, is said in flashsdk/attention.h and flashsdk/mask.h, whose fields have the same names.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "flashsdk/export.h"
#include "flashsdk/version.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- how structs grow
//
// Every struct of arguments begins with struct_size. The caller sets it to sizeof, and so tells which fields it knows.
// A later version adds fields at the end and moves none. All bits zero in a field mean that it is not given:
//
//   flashsdk_attention_args args = {0};  // C++: {}
//   args.struct_size = sizeof args;
//
// So a program of an older header runs with a newer library. A program of a newer header runs with an older library, as
// long as it leaves at zero what that library does not know; else the call is FLASHSDK_UNSUPPORTED.

// ---- failures
//
// A function that can fail returns one of these. Then nothing has been written but the line of flashsdk_last_error().

typedef int32_t flashsdk_status;
enum {
  FLASHSDK_OK = 0,
  FLASHSDK_INVALID_ARGUMENT = 1,  // the call can never work: a wrong shape, stride, dtype or value
  FLASHSDK_UNSUPPORTED = 2,       // a valid problem that no kernel of this build implements
  FLASHSDK_RUNTIME = 3            // the machine failed: out of memory, a CUDA error
};

// "ok", "invalid_argument", "unsupported" or "runtime".
FLASHSDK_API const char* flashsdk_status_name(flashsdk_status status);

// One line about the last call of this thread that failed: "<argument>: <given>; <allowed>". Empty before the first.
// It is valid until the next failure in this thread.
FLASHSDK_API const char* flashsdk_last_error(void);

// ---- versions, of the library that runs; FLASHSDK_VERSION is the header's

FLASHSDK_API const char* flashsdk_version(void);     // "0.1.0"
FLASHSDK_API int32_t flashsdk_version_number(void);  // 10000·major + 100·minor + patch

// ---- tensors
//
// DLPack's DLTensor. Where its header was included before this one, flashsdk_tensor is that type; else it is a struct
// of the same layout, to which a pointer to a DLTensor may be cast. The library reads a descriptor during a call and
// never keeps it. Values of dtype.code and device_type are DLPack's.

#ifdef DLPACK_DLPACK_H_
typedef DLTensor flashsdk_tensor;
#else
typedef struct flashsdk_device {
  int32_t device_type;  // FLASHSDK_CPU or FLASHSDK_CUDA
  int32_t device_id;
} flashsdk_device;

typedef struct flashsdk_dtype {
  uint8_t code;    // FLASHSDK_FLOAT and so on
  uint8_t bits;    // of one element: 32 for float32
  uint16_t lanes;  // 1
} flashsdk_dtype;

typedef struct flashsdk_tensor {
  void* data;
  flashsdk_device device;
  int32_t ndim;
  flashsdk_dtype dtype;
  int64_t* shape;
  int64_t* strides;      // in elements; NULL: row-major
  uint64_t byte_offset;  // added to data
} flashsdk_tensor;
#endif

enum { FLASHSDK_CPU = 1, FLASHSDK_CUDA = 2 };
enum { FLASHSDK_INT = 0, FLASHSDK_UINT = 1, FLASHSDK_FLOAT = 2, FLASHSDK_BFLOAT = 4, FLASHSDK_BOOL = 6 };
enum { FLASHSDK_FLOAT8_E4M3FN = 10 };  // of 8 bits

// ---- masks

#define FLASHSDK_UNLIMITED INT64_MAX
enum { FLASHSDK_BOTTOM_RIGHT = 0, FLASHSDK_TOP_LEFT = 1 };

// Query i sees key j iff -left <= j - (i + shift) <= right; shift is seqlen_k - seqlen_q, or 0 for FLASHSDK_TOP_LEFT.
// Causal is {sizeof(flashsdk_band), FLASHSDK_UNLIMITED, 0, FLASHSDK_BOTTOM_RIGHT, 0}.
typedef struct flashsdk_band {
  size_t struct_size;
  int64_t left, right;  // FLASHSDK_UNLIMITED: no limit
  int32_t alignment;
  int32_t reserved;  // 0
} flashsdk_band;

// Visits the listed block_q x block_k blocks and skips all others: flashsdk::BlockMask. Offsets are int32
// (batch | 1, num_heads | 1, lines + 1), indices int32 (blocks). A forward needs no lists of columns.
typedef struct flashsdk_block_mask {
  size_t struct_size;
  int32_t block_q, block_k;  // multiples of 16
  const flashsdk_tensor *row_partial_offsets, *row_partial_indices;
  const flashsdk_tensor *row_full_offsets, *row_full_indices;
  const flashsdk_tensor *col_partial_offsets, *col_partial_indices;
  const flashsdk_tensor *col_full_offsets, *col_full_indices;
  int64_t seqlen_q, seqlen_k;  // that the layout was made for; 0: any with as many blocks
} flashsdk_block_mask;

// The lists of a block mask, on the host, made from a dense matrix.
typedef struct flashsdk_block_lists flashsdk_block_lists;

// blocks: row-major (batch | 1, num_heads | 1, rows, cols), 0 = skip, 1 = full, 2 = partial. On success *lists is the
// caller's, for flashsdk_block_lists_destroy.
FLASHSDK_API flashsdk_status flashsdk_block_lists_create(const uint8_t* blocks, int32_t batch, int32_t num_heads,
                                                         int32_t rows, int32_t cols, int32_t block_q, int32_t block_k,
                                                         flashsdk_block_lists** lists);
// Writes all fields of *mask but struct_size, which the caller has set. They point into the lists, which must live as
// long as the mask is used.
FLASHSDK_API flashsdk_status flashsdk_block_lists_mask(const flashsdk_block_lists* lists, flashsdk_block_mask* mask);
FLASHSDK_API void flashsdk_block_lists_destroy(flashsdk_block_lists* lists);  // NULL is allowed

// ---- one call of attention, forward or backward
//
// Packed (varlen) problems give cu_seqlens_q and cu_seqlens_k, and their tensors have no batch dimension. A forward
// does not look at dout, dlse, dq, dk, dv and dsink, so that one struct serves both.

typedef struct flashsdk_attention_args {
  size_t struct_size;
  const flashsdk_tensor *q, *k, *v;
  const flashsdk_tensor *out, *lse;       // the forward writes them, the backward reads them
  const flashsdk_tensor *dout, *dlse;     // of the backward; dlse may be NULL
  const flashsdk_tensor *dq, *dk, *dv;    // the backward writes them
  const double* softmax_scale;            // NULL: head_dim^-1/2
  double softcap;                         // 0: none
  const flashsdk_band* band;              // with block_mask: applied inside of partial blocks
  const flashsdk_block_mask* block_mask;  // neither of the two: every query sees every key
  const flashsdk_tensor* bias;
  const flashsdk_tensor* alibi_slopes;
  double dropout_p;
  uint64_t seed, offset;
  const flashsdk_tensor* seed_tensor;  // {seed, offset} where q is, in place of the two
  const flashsdk_tensor *cu_seqlens_q, *cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  const char* backend;    // NULL: the best that fits; else "cpu", "sm80" or "sm90"
  int32_t deterministic;  // 1: bit-identical from run to run
  int32_t num_splits;     // 1: bits depend on the sequence and shapes; 0: chosen
  // Here the first version ended.
  const flashsdk_tensor *seqused_q, *seqused_k;
  const flashsdk_tensor *sink, *dsink;           // the backward writes dsink, where there is a sink
  const flashsdk_tensor* block_table;            // of a forward: k and v are pages
  const flashsdk_tensor *k_descale, *v_descale;  // of a forward with k and v of FLASHSDK_FLOAT8_E4M3FN
} flashsdk_attention_args;

// A call that is checked and has its kernel: flashsdk::Plan. It keeps the addresses of the tensors' memory, which must
// live until the last launch is done, and no struct of the caller.
typedef struct flashsdk_plan flashsdk_plan;

// On success *plan is the caller's, for flashsdk_plan_destroy.
FLASHSDK_API flashsdk_status flashsdk_plan_forward(const flashsdk_attention_args* args, flashsdk_plan** plan);
FLASHSDK_API flashsdk_status flashsdk_plan_backward(const flashsdk_attention_args* args, flashsdk_plan** plan);

// Bytes of workspace that a launch needs; 0 for NULL.
FLASHSDK_API size_t flashsdk_plan_workspace_size(const flashsdk_plan* plan);

// Workspace: at least as many bytes, 256-byte aligned, on the tensors' device; NULL and 0 where none is needed. Stream:
// a cudaStream_t, NULL on a CPU. On a CPU the call is done on return. Any thread may launch a plan, several at once
// with a workspace each.
FLASHSDK_API flashsdk_status flashsdk_plan_launch(const flashsdk_plan* plan, void* workspace, size_t workspace_size,
                                                  void* stream);
FLASHSDK_API void flashsdk_plan_destroy(flashsdk_plan* plan);  // NULL is allowed; not before its launches are done

// What the plan would need, without one: outputs, and what a backward gets from the forward, may still be missing.
FLASHSDK_API flashsdk_status flashsdk_workspace_size_forward(const flashsdk_attention_args* args, size_t* size);
FLASHSDK_API flashsdk_status flashsdk_workspace_size_backward(const flashsdk_attention_args* args, size_t* size);

// Which kernel a call takes, and why not others, a line each. As snprintf: at most `size` bytes are written, the last
// one 0, and *length is that of the whole text, without the 0. buffer and length may be NULL, with a size of 0.
FLASHSDK_API flashsdk_status flashsdk_explain_forward(const flashsdk_attention_args* args, char* buffer, size_t size,
                                                      size_t* length);
FLASHSDK_API flashsdk_status flashsdk_explain_backward(const flashsdk_attention_args* args, char* buffer, size_t size,
                                                       size_t* length);

// ---- threads of calls on a CPU, the caller's included: flashsdk/threads.h

FLASHSDK_API flashsdk_status flashsdk_set_num_threads(int32_t n);
FLASHSDK_API int32_t flashsdk_get_num_threads(void);  // 0: FLASHSDK_NUM_THREADS is no number, says the last error

#ifdef __cplusplus
}
#endif
