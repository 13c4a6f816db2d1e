# The table of SM90 kernels. A problem's tile is chosen in cpp/kernels/sm90/forward_tiles.h among those listed here.
#
# Head dimensions are head_dim or head_dim x head_dim_v. Features: Capped is softcap and dropout; calls with dropout alone
# take it where there is no Dropout. Alibi and Bias are these alone, BiasDropout is a bias beside dropout (up to head_dim
# 128), other sets are left to sm80: ALiBi with the tiles of None, a bias with what its tile in shared memory leaves of
# them, backward up to head_dim 128.
# Each kernel spills some (gpu_kernels.csv), also below: in the warps that load, walk and add, with 24 registers, and of
# values used once a tile. What of it is in the main loops: docs/dev/gpu.md, "What ptxas made of the kernels".
# forward: block_m x block_n _ buffers of K _ of V _ of Q _ tries the maximum so far.
# Measurements: docs/dev/log-sm90-forward.md.
set(FLASHSDK_SM90_HEAD_DIMS 64 96 128 192x128 192 256)
set(FLASHSDK_SM90_FORWARD_FEATURES None Capped Alibi Bias BiasDropout)

set(FLASHSDK_SM90_FORWARD_64_None 192x128_4_4_2_true 128x128_4_4_2_true)
set(FLASHSDK_SM90_FORWARD_64_Capped 192x128_4_4_2_true 128x128_4_4_2_true)
set(FLASHSDK_SM90_FORWARD_64_Alibi 192x128_4_4_2_true 128x128_4_4_2_true)
set(FLASHSDK_SM90_FORWARD_64_Bias 192x128_4_3_2_true 128x128_4_4_2_true)
set(FLASHSDK_SM90_FORWARD_64_BiasDropout 192x128_4_3_2_true 128x128_4_4_2_true)
set(FLASHSDK_SM90_FORWARD_96_None 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_96_Capped 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_96_Alibi 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_96_Bias 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_96_BiasDropout 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_128_None 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_128_Capped 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_128_Alibi 128x128_3_2_2_true)
set(FLASHSDK_SM90_FORWARD_128_Bias 128x128_2_2_2_true)
set(FLASHSDK_SM90_FORWARD_128_BiasDropout 128x128_2_2_2_true)
set(FLASHSDK_SM90_FORWARD_192x128_None 128x128_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192x128_Capped 128x128_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192x128_Alibi 128x128_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192x128_Bias 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192_None 128x112_2_2_1_false 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192_Capped 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192_Alibi 128x112_2_2_1_false 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_192_Bias 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_256_None 128x80_2_2_1_true 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_256_Capped 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_256_Alibi 128x80_2_2_1_true 128x64_2_2_1_false)
set(FLASHSDK_SM90_FORWARD_256_Bias 128x64_2_2_1_false)

# backward: block_m x block_n _ buffers of dO _ of K _ staggered. Q has as many as dO up to head_dim 128, one more above.
# There 128 keys are a cluster's of two CTAs, which refuses some calls (refuse_backward), so 64 are listed, too. The first
# tile that fits is taken.
# Measurements: docs/dev/log-sm90-backward.md.
set(FLASHSDK_SM90_BACKWARD_FEATURES None Dropout Capped Alibi Bias BiasDropout)
set(FLASHSDK_SM90_BACKWARD_64_None 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_64_Dropout 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_64_Capped 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_64_Alibi 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_64_Bias 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_64_BiasDropout 128x128_2_2_false)
set(FLASHSDK_SM90_BACKWARD_96_None 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_96_Dropout 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_96_Capped 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_96_Alibi 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_96_Bias 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_96_BiasDropout 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_None 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_Dropout 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_Capped 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_Alibi 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_Bias 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_128_BiasDropout 64x128_2_1_true)
set(FLASHSDK_SM90_BACKWARD_192x128_None 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_192x128_Capped 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_192x128_Alibi 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_192_None 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_192_Capped 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_192_Alibi 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_256_None 64x128_1_1_false 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_256_Capped 64x128_1_1_false 64x64_1_1_false)
set(FLASHSDK_SM90_BACKWARD_256_Alibi 64x128_1_1_false 64x64_1_1_false)
