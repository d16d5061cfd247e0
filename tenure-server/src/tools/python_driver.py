"""Runs what a model writes: one interpreter for one session.

Started inside the sandbox by `sandbox/init.rs` as `python3 -I -u -c THIS LIMITS`. Calls come as JSON lines on descriptor 0, answers go as JSON
lines to descriptor 1, and descriptor 2 is a file for what the code prints. All three are moved out of the way before any call is made, so that
what is printed can not be taken for an answer.
"""

import ast
import json
import linecache
import os
import resource
import signal
import sys
import traceback
import types

limits = json.loads(sys.argv[1])
del sys.argv[1:]


def cap(kind, soft, hard=None):
    try:
        resource.setrlimit(kind, (soft, soft if hard is None else hard))
    except (ValueError, OSError):
        pass  # a limit that is lower already


def limit():
    """Limits this process and all below."""
    if limits["processes"] is not None:
        cap(resource.RLIMIT_NPROC, limits["processes"])
    cap(resource.RLIMIT_AS, limits["memory"])
    cap(resource.RLIMIT_FSIZE, limits["file"])
    cap(resource.RLIMIT_NOFILE, limits["open_files"])
    cap(resource.RLIMIT_CORE, 0)


def send(answers, answer):
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[os.write(answers, data):]


def clip(data):
    """The beginning and the end of what is too long."""
    limit, size = limits["output"], len(data)
    if size > limit:
        half = limit // 2
        data = data[:half] + f"\n[... {size - 2 * half} bytes omitted ...]\n".encode() + data[-half:]
    return data.decode("utf-8", "replace")


def evaluate(code, name, names):
    """Runs the code; the value of its last expression as text, like at a prompt."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
        if value is not None:
            names["_"] = value
            return repr(value)
    return ""


def complaint(error):
    """Formats an exception, without the frames of this file."""
    try:
        formatted = traceback.TracebackException.from_exception(error)
        formatted.stack = traceback.StackSummary.from_list([frame for frame in formatted.stack if frame.filename != HERE])
        return "".join(formatted.format()).rstrip()
    except BaseException as another:
        return f"{type(error).__name__} ({type(another).__name__} while it was described)"


HERE = evaluate.__code__.co_filename


class Interpreter:
    """Answers calls, one after the other."""

    def __init__(self, commands, answers, output):
        self.commands, self.answers, self.output = commands, answers, output
        self.running, self.pid = False, os.getpid()
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self.main
        self.cpu = limits["seconds"] * len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]) + 1

    def interrupted(self, *_):
        if self.running:
            raise KeyboardInterrupt

    def serve(self):
        for line in os.fdopen(self.commands, "rb"):
            call = json.loads(line)
            send(self.answers, {"id": call["id"], **self.call(call)})

    def call(self, call):
        # Whatever the last call did to them.
        for descriptor in (1, 2):
            os.dup2(self.output, descriptor)
        os.ftruncate(self.output, 0)
        os.lseek(self.output, 0, os.SEEK_SET)
        signal.signal(signal.SIGINT, self.interrupted)
        used = resource.getrusage(resource.RUSAGE_SELF)
        cap(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + self.cpu) + 1, resource.RLIM_INFINITY)
        value, error = "", ""
        try:
            try:
                self.running = True
                value = evaluate(call["code"], f"<call {call['id']}>", self.main.__dict__)
            except BaseException as caught:
                self.running = False
                error = complaint(caught)
            finally:
                self.running = False
        except KeyboardInterrupt:  # between the last line of the code and here
            self.running = False
            error = error or "KeyboardInterrupt"
        if os.getpid() != self.pid:
            os._exit(0)  # a fork that did not end where it should have
        return {"text": self.result_text(value or error), "failed": bool(error)}

    def result_text(self, last):
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except BaseException:
            pass
        printed = os.pread(self.output, os.fstat(self.output).st_size, 0)
        if last and printed and not printed.endswith(b"\n"):
            printed += b"\n"
        return clip(printed + last.encode("utf-8", "replace"))


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # whatever the server was started with
    commands, answers, output = os.dup(0), os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    limit()
    send(answers, {"ready": True})
    Interpreter(commands, answers, output).serve()


main()
