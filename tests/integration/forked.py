"""Run programs, each in a fork of this process, which has imported their shared modules to save that time.

The arguments are the modules to import. Each line of stdin is {"program": PATH, "arguments": […], "stdin": TEXT,
"environment": {…}}; the answer is a line {"code": exit code, "output": text from stdout and stderr}.
"""

import importlib
import io
import json
import os
import runpy
import sys
import tempfile
import traceback


def run(program, arguments, stdin, environment):
    """Run `program` as `python PROGRAM ARGUMENTS…` would; return its exit code and output.

    The program's PYTHONPATH comes before this process's path.
    """
    with tempfile.TemporaryFile("w+b") as output:
        child = os.fork()
        if not child:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                os.environ |= environment
                sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
                sys.argv, sys.stdin = [program, *arguments], io.StringIO(stdin)
                runpy.run_path(program, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:  # noqa: BLE001 - as an interpreter, it prints whatever ends the program
                traceback.print_exc()
            finally:  # the child must not return into the parent's code
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return {"code": code, "output": output.read().decode(errors="replace")}


with os.fdopen(os.dup(1), "w") as answers:
    os.dup2(2, 1)  # imports must not print into the answers
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(run(**json.loads(line))) + "\n")
        answers.flush()
