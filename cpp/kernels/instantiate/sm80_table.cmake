# The table of SM80 kernels: which tiles exist for a head dimension, fastest first. Measured on an H200.
#
# forward:  block_m x block_n _ warps _ stages _ Q in registers _ thread blocks a multiprocessor [_ any alignment]
# backward: block_m x block_n _ warps _ warps along the keys of S _ of dK, dV _ along the queries of dQ
#   _ thread blocks _ staggered [_ any alignment]
set(FLASHSDK_SM80_ALL_DTYPES float16 bfloat16)
set(FLASHSDK_SM80_TYPE_float16 cutlass::half_t)
set(FLASHSDK_SM80_TYPE_bfloat16 cutlass::bfloat16_t)
set(FLASHSDK_SM80_ALL_HEAD_DIMS 32 64 96 128 192 256)
# Dropout, Alibi, Bias: alone; All: any of them, and softcap; Any: All, and tensors of any alignment.
set(FLASHSDK_SM80_ALL_FEATURES None Dropout Alibi Bias All Any)
set(FLASHSDK_SM80_FEATURES_Any All)
set(FLASHSDK_SM80_ALL_POLICIES Dense Band BlockSparse)

# What CI compiles: every kind of kernel, few sizes.
set(FLASHSDK_SM80_CI_DTYPES bfloat16)
set(FLASHSDK_SM80_CI_HEAD_DIMS 64)
set(FLASHSDK_SM80_CI_FEATURES None Alibi Bias All Any)
set(FLASHSDK_SM80_CI_POLICIES Band BlockSparse)  # Dense asks for less of the same code

# Two thread blocks of four warps a multiprocessor, or one of eight, leave 255 registers a thread. Some plain kernels
# need a few more (gpu_kernels.csv, bytes of stack): forward 24 at head_dim 64, 48 at 32 with a band, 32 at 128 with a
# layout; backward 16 at 192 with a band, and at 256 40 with a band, 16 with a layout, 8 without a mask; in the main
# loops these are 2 to 18 loads and stores. At head_dim 64, smaller tiles, which spill nothing, were slower. The last
# tiles of 256, 16 x 32 and 16 x 16, have 360 to 800: they are for GPUs with little shared memory and for layouts of
# small blocks, where a larger tile does not fit; 32 x 64 with a band 56.
set(FLASHSDK_SM80_FORWARD_32 128x128_4_1_true_2)
set(FLASHSDK_SM80_FORWARD_64 128x128_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_96 128x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_128 128x48_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_192 64x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_256 64x64_4_1_false_2)

# Tiles that divide the usual blocks of 64 and 128, and that leave registers for lists and features.
set(FLASHSDK_SM80_FORWARD_OTHER_32 128x64_4_1_true_2)
set(FLASHSDK_SM80_FORWARD_OTHER_64 128x64_4_1_true_2)
set(FLASHSDK_SM80_FORWARD_OTHER_96 128x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_OTHER_128 128x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_OTHER_192 64x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_OTHER_256 64x64_4_1_false_2)

# Of single features and masks. All features take registers that the tiles above do not have, a mask more of them: with
# fewer elements a thread, slower in themselves, less is spilled (benchmarks/results/sm80_features.csv). ALiBi alone
# takes so few that it has the tiles of None (alibi_bias.csv).
set(FLASHSDK_SM80_FORWARD_DROPOUT_64_Dense 128x128_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_DROPOUT_64_Band 128x128_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_ALL_64 64x64_4_1_false_3)
set(FLASHSDK_SM80_FORWARD_ALL_64_Dense 128x64_4_1_false_2)
set(FLASHSDK_SM80_FORWARD_ALL_128 64x64_4_1_false_2)
set(FLASHSDK_SM80_BACKWARD_ALL_64 64x128_8_8_8_4_1_false)
set(FLASHSDK_SM80_BACKWARD_ALL_96 64x128_8_4_4_4_1_false)
set(FLASHSDK_SM80_BACKWARD_ALL_128 32x128_8_4_4_2_1_false)

# Few queries: thread blocks of four warps, two a multiprocessor, each with a part of the keys. Smaller head dimensions
# take these too: what a tile leaves empty is not read from memory, which is what bounds them.
set(FLASHSDK_SM80_SPLIT_FORWARD_64 64x128_4_2_true_2)
set(FLASHSDK_SM80_SPLIT_FORWARD_128 64x64_4_2_true_2)
set(FLASHSDK_SM80_SPLIT_FORWARD_256 64x64_4_1_false_2)

set(FLASHSDK_SM80_BACKWARD_32 32x128_4_4_4_2_2_true)
set(FLASHSDK_SM80_BACKWARD_64 32x128_4_4_4_2_2_true)
set(FLASHSDK_SM80_BACKWARD_96 64x128_8_4_4_4_1_true)
set(FLASHSDK_SM80_BACKWARD_128 64x128_8_4_4_2_1_false)
set(FLASHSDK_SM80_BACKWARD_192 64x64_8_2_2_2_1_true)
set(FLASHSDK_SM80_BACKWARD_256 64x64_8_2_2_2_1_true)

# What takes the rest: tensors that are not aligned to 16 bytes, head dimensions that are no multiple of 8, devices with
# less shared memory (99 KiB do for the last of each), and layouts with smaller blocks than the tiles above have. They
# cover the smaller head dimensions too.
set(FLASHSDK_SM80_FORWARD_ANY_64 64x64_4_1_false_2_true)
set(FLASHSDK_SM80_FORWARD_ANY_128 64x64_4_1_false_2_true)
set(FLASHSDK_SM80_FORWARD_ANY_256 64x64_4_1_false_1_true)
set(FLASHSDK_SM80_BACKWARD_ANY_64 64x64_8_4_4_4_1_false_true)
set(FLASHSDK_SM80_BACKWARD_ANY_128 32x64_8_4_4_2_1_false_true)
set(FLASHSDK_SM80_BACKWARD_ANY_256 32x64_8_4_4_2_1_false_true 16x32_2_2_2_1_1_false_true)

# For layouts, one warp a tile of 16 x 16 takes any block size, at a price.
set(FLASHSDK_SM80_FORWARD_SMALL 16x16_1_1_false_1_true)
set(FLASHSDK_SM80_BACKWARD_SMALL 16x16_1_1_1_1_1_false_true)

# The tiles of one kind of kernel, in priority order.
function(flashsdk_sm80_tiles result op head_dim policy features)
  string(TOUPPER ${op} OP)
  if(op STREQUAL "split_forward" AND (policy STREQUAL "BlockSparse" OR NOT features MATCHES "None|All"))
    set(${result} "" PARENT_SCOPE)
    return()
  endif()
  if(policy STREQUAL "BlockSparse" AND features MATCHES "^(Alibi|Bias)$")
    set(${result} "" PARENT_SCOPE)  # layouts take All
    return()
  endif()
  if(features STREQUAL "Any")
    set(tiles ${FLASHSDK_SM80_${OP}_ANY_${head_dim}})
    if(tiles AND policy STREQUAL "BlockSparse" AND NOT FLASHSDK_CUDA_SUBSET STREQUAL "ci")
      list(APPEND tiles ${FLASHSDK_SM80_${OP}_SMALL})
    endif()
    set(${result} "${tiles}" PARENT_SCOPE)
    return()
  endif()
  string(TOUPPER ${features} FEATURES)
  set(names ${OP}_${FEATURES}_${head_dim}_${policy} ${OP}_${FEATURES}_${head_dim})
  if(policy STREQUAL "BlockSparse" OR NOT features MATCHES "^(None|Alibi)$")
    list(APPEND names ${OP}_OTHER_${head_dim})
  endif()
  set(tiles "")
  foreach(name IN LISTS names ITEMS ${OP}_${head_dim})  # the first that there is
    if(DEFINED FLASHSDK_SM80_${name})
      set(tiles ${FLASHSDK_SM80_${name}})
      break()
    endif()
  endforeach()
  set(${result} "${tiles}" PARENT_SCOPE)
endfunction()
