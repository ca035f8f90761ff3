"""Executes the notebooks of the course: papermill's API, with its silences turned into failures.

    python -m jfa.lab.runner [--quick] [-p NAME VALUE] [--timeout SECONDS] [--jobs N] [--write] [NAME ...]

A NAME is a notebook's number, name or path; without one all of them run. Executed notebooks go to
build/notebooks/. A notebook passes when it is plain Python, every cell ran, the last one included, no cell
failed, the kernel and its threads lived, papermill had nothing to warn of, at least one claim was checked
(`jfa.lab.check.claim`) and none failed, caught or not. Claims are not read from what is printed: a cell that
is added for the run asks for them. The exit status is 1 if any notebook failed.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path

import nbformat

from jfa.lab import course, notebooks

BUILD = notebooks.ROOT / "build" / "notebooks"
TIMEOUT = 600
# What nbformat raises for a file that is missing, or of JSON that is no notebook.
UNREADABLE = (OSError, ValueError, nbformat.ValidationError, AttributeError, KeyError, TypeError)
CLAIMS = "application/vnd.jfa.claims+json"
ASK = f"""import sys
from IPython.display import display
check = sys.modules.get("jfa.lab.check")
found = check.claims() if check else {{"held": [], "failed": []}}
display({{{CLAIMS!r}: found | {{"dead threads": sys.jfa_dead_threads}}}}, raw=True)"""
ASKING = "jfa-claims"  # tag of the cell
# Run in the kernel before any cell: remembers threads that died of an exception, which no cell would show as
# its own. It leaves no name behind and counts as no cell.
WATCH = """
import sys, threading
show, sys.jfa_dead_threads = threading.excepthook, []
def remember(args):
    if args.exc_type is not SystemExit:
        name = args.thread.name if args.thread else "?"
        sys.jfa_dead_threads.append(f"{name}: {args.exc_type.__name__}: {args.exc_value}")
    show(args)
threading.excepthook = remember"""


@dataclasses.dataclass
class Result:
    """What one execution gave: wall seconds, how many claims were checked, the problems ([] if it passed)."""

    name: str
    seconds: float = 0.0
    claims: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problems


class _Warnings(logging.Handler):
    """Collects what papermill and nbclient only warn of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(f"{record.name} warns: {record.getMessage().strip().splitlines()[-1]}")


def refuse_unknown(notebook, given: dict[str, object]) -> None:
    """Raise ValueError when a parameter is given that the notebook's parameters cell does not define."""
    known = notebooks.parameters(notebook)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown parameters {unknown}; the notebook has {sorted(known)}")


def failures(notebook) -> list[str]:
    """Return what failed in an executed notebook, by its cells rather than by papermill's opinion of them."""
    wrong = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.output_type == "error":
                wrong.append(f"cell {index}: {output.ename}: {output.evalue}".rstrip(": "))
        if cell.metadata.get("papermill", {}).get("exception") and not wrong:
            wrong.append(f"cell {index}: failed without an error output")
    code = notebooks.code_cells(notebook)
    if not code or code[-1].execution_count is None:
        wrong.append("the last cell did not run")
    elif any(cell.execution_count is None for cell in code if cell.source.strip()):
        wrong.append("a cell before the last one did not run")
    return wrong


def add_question(notebook) -> None:
    """Append, in place, the cell that asks the kernel for its claims."""
    cell = nbformat.v4.new_code_cell(ASK, metadata={"tags": [ASKING]})
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        del cell["id"]
    notebook.cells.append(cell)


def take_answer(notebook) -> dict[str, list[str]] | None:
    """Remove the last cell, that of `add_question`, in place, and return what it showed (None: nothing)."""
    asked = notebook.cells.pop()
    if ASKING not in asked.metadata.get("tags", []):
        raise ValueError("the last cell is not the one that asks for the claims")
    shown = [output.get("data", {}) for output in asked.outputs]
    return next((dict(data[CLAIMS]) for data in shown if CLAIMS in data), None)


def run_notebook(
    path: str | Path,
    output: str | Path | None = None,
    *,
    parameters: dict[str, object] | None = None,
    timeout: int = TIMEOUT,
    write: bool = False,
) -> Result:
    """Execute one notebook with its kernel started in the notebook's folder, and say how it went.

    output: where the executed notebook goes (build/notebooks/NAME by default; its folder is created first).
    timeout: seconds one cell may take; a deadlocked kernel ends here. write: put the result back over the
    input, cleaned, if it passed. Never raises for what a notebook does: that is in the result.
    """
    path = Path(path).resolve()
    output = Path(output or BUILD / path.name).resolve()
    result = Result(path.stem)
    start = time.monotonic()
    try:
        notebook = notebooks.read(path)
        refuse_unknown(notebook, parameters or {})
        result.problems = notebooks.not_python(notebook)
    except UNREADABLE as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    if result.problems:
        return result
    add_question(notebook)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    result.problems = _execute(notebook, path.parent, output, parameters or {}, timeout)
    if output.exists():
        executed = nbformat.read(output, as_version=4)
        executed.cells = [cell for cell in executed.cells if not _is_marker(cell)]
        claims = take_answer(executed)
        result.problems = list(dict.fromkeys(failures(executed) + result.problems))
        result.problems += judge_claims(claims) if claims or not result.problems else []
        result.claims = len(claims["held"]) if claims else 0
        notebooks.clean(executed)
        nbformat.write(executed, output)
    elif not result.problems:
        result.problems.append("papermill wrote no notebook")
    if write and result.passed:
        nbformat.write(executed, path)
    result.seconds = time.monotonic() - start
    return result


def judge_claims(claims: dict[str, list[str]] | None) -> list[str]:
    """Return what is wrong with the claims that `take_answer` found."""
    if claims is None:
        return ["the kernel could not be asked for its claims"]
    wrong = [f"a claim failed and the exception was caught: {text}" for text in claims["failed"]]
    wrong += [f"a thread died: {text}" for text in claims["dead threads"]]
    return wrong or ([] if claims["held"] else ["no claim was checked (jfa.lab.check.claim)"])


def _is_marker(cell) -> bool:
    """Whether papermill put this cell in to say where an error is; it would shift the cell numbers."""
    return any(tag.startswith("papermill-error") for tag in cell.metadata.get("tags", []))


def _execute(notebook, folder: Path, output: Path, parameters: dict[str, object], timeout: int) -> list[str]:
    """Hand one notebook to papermill; return what it raised or warned of."""
    import papermill  # here, because it takes a second and `--help` needs none of it

    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # python3 is the kernel of this environment
    handler = _Warnings()
    loggers = [logging.getLogger(name) for name in ("papermill", "nbclient", "traitlets")]
    for logger in loggers:
        logger.addHandler(handler)
    problems = []
    try:
        papermill.execute_notebook(
            notebook,
            str(output),
            parameters=parameters,
            kernel_name="python3",
            language="python",
            cwd=str(folder),
            progress_bar=False,
            start_timeout=120,
            execution_timeout=timeout,
            extra_arguments=[
                "--IPKernelApp.log_level=CRITICAL",  # kernels here listen on this machine only
                f"--IPKernelApp.exec_lines=exec({WATCH!r}, {{}})",
            ],
        )
    except papermill.PapermillExecutionError as error:
        problems.append(f"cell {error.cell_index}: {error.ename}: {error.evalue}".rstrip(": "))
    except (
        Exception
    ) as error:  # a dead kernel, a timeout, a missing kernelspec: all of them are this notebook's
        problems.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return problems + handler.messages


def find(names: list[str]) -> list[Path]:
    """Return the notebooks for numbers, names or paths, each once, all for []; ValueError if one is none."""
    everything = notebooks.paths()
    found = []
    for name in names:
        if name.endswith(".ipynb") and Path(name).is_file():
            found.append(Path(name).resolve())
            continue
        hits = [path for path in everything if name in (path.name, path.stem, path.stem[:2])]
        if len(hits) != 1:
            raise ValueError(f"no notebook {name!r}; there are {[path.stem for path in everything]}")
        found += hits
    return list(dict.fromkeys(found)) if names else everything


def from_a_gpu(path: Path) -> bool:
    """Return whether a notebook's outputs are those of a machine that measured live."""
    outputs = [output for cell in notebooks.read(path).cells for output in cell.get("outputs", [])]
    return any(course.LIVE in output.get("text", "") for output in outputs)


def table(results: list[Result]) -> str:
    """Return the closing table: notebook, seconds, claims checked, passed; below it what went wrong."""
    width = max([len("notebook"), *(len(result.name) for result in results)])
    lines = [f"{'notebook':<{width}}  seconds  claims checked  passed"]
    for result in results:
        passed = "yes" if result.passed else "NO"
        lines.append(f"{result.name:<{width}}  {result.seconds:7.1f}  {result.claims:14d}  {passed:>6}")
    lines += [f"{result.name}: {problem}" for result in results for problem in result.problems]
    return "\n".join(lines)


def run_all(paths: list[Path], jobs: int, **options) -> list[Result]:
    """Execute notebooks, `jobs` at a time in processes of their own, and report each as it ends."""
    results = {}
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        futures = {pool.submit(run_notebook, path, **options): path for path in paths}
        for future in concurrent.futures.as_completed(futures):
            result = future.result()
            results[futures[future]] = result
            print(
                f"{result.name}: {'passed' if result.passed else 'FAILED'} in {result.seconds:.0f} s",
                flush=True,
            )
    return [results[path] for path in paths]


def default_jobs() -> int:
    """Return 1 where a GPU measures (two notebooks at once would disturb each other), else up to 2."""
    return 1 if course.gpu() else min(2, os.cpu_count() or 1)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments: list[str] | None = None) -> int:
    """Run the command line above; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.runner", description="Execute the notebooks.")
    parser.add_argument("names", nargs="*", help="numbers, names or paths; all notebooks if none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes (sets the parameter QUICK)")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter"
    )
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds that one cell may take")
    parser.add_argument("--jobs", type=int, default=0, help="notebooks at a time (2, or 1 with a GPU)")
    parser.add_argument("--write", action="store_true", help="write passed notebooks back to their place")
    parser.add_argument("--replace", action="store_true", help="write also over outputs that a GPU measured")
    options = parser.parse_args(arguments)
    given = {name: _literal(value) for name, value in options.p} | ({"QUICK": True} if options.quick else {})
    if options.write and given:
        parser.error("--write keeps the default parameters: leave out --quick and -p")
    try:
        paths = find(options.names)
    except ValueError as error:
        parser.error(str(error))
    if not paths:
        print("no notebooks found: nothing was executed")
        return 1
    if options.write and not options.replace and not course.gpu():
        if measured := [path.stem for path in paths if from_a_gpu(path)]:
            parser.error(
                f"--write: the outputs of {', '.join(measured)} were measured on a GPU, and there is none; "
                "--replace writes over them"
            )
    if options.jobs < 0:
        parser.error(f"--jobs: expected a positive number, got {options.jobs}")
    jobs = options.jobs or default_jobs()
    results = run_all(paths, jobs, parameters=given, timeout=options.timeout, write=options.write)
    print(f"\n{table(results)}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
