"""The NVIDIA tools that come with Triton: which of them are here, and what they say about a kernel."""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

# Instruction groups by the part of the machine they use. A name that is no group counts every opcode that
# begins with it.
GROUPS = {
    "HGMMA": r"[HQI]GMMA",
    "UTCMMA": r"UTC\w*MMA",
    "UTCMMA_2CTA": r"UTC\w*MMA\S*2CTA",
    "UTCQMMA": r"UTCQMMA|UTCOMMA|UTCMXQMMA",
    "UTMALDG": r"UTMALDG",
    "UTMALDG_2CTA": r"UTMALDG\S*2CTA",
    "UTMALDG_MULTICAST": r"UTMALDG\S*MULTICAST",
    "UTMASTG": r"UTMASTG",
    "UTMAREDG": r"UTMAREDG",
    "UBLKCP": r"UBLKCP",
    "UBLKRED": r"UBLKRED",
    "LDTM": r"LDTM",
    "STTM": r"STTM",
    "UTCBAR": r"UTCBAR",
    "UTCCP": r"UTCCP",
    "LDL": r"LDL",
    "STL": r"STL",
    "LDS": r"LDS(?!M)",
    "STS": r"STS(?!M)",
    "LDSM": r"LDSM",
    "STSM": r"STSM",
    "LDG": r"LDG",
    "STG": r"STG",
    "RED": r"RED|ATOMG|REDG",
    "MUFU_EX2": r"MUFU\.EX2",
    "USETMAXREG": r"USETMAXREG",
    "BAR": r"BAR",
    "SYNCS": r"SYNCS",
    "UCGABAR": r"UCGABAR|CGABAR|BARRIER\.CLUSTER",
    "UGETNEXTWORKID": r"UGETNEXTWORKID",
    "PACKED_FP32": r"FFMA2|FMUL2|FADD2",
    "HMMA": r"HMMA",
    "SHFL": r"SHFL",
    "WARPGROUP": r"WARPGROUP",
    "STAS": r"STAS",
}


class ToolMissing(RuntimeError):
    """A program that the question needs is not installed on this machine."""


class Opcodes(Counter):
    """Counts of machine instructions by full opcode, readable by group or by the beginning of a name.

    ``opcodes["HGMMA"]`` counts a group of ``GROUPS``; ``opcodes["UTMALDG.2D"]`` counts every opcode that
    begins so; absent ones count 0. Iteration and ``items()`` give full opcodes.
    """

    def __getitem__(self, name):
        pattern = GROUPS.get(name, re.escape(name))
        return sum(count for opcode, count in self.items() if re.match(pattern, opcode))

    def groups(self):
        """Nonzero counts by group, in the order of ``GROUPS``, as a dict."""
        return {name: self[name] for name in GROUPS if self[name]}


def locate(name):
    """Path of ``ptxas``, ``ptxas-blackwell`` or ``nvdisasm``, or None; Triton's own copy before the system's.

    A tool named by ``TRITON_PTXAS_PATH``, ``TRITON_PTXAS_BLACKWELL_PATH`` or ``TRITON_NVDISASM_PATH`` wins.
    """
    from triton.backends import nvidia

    chosen = os.environ.get(f"TRITON_{name.upper().replace('-', '_')}_PATH")
    if chosen and os.access(chosen, os.X_OK):
        return chosen
    shipped = Path(nvidia.__path__[0]) / "bin" / name
    if os.access(shipped, os.X_OK):
        return str(shipped)
    return shutil.which(name) if name == "nvdisasm" else None


def require(name, purpose):
    """Path of a tool, or ToolMissing with what it was wanted for and where it should lie."""
    path = locate(name)
    if path is None:
        variable = f"TRITON_{name.upper().replace('-', '_')}_PATH"
        raise ToolMissing(
            f"{purpose} needs {name}, which is not in this Triton installation (triton/backends/nvidia/bin); "
            f"install fbtriton's full wheel or name the program in {variable}"
        )
    return path


def assembler(capability):
    """Name of the assembler that Triton uses for a compute capability (90, 100)."""
    return "ptxas-blackwell" if capability >= 100 else "ptxas"


def assemble(ptx, capability, options):
    """What ``ptxas -v`` reports when it is run as Triton runs it; raises ToolMissing without the assembler.

    Returns a dict: registers, barriers, stack_bytes, spill_store_bytes, spill_load_bytes and warnings (lines
    about serialized wgmma and other warnings). ``options`` are Triton's parsed backend options.
    """
    program = require(assembler(capability), f"the register and spill report for sm_{capability}")
    command = [program, "-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name=sm_{capability}a"]
    if not options.enable_fp_fusion:
        command.append("--fmad=false")
    if options.ptx_options:
        command += options.ptx_options.split()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command += [str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    log = done.stderr + done.stdout
    if done.returncode:
        raise RuntimeError(f"{Path(program).name} failed: {log[-2000:]}")
    return parse_assembler_log(log)


def parse_assembler_log(log):
    """The numbers and warnings of one ``ptxas -v`` log, as ``assemble`` returns them."""

    def number(pattern):
        return sum(int(found) for found in re.findall(pattern, log))

    noted = [
        line.strip() for line in log.splitlines() if re.search(r"warning|\(C7\d+\)|serializ", line, re.I)
    ]
    return {
        "registers": max((int(found) for found in re.findall(r"Used (\d+) registers", log)), default=0),
        "barriers": number(r"used (\d+) barriers"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "spill_store_bytes": number(r"(\d+) bytes spill stores"),
        "spill_load_bytes": number(r"(\d+) bytes spill loads"),
        "warnings": noted,
    }


def disassemble(cubin):
    """SASS text of a cubin; raises ToolMissing without nvdisasm."""
    program = require("nvdisasm", "counting machine instructions")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        done = subprocess.run([program, "-c", str(binary)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr[-2000:]}")
    return done.stdout


def count_opcodes(sass):
    """Opcodes of SASS text, padding after the final branch not left out."""
    line_of_code = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)")
    found = (line_of_code.match(line) for line in sass.splitlines())
    return Opcodes(match.group(1) for match in found if match)
