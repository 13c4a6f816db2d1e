"""flashsdk by ctypes: the C API without the package's extension, as any language calls it.

python attention_ctypes.py libflashsdk.so.0.1
"""

from __future__ import annotations

import ctypes as c
import math
import sys


class Device(c.Structure):
    _fields_ = [("device_type", c.c_int32), ("device_id", c.c_int32)]


class Dtype(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device", Device),
        ("ndim", c.c_int32),
        ("dtype", Dtype),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


TensorPtr = c.POINTER(Tensor)


class Args(c.Structure):
    """flashsdk_attention_args. Fields of newer headers, behind the last one, are not given."""

    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, TensorPtr) for name in ("q", "k", "v", "out", "lse")),
        *((name, TensorPtr) for name in ("dout", "dlse", "dq", "dk", "dv")),
        ("softmax_scale", c.POINTER(c.c_double)),
        ("softcap", c.c_double),
        ("band", c.c_void_p),
        ("block_mask", c.c_void_p),
        *((name, TensorPtr) for name in ("bias", "alibi_slopes")),
        ("dropout_p", c.c_double),
        ("seed", c.c_uint64),
        ("offset", c.c_uint64),
        *((name, TensorPtr) for name in ("seed_tensor", "cu_seqlens_q", "cu_seqlens_k")),
        ("max_seqlen_q", c.c_int64),
        ("max_seqlen_k", c.c_int64),
        ("backend", c.c_char_p),
        ("deterministic", c.c_int32),
        ("num_splits", c.c_int32),
    ]


def tensor(data: c.Array[c.c_float], *shape: int) -> Tensor:
    return Tensor(
        data=c.addressof(data),
        device=Device(1, 0),  # the CPU
        ndim=len(shape),
        dtype=Dtype(2, 32, 1),  # float32
        shape=(c.c_int64 * len(shape))(*shape),
    )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("attention_ctypes: one argument, the path of libflashsdk.so")
    lib = c.CDLL(sys.argv[1])
    lib.flashsdk_last_error.restype = lib.flashsdk_version.restype = c.c_char_p
    lib.flashsdk_plan_workspace_size.restype = c.c_size_t
    lib.flashsdk_plan_workspace_size.argtypes = lib.flashsdk_plan_destroy.argtypes = [c.c_void_p]
    lib.flashsdk_plan_launch.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p]

    def check(status: int) -> None:
        if status != 0:
            raise ValueError(lib.flashsdk_last_error().decode())

    rows, dim = 5, 8
    floats = c.c_float * (rows * dim)
    q, k, v = (floats(*map(math.sin, range(n, n + rows * dim))) for n in range(3))
    out, lse = floats(), (c.c_float * rows)()
    tensors = {name: tensor(x, 1, rows, 1, dim) for name, x in dict(q=q, k=k, v=v, out=out).items()}
    tensors["lse"] = tensor(lse, 1, 1, rows)
    args = Args(struct_size=c.sizeof(Args), **{n: c.pointer(t) for n, t in tensors.items()})

    plan = c.c_void_p()
    check(lib.flashsdk_plan_forward(c.byref(args), c.byref(plan)))
    size = lib.flashsdk_plan_workspace_size(plan)
    memory = c.create_string_buffer(size + 256)
    address = c.addressof(memory)
    check(lib.flashsdk_plan_launch(plan, address + -address % 256, size, None))
    lib.flashsdk_plan_destroy(plan)

    for i in range(rows):
        of_q = q[i * dim : (i + 1) * dim]
        dots = (sum(a * b for a, b in zip(of_q, k[j * dim :])) for j in range(rows))
        p = [math.exp(x / math.sqrt(dim)) for x in dots]
        for n in range(dim):
            want = sum(p[j] * v[j * dim + n] for j in range(rows)) / sum(p)
            assert abs(out[i * dim + n] - want) < 1e-6, (i, n, out[i * dim + n], want)
    args.q = None
    status = lib.flashsdk_plan_forward(c.byref(args), c.byref(plan))
    assert (status, lib.flashsdk_last_error()) == (1, b"q: not given; a tensor")
    print(f"flashsdk {lib.flashsdk_version().decode()}: as the definition")


if __name__ == "__main__":
    main()
