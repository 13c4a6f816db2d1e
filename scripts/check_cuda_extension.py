"""Loads an extension that was built with CUDA, where there may be neither a GPU nor its driver.

python scripts/check_cuda_extension.py FOLDER_OF_THE_EXTENSION
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    (library,) = Path(sys.argv[1]).glob("_bindings*.so")
    sys.path.insert(0, str(ROOT / "python"))
    # Under its name in the package, before the package looks for one beside its Python files.
    spec = importlib.util.spec_from_file_location("flashsdk._bindings", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flashsdk._bindings"] = module
    spec.loader.exec_module(module)

    import flashsdk as fs
    import numpy as np

    kernels = fs.kernels()
    gpu = [kernel for kernel in kernels if kernel["backend"] != "cpu"]
    assert fs.build_info()["cuda"] and gpu, "no GPU kernels in it"
    q, k, v = (np.ones((1, 20, 2, 16), np.float32) for _ in range(3))
    assert np.array_equal(fs.mha_fwd(q, k, v)[0], v)
    # Messages are made in Python and travel as strings, which casts of every file have to read.
    for wrong, message in (
        ({"v": [1]}, "v: list; an array of NumPy"),
        ({"v": np.ones(v.shape)}, "v: dtype float64; float32, "),
        ({"softcap": "1"}, "softcap: '1'; a number"),
        ({"backend": "gpu"}, "backend: "),
    ):
        try:
            fs.mha_fwd(**{"q": q, "k": k, "v": v, **wrong})
        except fs.Error as e:
            assert str(e).startswith(message), e
        else:
            raise AssertionError(f"{wrong} was taken")
    here = sum(kernel["available"] for kernel in gpu)
    print(
        f"{library.name}: {len(gpu)} GPU kernels, {here} of them for this machine; loads and runs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
