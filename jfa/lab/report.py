"""What the compiler makes of a kernel, for sm_90 and sm_100, without a GPU.

Triton compiles several mistakes without complaint: too much tensor memory gives a stub, too many registers
lose every ``setmaxnreg``, a two-CTA MMA forgets its cluster. ``Report.problems`` names them all.
Two show in the emulator instead: one body compiled for two kinds of barriers (emulator/mangling.py), and a
name that a loop loses (emulator/carried.py).
"""

import gzip
import html
import re
from dataclasses import dataclass
from pathlib import Path

from jfa.lab import launches, offline, toolchain
from jfa.lab.launches import Launch, capture_launches
from jfa.lab.offline import CompileError
from jfa.lab.toolchain import Opcodes, ToolMissing

__all__ = [
    "Comparison",
    "CompileError",
    "Launch",
    "Opcodes",
    "Report",
    "ToolMissing",
    "capture_launches",
    "compare",
    "compile_report",
    "make_signature",
]

TARGETS = {"sm_90": 90, "sm_100": 100}
SHARED_LIMIT = 232448  # bytes a CTA may ask for on both targets: 227 KiB
TMEM_LIMIT = 512  # 32-bit columns of tensor memory in an SM
REGISTER_FILE = 65536  # 32-bit registers in an SM
WARP_LIMIT = 32
SHOWN = ("HGMMA", "UTCMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDTM", "MUFU_EX2", "UGETNEXTWORKID")


@dataclass(frozen=True)
class Report:
    """What one kernel became on one target.

    ``registers`` are a thread's at launch (setmaxnreg changes them in each task), ``tmem_columns`` 32-bit
    columns rounded up by the compiler to a power of two. ``setmaxnreg`` lists (direction, count) in the order
    of the code, ``requested_registers`` what the tasks asked for. ``missing`` says which questions no tool on
    this machine could answer; the fields concerned are None.
    """

    kernel: str
    arch: str
    warps: int
    shared_bytes: int
    tmem_columns: int
    cluster: tuple[int, ...]
    global_scratch_bytes: int
    setmaxnreg: tuple[tuple[str, int], ...]
    requested_registers: tuple[int, ...]
    ptx_instructions: int
    uses_cluster: tuple[str, ...]
    layout_conversions: int
    traps: tuple[str, ...]
    seconds: float
    registers: int | None = None
    barriers: int | None = None
    stack_bytes: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    instructions: int | None = None
    counts: dict | None = None
    missing: tuple[str, ...] = ()
    files: str = ""

    @property
    def opcodes(self):
        """Machine instructions by opcode or group (``report.opcodes["HGMMA"]``); ToolMissing if not known."""
        if self.counts is None:
            raise ToolMissing("; ".join(self.missing))
        return Opcodes(self.counts)

    def text(self, stage):
        """The kernel as text at a stage: "ttir", "ttgir", "llir", "ptx" or "sass"."""
        path = Path(f"{self.files}.{stage}.gz")
        if not path.exists():
            why = "; ".join(self.missing) or f"{path} is not there"
            raise ToolMissing(f"no {stage} was kept for {self.kernel}: {why}")
        return gzip.decompress(path.read_bytes()).decode()

    @property
    def serialized(self):
        """The assembler's notes that wgmma instructions were made to wait for each other."""
        return tuple(line for line in self.warnings if re.search(r"C75\d\d|serializ", line))

    def problems(self, allow_spills=False):
        """What a launch would reject and what silently ruins the kernel: sentences, none if it is sound."""
        found = []
        if self.tmem_columns > TMEM_LIMIT:
            found.append(f"{self.tmem_columns} tensor-memory columns of {TMEM_LIMIT}: the body is a stub")
        elif self.instructions is not None and self.instructions < 32 < self.ptx_instructions / 3:
            found.append(f"the body was replaced by a stub of {self.instructions} instructions")
        if self.shared_bytes > SHARED_LIMIT:
            found.append(f"{self.shared_bytes} bytes of shared memory of {SHARED_LIMIT}: cannot launch")
        if self.warps > WARP_LIMIT:
            found.append(f"{self.warps} warps of {WARP_LIMIT}: cannot launch")
        if (self.registers or 0) * self.warps * 32 > REGISTER_FILE:
            found.append(f"{self.registers} registers in {self.warps} warps exceed the register file")
        if self.requested_registers and not self.setmaxnreg:
            asked = ", ".join(map(str, self.requested_registers))
            found.append(f"tasks asked for {asked} registers and got none (no setmaxnreg): ask for fewer")
        if self.uses_cluster and max(self.cluster) == 1:
            found.append(f"uses {', '.join(self.uses_cluster)} without a cluster: pass ctas_per_cga")
        if not allow_spills and (self.spill_store_bytes or self.spill_load_bytes):
            found.append(f"spills {self.spill_store_bytes} bytes out and {self.spill_load_bytes} bytes in")
        return found + list(self.serialized) + list(self.traps)

    def check(self, allow_spills=False):
        """Raise AssertionError with every problem and every unanswered question; gives the report itself."""
        found = self.problems(allow_spills) + [f"not known: {what}" for what in self.missing]
        if found:
            raise AssertionError(f"{self.kernel} on {self.arch}: " + "; ".join(found))
        return self

    def row(self):
        """The report as one flat dict, for a table of several."""
        assembled, disassembled = self.registers is not None, self.counts is not None
        groups = self.opcodes.groups() if disassembled else {}
        limits = sorted({count for _, count in self.setmaxnreg}, reverse=True)
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "warps": self.warps,
            "registers": self.registers if assembled else "?",
            "setmaxnreg": "/".join(map(str, limits)),
            "spills B": f"{self.spill_store_bytes}/{self.spill_load_bytes}" if assembled else "?",
            "shared B": self.shared_bytes,
            "TMEM columns": self.tmem_columns,
            "cluster": "x".join(map(str, self.cluster)),
            "instructions": self.instructions if disassembled else "?",
            "opcodes": " ".join(f"{n}:{groups[n]}" for n in SHOWN if n in groups) if disassembled else "?",
            "problems": len(self.problems()),
        }

    def _notes(self):
        return [("problem", text) for text in self.problems()] + [
            ("not known", text) for text in self.missing
        ]

    def table(self):
        """The report as a Markdown table of two columns."""
        rows = [*self.row().items(), *self._notes()]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])

    def __str__(self):
        return "\n".join(f"{name:<13} {value}" for name, value in [*self.row().items(), *self._notes()])

    def _repr_html_(self):
        return Comparison([self])._repr_html_()


class Comparison:
    """Several reports side by side; prints as a text table, shows as HTML in a notebook."""

    def __init__(self, reports, names=None):
        self.reports = list(reports)
        self.rows = [report.row() for report in self.reports]
        if names is not None:
            self.rows = [{"step": name, **row} for name, row in zip(names, self.rows, strict=True)]

    def __str__(self):
        if not self.rows:
            return "no reports"
        cells = [list(self.rows[0])] + [[str(value) for value in row.values()] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in cells)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    __repr__ = __str__

    def _repr_html_(self):
        if not self.rows:
            return "no reports"

        def line(values, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

        body = line(self.rows[0], "th") + "".join(line(row.values(), "td") for row in self.rows)
        notes = [f"{r.kernel} on {r.arch}: {kind}: {text}" for r in self.reports for kind, text in r._notes()]
        return f"<table>{body}</table>" + "".join(f"<br>{html.escape(note)}" for note in notes)


def compare(reports):
    """A table of several reports; give a list, or a dict to name the rows."""
    if isinstance(reports, dict):
        return Comparison(reports.values(), list(reports))
    return Comparison(reports)


def make_signature(kernel, *args, **kwargs):
    """(signature, constexprs) that a launch with these arguments has; CPU tensors and descriptors are fine.

    Both dicts go by parameter name. Ints equal to 1 and None become constants, as in a launch.
    """
    from triton.compiler.compiler import make_backend

    launch = launches.capture(kernel, args, kwargs)
    _, signature, constants, _ = launches.specialize(launch, make_backend(offline.target_of(90)))
    names = launch.kernel.arg_names
    kept = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    return kept, {names[path[0]]: value for path, value in constants.items()}


def compile_report(
    kernel,
    signature=None,
    constexprs=None,
    arch="sm_90",
    *,
    num_warps=None,
    num_stages=None,
    args=None,
    kwargs=None,
    attrs=None,
    **options,
):
    """Compile a kernel for "sm_90" or "sm_100" on any machine and report what came out.

    Either ``signature`` (parameter name to Triton type: "*bf16", "i32", "tensordesc<bf16[64,128]>") and
    ``constexprs`` (name to value, jit functions included) describe the kernel, num_warps 4 and num_stages 1
    by default, or ``args`` and ``kwargs`` are those of a launch, whose defaults are Triton's. ``attrs`` maps
    a parameter to a divisor of its value; pointers have 16. ``options`` are Triton's (``ctas_per_cga``, ...).
    Raises CompileError when the compiler refuses, ToolMissing when the target's assembler is not installed.
    Results are kept on disk (``JFA_CACHE``, else build/cache). Triton's driver is untouched afterwards.
    """
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    if arch not in TARGETS:
        raise ValueError(f"arch must be one of {', '.join(TARGETS)}, got {arch!r}")
    target = offline.target_of(TARGETS[arch])
    toolchain.require(toolchain.assembler(target.arch), f"compiling for {arch}")
    backend = make_backend(target)
    given = {"num_warps": num_warps, "num_stages": num_stages, **options}
    given = {name: value for name, value in given.items() if value is not None}
    if args is not None:
        launch = launches.capture(kernel, args, {**(kwargs or {}), **given})
        function = launch.kernel
        parsed, types, constants, attributes = launches.specialize(launch, backend)
    else:
        function = launches.unwrap(kernel)
        parsed = backend.parse_options({"num_warps": 4, "num_stages": 1, **given})
        unknown = [name for name in given if not hasattr(parsed, name)]
        if unknown:
            raise TypeError(f"no compile option {', '.join(unknown)}")
        types, constants, attributes = _describe(function, signature or {}, constexprs or {}, attrs or {})
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    fields, files = offline.compile_source(source, target, parsed)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    lists["setmaxnreg"] = tuple((way, count) for way, count in fields["setmaxnreg"])
    return Report(**{**fields, **lists}, files=files)


def _describe(function, signature, constexprs, attrs):
    """(types, constants, attributes) as Triton's ASTSource takes them; TypeError on wrong names."""
    names = function.arg_names
    for name, parameter in function.signature.parameters.items():
        if parameter.default is not parameter.empty and name not in signature:
            constexprs = {name: parameter.default, **constexprs}
    unknown = [name for name in (*signature, *constexprs, *attrs) if name not in names]
    missing = [name for name in names if name not in signature and name not in constexprs]
    if unknown or missing:
        raise TypeError(f"{function.__name__}: unknown arguments {unknown}, missing arguments {missing}")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    divisors = {name: 16 for name, kind in signature.items() if str(kind).startswith("*")} | attrs
    attributes = {(names.index(name),): [["tt.divisibility", divisor]] for name, divisor in divisors.items()}
    return types, {(names.index(name),): value for name, value in constexprs.items()}, attributes
