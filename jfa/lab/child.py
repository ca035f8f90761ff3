"""A peer in a process of its own, timed in turn with the peers of this one.

FlexAttention is compiled by inductor, and PyTorch 2.11's does not work with fbtriton's Triton. The child
gets a PYTHONPATH without fbtriton, so it sees the Triton that PyTorch came with; it draws the same inputs
from the same seed, checks and times by itself, and waits for its turn. The two exchange lines of JSON over
pipes. A child that dies, or that is silent for longer than its limit, is ended; rows say so.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from jfa.lab import measure

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-u", "-m", "jfa.lab.child")
PREPARE_S, SAMPLE_S = 120.0, 30.0
STARTS = 4  # a child that was lost so often is not started again


class Lost(RuntimeError):
    """The child died or was silent for too long, and was ended."""


def stock_environment(environment=None) -> dict[str, str]:
    """An environment whose PYTHONPATH has this project and no folder that holds a Triton."""
    found = dict(os.environ if environment is None else environment)
    folders = [folder for folder in found.get("PYTHONPATH", "").split(os.pathsep) if folder]
    folders = [folder for folder in folders if not Path(folder, "triton").exists()]
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *folders])
    if "TRITON_CACHE_DIR" in found:
        found["TRITON_CACHE_DIR"] += "-stock"
    return found


class Child:
    """The parent's end: starts the process when it is first asked, and again after it was lost."""

    def __init__(self, command=COMMAND, environment=None, prepare_s=PREPARE_S, sample_s=SAMPLE_S):
        self.command, self.environment = command, environment
        self.prepare_s, self.sample_s = prepare_s, sample_s
        self.starts = 0
        self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def start(self) -> None:
        """Start the process; Lost once it was started too often."""
        if self.starts >= STARTS:
            raise Lost(f"the child process was lost {STARTS} times")
        self.starts += 1
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=stock_environment() if self.environment is None else self.environment,
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _listen(process, lines):
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def ask(self, limit_s: float, **message) -> dict:
        """Send a message and return the answer; Lost without one in time, RuntimeError if it is an error."""
        if self.process is None:
            self.start()
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=limit_s)
        except queue.Empty:
            self._end()
            raise Lost(f"no answer to {message['do']} in {limit_s:g} s") from None
        except OSError:
            line = None
        if line is None:
            raise Lost(f"the child process died at {message['do']}: {self._end()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _end(self) -> str:
        """End the process; gives the last thing that it said."""
        process, self.process = self.process, None
        process.kill()
        code = process.wait()
        self.errors.seek(0)
        said = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        self.errors.close()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except OSError:
                pass
        return said[-1][:120] if said else f"exit status {code}"

    def close(self) -> None:
        """Tell the process to leave, and end it if it does not."""
        if self.process is None:
            return
        try:
            self.process.stdin.write('{"do": "quit"}\n')
            self.process.stdin.flush()
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._end()

    def prepare(self, case, directions, scopes, graph: bool) -> dict:
        """Prepare a case: {"note", "functions": {"direction scope": reason or ""}, "errors": ...}."""
        facts = {"case": case.columns(), "directions": list(directions), "scopes": list(scopes)}
        return self.ask(self.prepare_s, do="prepare", graph=graph, **facts)

    def forget(self) -> None:
        """Let go of the case that was prepared."""
        if self.process is not None:
            self.ask(self.sample_s, do="forget")


class There(measure.Remote):
    """A function of the child, for `measure.interleave`."""

    def __init__(self, child: Child, name: str):
        self.child, self.name, self.process = child, name, child.process

    def prepare(self) -> None:
        """Warm it up there; ``timer`` is then the child's."""
        self.timer = self._ask(self.child.prepare_s, do="ready")["timer"]

    def time(self, calls: int) -> float:
        """Milliseconds a call."""
        return self._ask(self.child.sample_s, do="time", calls=calls)["ms"]

    def _ask(self, limit_s, **message):
        if self.process is not self.child.process:
            raise Lost("the child process was lost before")
        return self.child.ask(limit_s, name=self.name, **message)


# ----------------------------------------------------------------------------------------------- the child


def serve(workshop) -> None:
    """The child's end: answer every line of standard input through the methods of ``workshop``.

    Its standard output belongs to the answers; whatever else prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        what = message.pop("do")
        if what == "quit":
            break
        try:
            answer = getattr(workshop, what)(**message) or {}
        except Exception as error:
            answer = {"error": measure.told(error)}
        answers.write(json.dumps(answer) + "\n")


class Workshop:
    """FlexAttention on this process's GPU."""

    def __init__(self):
        self.functions, self.ready_ones = {}, {}
        self.stream = None

    def prepare(self, case, directions, scopes, graph):
        """Draw the inputs, compile, check against float32."""
        import torch

        from jfa.lab import cases, truth
        from jfa.lab.flex import flex

        self.forget()
        self.graph = graph
        torch.backends.cuda.matmul.allow_tf32 = False
        self.stream = self.stream or torch.cuda.Stream()
        reasons, found = {}, {}
        with torch.cuda.stream(self.stream):
            inputs = cases.make_inputs(cases.Case.of(case))
            wanted, allowed = truth.expected(inputs), truth.budgets(inputs)
            for scope in scopes:
                names = [f"{direction} {scope}" for direction in directions]
                try:
                    run = flex(inputs, scope)
                    found[scope] = truth.errors(run, wanted, allowed)
                except Exception as error:
                    reasons |= dict.fromkeys(names, measure.told(error))
                    continue
                self.functions |= {f"{way} {scope}": getattr(run, way) for way in directions}
                reasons |= dict.fromkeys(names, "")
        return {"note": about(), "functions": reasons, "errors": found}

    def ready(self, name):
        """Make a function ready: as a graph, or in eager calls where it cannot be captured."""
        import torch

        with torch.cuda.stream(self.stream):
            for graph in (True, False) if self.graph else (False,):
                clock = measure.clock(graph)
                try:
                    self.ready_ones[name] = clock, clock.prepare(self.functions[name])
                    break
                except Exception:
                    if not graph:
                        raise
        return {"timer": clock.timer}

    def time(self, name, calls):
        """One sample."""
        import torch

        clock, prepared = self.ready_ones[name]
        with torch.cuda.stream(self.stream):
            return {"ms": clock.time(prepared, calls)}

    def forget(self):
        """Free the case."""
        import torch

        self.functions, self.ready_ones = {}, {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def about() -> str:
    """What this process computes with, for the note of its rows."""
    import torch
    import triton

    return f"child process, interleaved by rounds; torch {torch.__version__}, Triton {triton.__version__}"


def main(arguments: list[str] | None = None) -> int:
    """Serve until standard input ends."""
    about = (
        "FlexAttention for jfa.lab.bench: lines of JSON from standard input are answered on standard output."
    )
    argparse.ArgumentParser(prog="python -m jfa.lab.child", description=about).parse_args(arguments)
    serve(Workshop())
    return 0


if __name__ == "__main__":
    sys.exit(main())
