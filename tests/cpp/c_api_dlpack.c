// C99, and DLPack's own type for tensors: a forward of one query and one key, whose output is the value.
#include <stdint.h>
#include <stdlib.h>

// As dlpack.h declares them.
#define DLPACK_DLPACK_H_
typedef enum { kDLCPU = 1 } DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

#include <flashsdk/c_api.h>

flashsdk_status attend_in_c(const float* q, const float* k, const float* v, float* out, float* lse) {
  int64_t shape[4] = {1, 1, 1, 8};
  const DLDevice cpu = {kDLCPU, 0};
  const DLDataType float32 = {FLASHSDK_FLOAT, 32, 1};
  const DLTensor tensors[5] = {{(void*)q, cpu, 4, float32, shape, NULL, 0},
                               {(void*)k, cpu, 4, float32, shape, NULL, 0},
                               {(void*)v, cpu, 4, float32, shape, NULL, 0},
                               {out, cpu, 4, float32, shape, NULL, 0},
                               {lse, cpu, 3, float32, shape, NULL, 0}};
  flashsdk_attention_args args = {0};
  flashsdk_plan* plan = NULL;
  flashsdk_status status;
  args.struct_size = sizeof args;
  args.q = &tensors[0];
  args.k = &tensors[1];
  args.v = &tensors[2];
  args.out = &tensors[3];
  args.lse = &tensors[4];
  status = flashsdk_plan_forward(&args, &plan);
  if (status == FLASHSDK_OK) {
    const size_t size = flashsdk_plan_workspace_size(plan);
    char* memory = malloc(size + 256);
    status = flashsdk_plan_launch(plan, memory + (256 - (uintptr_t)memory % 256), size, NULL);
    free(memory);
  }
  flashsdk_plan_destroy(plan);
  return status;
}
