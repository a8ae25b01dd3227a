"""A program on its own terminal: type, press Ctrl-C, wait for output."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

SECONDS = 120.0  # timeout for an expected text; on a busy machine Python starts slowly
# Makes the terminal the program's controlling terminal, so that Ctrl-C reaches it as a signal, even if pytest's parent
# ignores it (a shell's background job, nohup), because programs inherit ignored signals.
OWN = """
import fcntl, os, signal, sys, termios
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A started program; `text` is its whole output."""

    def __init__(self, *command, cwd, env):
        self._master, slave = pty.openpty()
        arguments = [sys.executable, "-c", OWN, *map(str, command)]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(
            arguments, cwd=cwd, env={**env, "TERM": "xterm"}, start_new_session=True, **streams
        )
        os.close(slave)
        self.text, self._seen = "", 0

    def _read(self, seconds):
        if select.select([self._master], [], [], seconds)[0]:
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # EIO: the program has closed the terminal
                return False
        return True

    def expect(self, text):
        """Wait until `text` is printed after the previously expected text."""
        deadline = time.monotonic() + SECONDS
        while text not in self.text[self._seen :]:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.text[-2000:]!r}"
            assert self._read(0.2), f"{text!r} did not come before the end: {self.text[-2000:]!r}"
        self._seen = self.text.index(text, self._seen) + len(text)

    def type(self, text):
        """Type a text; "\\r" is Enter, "\\x03" Ctrl-C, "\\x04" Ctrl-D; before the prompt the kernel drops a Ctrl-D."""
        os.write(self._master, text.encode())

    def end(self, again=None):
        """Wait for the program's end and return its exit code.

        `again` is a signal to send each second, because Python's readline notices a signal between its prompt and its
        wait for a key only at the next signal.
        """
        begun, sent = time.monotonic(), 0
        while self.process.poll() is None:
            passed = time.monotonic() - begun
            assert passed < SECONDS, f"it does not end: {self.text[-2000:]!r}"
            if again and passed > sent:
                self.process.send_signal(again)
                sent += 1
            self._read(0.05)
        return self.process.returncode

    def close(self):
        """Kill the program if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
