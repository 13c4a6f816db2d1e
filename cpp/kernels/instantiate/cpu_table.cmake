# The table of CPU kernels: every dtype, operation and head dimension is compiled for every instruction set.
set(FLASHSDK_CPU_OPS forward backward)
set(FLASHSDK_CPU_ALL_DTYPES fp32 bf16 fp16)
set(FLASHSDK_CPU_ALL_HEAD_DIMS 32 64 96 128 192 256)
