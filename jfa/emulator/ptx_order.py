"""PTX instructions that order memory: they are handed to the machine, which knows what they order.

CTX.ordering is called with ('bulk_wait', n, read_only), ('bulk_commit',), ('cp_async_wait', n),
('cp_async_commit',), ('fence', scope), ('fence', scope, 'acquire' or 'release'), ('proxy_fence', space),
('griddepcontrol', what) and ('yield',).
"""

from .context import CTX, UnknownConstruct
from .ptx_registers import immediate

SCOPES = {"cta": "cta", "cluster": "cluster", "gpu": "gpu", "gl": "gpu", "sys": "sys"}
IGNORED = ("setmaxnreg", "prefetch", "prefetchu", "discard", "applypriority", "pmevent", "isspacep")


def _number(instruction):
    value = immediate(instruction.operands[0]) if instruction.operands else None
    if value is None:
        raise UnknownConstruct(f"PTX instruction {instruction.text!r} needs a literal count")
    return int(value)


def execute(instruction):
    """True when the instruction is one of these (and has been carried out)."""
    handler = HANDLERS.get(instruction.name)
    if handler is not None:
        handler(instruction)
        return True
    return instruction.name in IGNORED


def _cp(instruction):
    mods = instruction.mods
    if mods[:3] == ("async", "bulk", "wait_group"):
        CTX.ordering("bulk_wait", _number(instruction), "read" in mods[3:])
    elif mods[:3] == ("async", "bulk", "commit_group"):
        CTX.ordering("bulk_commit")
    elif mods == ("async", "wait_group"):
        CTX.ordering("cp_async_wait", _number(instruction))
    elif mods == ("async", "wait_all"):
        CTX.ordering("cp_async_wait", 0)
    elif mods == ("async", "commit_group"):
        CTX.ordering("cp_async_commit")
    else:
        raise UnknownConstruct(f"PTX instruction cp.{'.'.join(mods)}")


def _fence(instruction):
    mods = instruction.mods
    if mods and mods[0] == "proxy":
        if mods[1:2] not in (
            ("async",),
            ("alias",),
            ("tensormap",),
            ("tensormap::generic",),
            ("async::generic",),
        ):
            raise UnknownConstruct(f"PTX instruction fence.{'.'.join(mods)}")
        space = mods[2] if len(mods) > 2 else "all"
        CTX.ordering("proxy_fence", space if mods[1] == "async" else mods[1])
    elif mods and mods[0] == "mbarrier_init":
        pass  # it orders the initialization of barriers only, which is visible here by itself
    else:
        scope = next((SCOPES[m] for m in mods if m in SCOPES), None)
        known = {
            "sc",
            "acq_rel",
            "acquire",
            "release",
            "sync_restrict::shared::cta",
            "sync_restrict::shared::cluster",
        }
        if scope is None or any(m not in known and m not in SCOPES for m in mods):
            raise UnknownConstruct(f"PTX instruction fence.{'.'.join(mods)}")
        half = [m for m in mods if m in ("acquire", "release")]
        if any(m.startswith("sync_restrict") for m in mods):
            scope = "cta"  # it orders shared memory only
        CTX.ordering("fence", scope, *half)


def _membar(instruction):
    scope = next((SCOPES[m] for m in instruction.mods if m in SCOPES), None)
    if scope is None:
        raise UnknownConstruct(f"PTX instruction membar.{'.'.join(instruction.mods)}")
    CTX.ordering("fence", scope)


def _griddepcontrol(instruction):
    CTX.ordering("griddepcontrol", instruction.mods[0] if instruction.mods else "")


def _nanosleep(instruction):
    CTX.ordering("yield")


def _bar(instruction):
    if instruction.mods[:1] != ("warp",):
        raise UnknownConstruct(f"PTX instruction {instruction.text!r}")


HANDLERS = {
    "cp": _cp,
    "fence": _fence,
    "membar": _membar,
    "griddepcontrol": _griddepcontrol,
    "nanosleep": _nanosleep,
}
HANDLERS["bar"] = _bar
