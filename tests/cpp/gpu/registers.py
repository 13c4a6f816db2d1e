"""Registers and spills of each kernel, from the log of a build with -Xptxas=-v.

python registers.py BUILD_LOG
"""

import re
import sys

PATTERN = re.compile(
    r"Compiling entry function '([^']*(?:forward|backward|join_parts)_kernel[^']*)' for '(\w+)'"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)
POLICY = {
    "11DensePolicy": "dense",
    "10BandPolicy": "band",
    "17BlockSparsePolicy": "block_sparse",
}
# Of Features in score_features.h; another set is a KeyError.
FEATURES = {
    0: "none", 1: "dropout", 3: "capped", 4: "bias", 5: "bias and dropout", 8: "alibi", 15: "all"
}  # fmt: skip

# Traits that the build names (cmake/Sm90Kernels.cmake): head_dim, block_m, block_n.
NAMED = re.compile(r"Traits_sm90_forward_[a-z]+16_d(\d+(?:x\d+)?)_[A-Za-z]+_(\d+)x(\d+)")

with open(sys.argv[1]) as log:
    text = log.read()
for name, arch, stores, loads, registers in PATTERN.findall(text):
    if "join_parts_kernel" in name:
        op = "join of a split forward"
    elif "8KeySplit" in name:
        op = "split forward"
    else:
        op = "forward" if "forward_kernel" in name else "backward"
    dtype = "bf16" if "bfloat16" in name else "fp16"
    backend = "sm90" if "4sm90" in name else "sm80"
    if named := NAMED.search(name):
        head_dim, m, n = named.groups()
    else:  # arguments of the traits: head_dim, of sm90 head_dim_v too, block_m, block_n
        head_dim, *numbers = re.findall(r"L[ib](\d+)E", name.partition("Traits")[2])
        if backend == "sm90" and (head_dim_v := numbers.pop(0)) != head_dim:
            head_dim += f"x{head_dim_v}"
        m, n = numbers[:2]
    policy = next((short for long, short in POLICY.items() if long in name), "all masks")
    features = FEATURES[int(re.search(r"FeaturesE(\d+)E", name)[1])]
    if backend == "sm90" and re.search(r"FeaturesE\d+ELb1E", name):
        features += " packed"  # the backward has kernels of its own for packed sequences
    print(
        f"{backend} {op} for {arch}, {dtype} d{head_dim} {policy} {features} {m}x{n}: "
        f"{registers} registers, spill stores {stores}, loads {loads} bytes"
    )
