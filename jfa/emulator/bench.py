"""How fast the emulator is: `python -m jfa.emulator.bench [seconds]`.

One CTA of a warp-specialized Blackwell attention forward (loader, MMA and softmax roles): a query tile of 128
rows against eight KV blocks of 128 keys, head dimension 128, bfloat16, on one core. Prints the best and the
median processor time, with the happens-before checks on and off and with the trace on; the goal is 10 ms with
checks.
"""

import argparse
import statistics
import time

import numpy as np

from . import emulate, install_standin

BLOCK = 128
BLOCKS = 8


def make_kernel():
    """The benchmark kernel (defined here, so that importing this module needs no Triton)."""
    try:
        import triton  # noqa: F401
    except ImportError:
        install_standin()
    from . import bench_kernel

    return bench_kernel.attention


def inputs():
    """Seeded host tensors: q, k, v, out."""
    import torch

    rng = np.random.default_rng(0)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((n, BLOCK), np.float32)).to(torch.bfloat16)
        for n in (BLOCK, BLOCK * BLOCKS, BLOCK * BLOCKS)
    )
    return q, k, v, torch.empty(BLOCK, BLOCK, dtype=torch.bfloat16)


def reference(q, k, v):
    scores = q.float() @ k.float().T * BLOCK**-0.5
    return scores.softmax(-1) @ v.float()


def launch(kernel, tensors, **options):
    """One launch; returns its report."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    q, k, v, out = tensors
    tiles = [TensorDescriptor.from_tensor(x, [BLOCK, BLOCK]) for x in (q, k, v, out)]
    with emulate(arch="sm_100", **options) as e:
        kernel[(1,)](*tiles, BLOCKS, BLOCK**-0.5 * 1.4426950408889634, BLOCK=BLOCK, DEPTH=3, num_warps=4)
    return e.reports[0]


def measure(kernel, tensors, seconds, **options):
    """(best, median) processor time of a launch in milliseconds."""
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.process_time()
        launch(kernel, tensors, **options)
        times.append((time.process_time() - start) * 1e3)
    return min(times), statistics.median(times)


def main(seconds=2.0):
    kernel = make_kernel()
    tensors = inputs()
    report = launch(kernel, tensors)
    error = (tensors[3].float() - reference(*tensors[:3])).abs().max().item()
    print(f"one 128-row query tile, {BLOCKS} KV blocks of 128, D=128: max error {error:.1e}, {report!r}")
    rows = (("checks on", {}), ("checks off", {"checks": False}), ("checks and trace", {"trace": True}))
    for name, options in rows:
        best, median = measure(kernel, tensors, seconds, **options)
        print(f"{name:18s} best {best:6.2f} ms   median {median:6.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m jfa.emulator.bench", description=__doc__.splitlines()[0])
    parser.add_argument("seconds", nargs="?", type=float, default=2.0, help="to time each variant for")
    main(parser.parse_args().seconds)
