"""An experiment: the wait for O += P V stays behind the softmax that runs under this product.

In the source it stands there. Nothing that the softmax computes is needed for the wait, so ptxas moves it up,
before all exponentials (`jfa.lab.loops.before_the_last_wait`). Here it is tied to the row sums: by an
instruction that is never executed, since they are never negative, but that the compiler moves nothing past.
Experiment of jfa.lab.ladder; on `staged` it lost 1 to 3 % on seven shapes of an H200.
"""

import triton
import triton.language as tl

from jfa.lab import ablation

EDITS = [
    ablation.imported("jfa.lab.late", "tied"),
    (
        r"(?m)^( +)acc = tlx\.async_dot_wait\(0, acc\)\n +group\.v\.release\(item - 1\)",
        r"\1total = tied(total)\n\g<0>",
        1,
    ),
]


@triton.jit
def tied(total):
    """``total`` itself; what the program does next stays behind whatever made it."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.lt.f32 q, $1, 0f00000000; @q pmevent 1; mov.f32 $0, $1; }",
        "=r,r", [total], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


def waiting(step):
    """The forward step with its wait held back."""
    return ablation.edited(step, EDITS)
