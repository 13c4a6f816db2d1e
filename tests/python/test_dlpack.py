"""Arrays of an unknown framework, lent through DLPack: every field counts, all is given back."""

import contextlib
import ctypes

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits, qkv

CPU, CUDA, CUDA_MANAGED, FLOAT = 1, 2, 13, 2
# Not ctypes.pythonapi, whose argument types JAX sets for the whole process.
api = ctypes.PyDLL(None)
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Lent:
    """A float32 NumPy array that shows itself through DLPack alone."""

    def __init__(self, array: np.ndarray, *, old=False, compact=False, major=1, flags=0, **fields):
        self.array, self.old, self.major, self.flags = array, old, major, flags
        self.given, self.returned, self.kept = 0, 0, []
        self.shape = array.shape
        n = array.ndim
        self.fields = {
            "data": array.__array_interface__["data"][0],
            "device_type": CPU,
            "ndim": n,
            "code": FLOAT,
            "bits": 32,
            "lanes": 1,
            "shape": (ctypes.c_int64 * n)(*array.shape),
            "strides": None if compact else (ctypes.c_int64 * n)(*(s // 4 for s in array.strides)),
            "byte_offset": 0,
        } | fields

    def __dlpack_device__(self):
        return self.fields["device_type"], 0

    def __dlpack__(self, **keywords):
        self.asked = keywords
        if self.old and keywords:
            raise TypeError("no keywords before version 1")
        tensor = Tensor(**self.fields)
        deleter = DELETER(self._take_back)
        if self.old:
            managed = Managed(tensor, None, deleter)
        else:
            managed = Versioned(self.major, 0, None, deleter, self.flags, tensor)
        name = b"dltensor" if self.old else b"dltensor_versioned"
        # A capsule that nobody has taken over, and so renamed, gives its tensor back in the end.
        unused = DELETER(lambda c: self._take_back(c) if api.PyCapsule_IsValid(c, name) else None)
        self.kept += [managed, deleter, name, unused]
        self.given += 1
        return api.PyCapsule_New(ctypes.addressof(managed), name, unused)

    def _take_back(self, _):
        self.returned += 1


def outputs(q, v):
    shape = (*q.shape[:3], v.shape[3])
    return {
        "out": np.full(shape, np.nan, "f"),
        "lse": np.full(np.moveaxis(q, 2, 1).shape[:3], np.nan, "f"),
    }


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_strides_and_offsets(old):
    q, k, v, _ = qkv((20, 30), (4, 2), 16)
    want = fs.mha_fwd(q, k, v)
    far = np.concatenate([np.full(100, np.nan, "f"), k.ravel()])
    lent = [
        Lent(q, old=old, compact=True),
        Lent(far[100:].reshape(k.shape), old=old, data=far.ctypes.data, byte_offset=400),
        Lent(np.ascontiguousarray(v[:, ::-1])[:, ::-1], old=old),
    ]
    given = outputs(q, v)
    fs.mha_fwd(*lent, **given)
    assert_same_bits(given.values(), want)
    assert all(x.given == 1 for x in lent)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_outputs_are_written(old):
    q, k, v, dout = qkv((20, 30), 2, 16)
    out, lse = fs.mha_fwd(q, k, v)
    want = fs.mha_bwd(dout, q, k, v, out, lse)
    given = {
        f"d{n}": Lent(np.full_like(x, np.nan), old=old)
        for n, x in zip("qkv", (q, k, v), strict=True)
    }
    returned = fs.mha_bwd(dout, q, k, v, out, lse, **given)
    assert all(a is b for a, b in zip(returned, given.values(), strict=True))
    assert_same_bits([x.array for x in given.values()], want)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_everything_lent_is_given_back(old):
    """Once, after a call that works and after one that is refused."""
    arrays = qkv((20, 30), 2, 16)[:3]
    given = outputs(arrays[0], arrays[2])
    for bad in ({}, {"softcap": -1.0}, {"backend": "sm90"}):
        lent = [Lent(x, old=old) for x in arrays]
        refused = pytest.raises(fs.Error, match=f"^{next(iter(bad), '')}: ")
        with refused if bad else contextlib.nullcontext():
            fs.mha_fwd(*lent, **given, **bad)
        assert all(x.given == x.returned for x in lent)
        assert sum(x.given for x in lent) >= 1


BAD = {
    "lanes": ({"lanes": 4}, "float32x4"),
    "complex": ({"code": 5, "bits": 64}, "complex"),
    "float64": ({"bits": 64}, "float64"),
    "int8": ({"code": 0, "bits": 8}, "int8"),
    "rank 0": ({"ndim": 0}, "shape ()"),
    "rank 99": ({"ndim": 99}, "99"),
    "negative rank": ({"ndim": -1}, "-1"),
    "null": ({"data": None}, "null"),
    "unaligned": ({"byte_offset": 2}, "multiple of 4"),
    "version 2": ({"major": 2}, "2"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_fields_are_not_trusted(case):
    change, word = case
    q, k, v, _ = qkv((20, 30), 2, 16)
    lent = Lent(k, **change)
    with pytest.raises(fs.Error, match=r"^k: .*; ") as caught:
        fs.mha_fwd(q, lent, v)
    assert word in str(caught.value)
    assert lent.given == lent.returned == 1


def test_memory_of_a_gpu():
    """Without CUDA the line says how to get it; beside arrays of the CPU it is a mix."""
    q, k, v, _ = qkv((20, 30), 2, 16)
    with pytest.raises(fs.Error, match=r"^k: on cuda:0; cpu"):
        fs.mha_fwd(q, Lent(k, device_type=CUDA), v)
    if fs.build_info()["cuda"]:
        pytest.skip("this build has CUDA")
    on_gpu = [Lent(x, device_type=CUDA) for x in (q, k, v)]
    with pytest.raises(fs.Error, match=r"^q: on cuda:0; cpu.*FLASHSDK_CUDA=ON") as caught:
        fs.mha_fwd(*on_gpu, **{n: Lent(x, device_type=CUDA) for n, x in outputs(q, v).items()})
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("device", [CUDA, CUDA_MANAGED])
def test_memory_of_a_gpu_is_asked_for_on_a_stream(device):
    """So that the producer has our stream wait for what is still being written."""
    q, k, v, _ = qkv((20, 30), 2, 16)
    lent = Lent(k, device_type=device)
    with pytest.raises(fs.Error, match=r"^k: on cuda:0; cpu"):
        fs.mha_fwd(q, lent, v)
    assert lent.asked == {"stream": 1, "max_version": (1, 0)}  # 1 is the default one
    lent = Lent(k)
    fs.mha_fwd(q, lent, v)
    assert lent.asked == {"max_version": (1, 0)}


def test_read_only_memory():
    q, k, v, _ = qkv((20, 30), 2, 16)
    want = fs.mha_fwd(q, k, v)
    given = outputs(q, v)
    fs.mha_fwd(*(Lent(x, flags=1) for x in (q, k, v)), **given)
    assert_same_bits(given.values(), want)
    with pytest.raises(fs.Error, match=r"^out: read-only; "):
        fs.mha_fwd(q, k, v, out=Lent(given["out"], flags=1))


def test_copies_that_are_lent():
    """To read they will do; what is written into one is seen by nobody."""
    q, k, v, _ = qkv((20, 30), 2, 16)
    want = fs.mha_fwd(q, k, v)
    given = outputs(q, v)
    fs.mha_fwd(*(Lent(x, flags=2) for x in (q, k, v)), **given)
    assert_same_bits(given.values(), want)
    with pytest.raises(fs.Error, match=r"^out: its __dlpack__ lends a copy; "):
        fs.mha_fwd(q, k, v, out=Lent(given["out"], flags=2))


def test_no_capsule():
    class Liar:
        shape = (1, 2, 3, 4)

        def __dlpack__(self, **_):
            return 7

        def __dlpack_device__(self):
            return CPU, 0

    q, _, v, _ = qkv((20, 30), 2, 16)
    with pytest.raises(fs.Error, match=r"^k: .*int; "):
        fs.mha_fwd(q, Liar(), v)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("out of paper\nand ink"), "out of paper"),
        (RuntimeError("out\0 of \x1b[1mpaper"), r"out of \[1mpaper"),
        (RuntimeError("no character: \ud800, no line: \u2028"), "no character: , no line:"),
        (RuntimeError("x" * 10_000), "x{100,200}…"),
        (Unspeakable(), "its text cannot be had"),
    ],
)
def test_producers_that_fail(error, words):
    """Their own words are in the line, in short."""

    class Broken:
        shape = (1, 2, 3, 4)

        def __dlpack__(self, **_):
            raise error

        def __dlpack_device__(self):
            return CPU, 0

    q, _, v, _ = qkv((20, 30), 2, 16)
    with pytest.raises(fs.Error, match=rf"^k: .*{words}.*; ") as caught:
        fs.mha_fwd(q, Broken(), v)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__", "is_neg"])
def test_producers_that_are_interrupted(where):
    """Ctrl-C stays what it is."""

    def interrupted(self, **_):
        raise KeyboardInterrupt

    kind = type("Interrupted", (Lent,), {where: interrupted})
    q, k, v, _ = qkv((20, 30), 2, 16)
    with pytest.raises(KeyboardInterrupt):
        fs.mha_fwd(q, kind(k), v)


def test_numpy_fields_of_records():
    """Strides that are no multiple of the element size."""
    q, k, v, _ = qkv((20, 30), 2, 16)
    odd = np.zeros(k.shape[:3], [("value", np.float32, (16,)), ("flag", np.uint8)])["value"]
    with pytest.raises(fs.Error, match=r"^k: a stride of \d+ bytes; .*4"):
        fs.mha_fwd(q, odd, v)


def test_numpy_subclasses():
    class Mine(np.ndarray):
        pass

    q, k, v, _ = qkv((20, 30), 2, 16)
    want = fs.mha_fwd(q, k, v)
    assert_same_bits(fs.mha_fwd(*(x.view(Mine) for x in (q, k, v))), want)
