# The table of CPU kernels. Each is compiled for every instruction set; a file holds those of one dtype and operation.
set(FLASHSDK_CPU_ALL_DTYPES fp32 bf16 fp16)
set(FLASHSDK_CPU_TYPE_fp32 float)
set(FLASHSDK_CPU_TYPE_bf16 cpu::Bf16)
set(FLASHSDK_CPU_TYPE_fp16 cpu::Fp16)

set(FLASHSDK_CPU_OPS forward backward)
# Widths of packed tiles, not of loops: a smaller head_dim runs in the next one and computes no more for it.
set(FLASHSDK_CPU_ALL_HEAD_DIMS 128 256)
set(FLASHSDK_CPU_POLICIES DensePolicy BandPolicy BlockSparsePolicy)

# Instruction sets that add something for some dtypes only: the others of them fall to the next slower set.
set(FLASHSDK_CPU_ONLY_DTYPES_avx512_bf16 bf16)
set(FLASHSDK_CPU_ONLY_DTYPES_avx512_amx bf16 fp16)
