"""Compiling for a GPU that is not here, with what the compiler says kept on disk."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import threading
import time
from pathlib import Path

from jfa.lab import launches, toolchain
from jfa.lab import source as code
from jfa.lab.toolchain import ToolMissing

STAGES = ("ttir", "ttgir", "llir", "ptx")

_compiling = threading.RLock()


class CompileError(RuntimeError):
    """The compiler refused a kernel; the message holds its reasons, outermost first."""


def cache_folder():
    """Where results are kept: ``JFA_CACHE``, else build/cache of the checkout, else the user's cache."""
    if os.environ.get("JFA_CACHE"):
        return Path(os.environ["JFA_CACHE"])
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists() and os.access(checkout, os.W_OK):
        return checkout / "build" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jfa"


def target_of(capability):
    """Triton's name of an NVIDIA GPU of this compute capability (90, 100)."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def compile_source(source, target, options):
    """(fields, files) of a Triton AST source compiled for a target, from the disk when it is known there.

    ``fields`` is a dict of plain values for ``jfa.lab.report.Report``; ``files`` is the path that the texts
    of the stages begin with. The process's Triton driver, knobs and environment are as before afterwards,
    also after an exception. Raises CompileError.
    """
    key = _key(source, target, options)
    kept = cache_folder() / "reports" / key[:2] / key
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(f"{kept}.json").read_text()), str(kept)
    fields, texts = _compile(source, target, options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    for stage, text in texts.items():
        _write(Path(f"{kept}.{stage}.gz"), gzip.compress(text.encode(), 5, mtime=0))
    _write(Path(f"{kept}.json"), json.dumps(fields).encode())
    return json.loads(json.dumps(fields)), str(kept)


def _write(path, content):
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_bytes(content)
    partial.replace(path)


def _content(value):
    """A constant as text that changes whenever its content does, jit functions by their source."""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_content, value)) + ")"
    if hasattr(value, "cache_key"):
        return value.cache_key
    if hasattr(value, "hash_attrs"):
        return f"{value.__name__}{value.__annotations__}" + "".join(map(_content, value.hash_attrs))
    return repr(value)


def _key(source, target, options):
    import triton

    tools = [name for name in ("ptxas", "ptxas-blackwell", "nvdisasm") if toolchain.locate(name)]
    settings = {
        name: value
        for name, value in os.environ.items()
        if re.match("TRITON_|PTXAS_|DISABLE_|LLVM_", name) and not re.search("CACHE|HOME|DUMP_DIR", name)
    }
    helpers = code.reachable(source.fn)  # Triton's own key remembers what their names meant at first
    for value in source.constants.values():
        if hasattr(value, "raw_src") or hasattr(value, "hash_attrs"):
            code.reachable(value, helpers)
    parts = (
        triton.__version__,
        target,
        options.hash(),
        source.fn.cache_key,
        sorted(source.signature.items()),
        sorted((path, _content(value)) for path, value in source.constants.items()),
        sorted(source.attrs.items()),
        sorted((name, code.source(helper)) for name, helper in helpers.items()),
        code.constants(source.fn),
        tools,
        sorted(settings.items()),
        *(Path(module.__file__).read_text() for module in (toolchain, launches)),
        Path(__file__).read_text(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class _Offline:
    """Stands for a GPU driver while a kernel is compiled for a target that is not here."""

    def __init__(self, target):
        self._target = target

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")


def _watch(async_dot, traps):
    """async_dot for sm_90 that notes every argument which the compiler drops there without a word."""

    def watched(*args, **kwargs):
        given = async_dot.signature.bind(*args, **kwargs).arguments

        def value(name):
            return getattr(given.get(name), "value", given.get(name))

        dropped = ["use_acc"] * (value("use_acc") is not None and value("use_acc") is not True)
        dropped += ["pred"] * (value("pred") is not None)
        dropped += ["mBarriers"] * bool(given.get("mBarriers"))
        dropped += ["two_ctas"] * (value("two_ctas") not in (None, False))
        if dropped:
            names = ", ".join(dropped)
            traps.append(
                f"async_dot ignores {names} on sm_90: chain the accumulator, or pass none to start at 0"
            )
        return async_dot(*args, **kwargs)

    watched.__dict__.update(async_dot.__dict__)
    watched.__name__, watched.__module__ = async_dot.__name__, async_dot.__module__
    return watched


@contextlib.contextmanager
def _compiler_for(target, traps):
    """Let Triton compile for a target: own driver, own cache folder, a watch on dropped arguments."""
    import triton.language.extra.tlx as tlx
    from triton import knobs
    from triton.runtime import driver

    with _compiling, knobs.cache.scope(), knobs.compilation.scope():
        driver_before, dot_before = driver._active, tlx.async_dot
        try:
            driver.set_active(_Offline(target))
            knobs.cache.dir = str(cache_folder() / "triton")
            knobs.compilation.always_compile = True
            if target.arch < 100:
                tlx.async_dot = _watch(dot_before, traps)
            yield
        finally:
            tlx.async_dot = dot_before
            driver._active = driver_before


def _compile(source, target, options):
    import triton

    traps, missing = [], []
    start = time.perf_counter()
    with _compiler_for(target, traps):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                compiled = triton.compile(source, target=target, options=dict(options.__dict__))
        except Exception as error:
            raise CompileError(f"{source.name} for sm_{target.arch}: {_reasons(error)}") from error
    texts = {stage: compiled.asm[stage] for stage in STAGES}
    fields = _read(compiled.metadata, texts, source, traps)
    try:
        fields |= toolchain.assemble(texts["ptx"], target.arch, options)
    except ToolMissing as error:
        missing.append(str(error))
    try:
        texts["sass"] = toolchain.disassemble(compiled.asm["cubin"])
        fields["counts"] = dict(toolchain.count_opcodes(texts["sass"]).items())
        fields["instructions"] = sum(fields["counts"].values())
    except ToolMissing as error:
        missing.append(str(error))
    fields |= {"missing": missing, "seconds": round(time.perf_counter() - start, 3)}
    return fields, texts


def _reasons(error):
    chain = []
    while error is not None and len(chain) < 4:
        chain.append(f"{type(error).__name__}: {str(error).strip()[-1500:]}")
        error = error.__cause__ or error.__context__
    return "\n  because of ".join(chain)


def _read(metadata, texts, source, traps):
    """What the metadata and the intermediate code say, before any tool is asked."""
    ptx, ttgir = texts["ptx"], texts["ttgir"]
    cluster_uses = {
        "a two-CTA MMA": r"cta_group::2",
        "multicast": r"(?m)^(?!.*clusterlaunchcontrol).*multicast::cluster",
        "another CTA's memory": r"\bmapa\b",
    }
    asked = re.findall(r"requestedRegisters = array<i32: ([\d, ]+)>", ttgir)
    if "tt.warp_specialize" in texts["ttir"] and "ttg.warp_specialize(" not in ttgir:
        traps.append("tl.range(warp_specialize=True) specialized nothing: it needs TRITON_USE_META_WS=1")
    return {
        "kernel": source.name,
        "arch": f"sm_{metadata.target.arch}",
        "warps": metadata.num_warps,
        "shared_bytes": metadata.shared,
        "tmem_columns": metadata.tmem_size or 0,
        "cluster": tuple(metadata.cluster_dims),
        "global_scratch_bytes": metadata.global_scratch_size or 0,
        "setmaxnreg": [
            (way, int(count)) for way, count in re.findall(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", ptx)
        ],
        "requested_registers": [int(count) for group in asked for count in group.split(",")],
        "ptx_instructions": len(re.findall(r"^\s+(?:@!?%p\d+\s+)?[a-z][\w.:]*\s.*;", ptx, re.M)),
        "uses_cluster": [name for name, pattern in cluster_uses.items() if re.search(pattern, ptx)],
        "layout_conversions": ttgir.count("ttg.convert_layout "),
        "traps": list(dict.fromkeys(traps)),
    }
