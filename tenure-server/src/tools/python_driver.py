"""Runs what a model writes: one interpreter for one session.

Started by `python.rs` as `python3 -I -u -c THIS LIMITS`. Calls come as JSON lines on descriptor 0, answers go as JSON lines to descriptor 1;
both are moved out of the way before any call is made, so that what is printed can not be taken for an answer. Descriptor 2 is a set of Landlock
rules, if the kernel has them.

There are three processes. The first waits until the server has let go of descriptor 0, or until the others are gone, and then ends them. The
second is process 1 of a process namespace, if the system permits that: when it ends, the kernel ends everything that was ever started below
it. The third is the interpreter.
"""

import ast
import ctypes
import json
import linecache
import os
import resource
import select
import signal
import sys
import traceback
import types

NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
SET_PDEATHSIG, SET_SUBREAPER, NO_NEW_PRIVS = 1, 36, 38
RESTRICT_SELF = 446
PID_MAX = "/proc/sys/kernel/pid_max"

limits = json.loads(sys.argv[1])
del sys.argv[1:]


def system(name, *arguments):
    """A system call that may not be there."""
    try:
        return getattr(ctypes.CDLL(None), name)(*arguments)
    except (AttributeError, OSError):
        return -1


def apart():
    """Leaves the processes and the network of the machine, as far as that is permitted."""
    if not sys.platform.startswith("linux"):
        return []
    for flags, names in ((NEW_PID | NEW_NET | NEW_IPC, ["processes", "network"]), (NEW_NET, ["network"]), (NEW_PID, ["processes"])):
        if system("unshare", NEW_USER | flags) == 0:
            return names
    return []


def cap(kind, soft, hard=None):
    try:
        resource.setrlimit(kind, (soft, soft if hard is None else hard))
    except (ValueError, OSError):
        pass  # a limit that is lower already


def confine(left, rules):
    """For the second process and all below: what they may reach."""
    if "processes" in left:
        # The only cap that holds for root, too: the process ids of the namespace. The kernel allows no fewer than 301.
        try:
            with open(PID_MAX, "w") as file:
                file.write(str(max(301, limits["processes"])))
        except OSError:
            pass
    if sys.platform.startswith("linux"):
        system("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        if system("syscall", RESTRICT_SELF, rules, 0) == 0:
            left.append("files")
        system("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    os.close(rules)


def limit(left):
    """For the third process and all below: what they may use."""
    if "processes" in left or "network" in left:
        # Counted for this namespace alone; elsewhere it would count all that the user runs.
        cap(resource.RLIMIT_NPROC, limits["processes"])
    cap(resource.RLIMIT_AS, limits["memory"])
    cap(resource.RLIMIT_FSIZE, limits["file"])
    cap(resource.RLIMIT_NOFILE, limits["open_files"])
    cap(resource.RLIMIT_CORE, 0)


def watch(commands, alive, keeper):
    """The first process."""
    poll = select.poll()
    poll.register(commands, 0)  # only that the other end was closed
    poll.register(alive, 0)
    poll.poll()
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    os.killpg(0, signal.SIGKILL)


def keep(interpreter, answers):
    """The second process."""
    while True:
        pid, status = os.wait()
        if pid == interpreter:
            code = os.waitstatus_to_exitcode(status)
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            send(answers, {"ended": how})
            os._exit(0)


def send(answers, answer):
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[os.write(answers, data):]


def clip(data):
    """The beginning and the end of what is too long."""
    limit, size = limits["output"], len(data)
    if size > limit:
        half = limit // 2
        data = data[:half] + f"\n[... {size - 2 * half} bytes left out ...]\n".encode() + data[-half:]
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
    """What an exception says, without our own part of the stack."""
    try:
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename != HERE])
        return "".join(told.format()).rstrip()
    except BaseException as another:
        return f"{type(error).__name__} ({type(another).__name__} while it was described)"


HERE = evaluate.__code__.co_filename


class Interpreter:
    """The third process."""

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
        return {"text": self.told(value or error), "failed": bool(error)}

    def told(self, last):
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
    commands, answers, rules = os.dup(0), os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    alive, held = os.pipe()
    left = apart()
    keeper = os.fork()
    if keeper:
        for descriptor in (held, answers, rules):
            os.close(descriptor)
        watch(commands, alive, keeper)
    system("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    system("prctl", SET_SUBREAPER, 1, 0, 0, 0)
    confine(left, rules)
    interpreter = os.fork()
    if interpreter:
        keep(interpreter, answers)
    for descriptor in (alive, held):
        os.close(descriptor)
    limit(left)
    if hasattr(os, "memfd_create"):
        output = os.memfd_create("output")
    else:
        output = os.open("output", os.O_RDWR | os.O_CREAT)
        os.unlink("output")
    send(answers, {"ready": left})
    Interpreter(commands, answers, output).serve()


main()
