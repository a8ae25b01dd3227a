"""Find the faults in a log of any program. The log is read once, in bounded memory.

Logs of servers, journalctl, dmesg, Docker, Compose, BuildKit and `docker inspect` are accepted, with colours, invalid
UTF-8 and lines of any length. Lines that differ only in long numbers (times, addresses, request ids) become one
line with a count. `Event.faults` are the lines about failures; `Event.decisive` is the line with the reason.
"""

import codecs
import io
import json
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

TEXT = 2000  # bytes of a line that are parsed together; a longer line is split
OVERLAP = 400  # bytes that two pieces of a line have in common
SHOWN = 300  # characters of a line that are shown
END = 5  # lines at the end of a log in which LAST_WORDS count
KEPT_LINES = 1500  # different lines that are kept from the beginning of a log, and as many from its end
REMEMBERED = 20_000  # different lines that are recognised when they come again
BLOCK_LINES = 40  # lines after the first line of a Sparkforge error in which its `next:` must come

# The last form is the rest of a colour whose escape character was lost or made visible.
COLOUR = re.compile(
    rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])|"
    rb"(?:\xef\xbf\xbd|\^\[)?\[\d{1,2}(?:;\d+)*m(?!\])"
)
NUMBERS = re.compile(rb"\d[\d.:,/-]{3,}")

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _pattern(name: str) -> re.Pattern[str]:
    text = _TEXTS[name]
    return re.compile(text if isinstance(text, str) else "|".join(text))


PREFIXES = _pattern("PREFIXES")
JOURNAL = re.compile(r"^(?:\w{3} [ \d]\d [\d:]{8} )?(?:[\w.-]+ )?([\w./@-]{2,60})(?:\[\d+\])?: ")
# A progress bar without its line end.
PROGRESS = re.compile(r"^[^\[\]%]*\d%[^\[\]]*\[[^\[\]]{0,60}(?:it/s|s/it)[^\[\]]{0,60}\](?=[(A-Z\[])")
SERVERS = _pattern("SERVERS")
PROGRAMS = _pattern("PROGRAMS")
# Programs and units of a desktop or of the system, about which the kernel and systemd report too.
FOREIGN = re.compile(
    r"^(?:systemd: (?:Failed to start )?|traps: )?(?:gnome|gdm|Xorg|Xwayland|firefox|chrom|snap|cups|apt-|fwupd|"
    r"packagekit|bluetooth|NetworkManager|ModemManager|avahi|colord|cron|ssh|tracker|xdg-|pipewire|wireplumber|pulseaudio|polkit|apport|"
    r"whoopsie|motd-|man-db|logrotate|unattended-|update-|getty|plymouth|fstrim|e2scrub)[\w@.-]*"
    r"(?:\[\d+\]:? (?:segfault|trap|general)|\.\w+[: ])"
)
JOURNAL_TIME = re.compile(r"^\w{3} [ \d]\d [\d:]{8} (?:[\w.-]+ )?")
# The same after an ISO time (short-iso; /var/log/kern.log of Ubuntu 24.04) or a time of day. A word is a program only
# if it has a process id or is `kernel`.
JOURNAL_ISO = re.compile(
    r"^(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-][\d:]+)|\d\d:\d\d:\d\d) [\w.-]+ ([\w./@()-]{2,60})(?:\[\d+\]: |(?<=kernel): )"
)
DMESG = re.compile(r"<|\[ *(?:\d+\.|[TC]\d)|\[[A-Z][a-z]{2} ")
PROCESS = re.compile(r"\((\w[\w.-]* pid=\d+)\)")
LEVELS = _pattern("LEVELS")
LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
LETTERS |= {"DEBU": "DEBUG", "WARN": "WARNING", "ERRO": "ERROR", "FATA": "FATAL"}  # of docker's and nerdctl's messages
QUIET = {"DEBUG", "INFO"}
# `Type: message` or `package.Type: message`, not indented.
EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)+[A-Z]\w*|(?:[A-Z]\w*)?(?:Error|Exception|Exit|Interrupt|Expired|Fault|OutOfResources))"
    r"(?:: ?(.*))?$"
)
NO_FAULT = _pattern("NO_FAULT")
CHAIN = re.compile(r"^(?:Traceback|The above exception was the direct cause|During handling of the above exception)")
CODE = re.compile(r"^\s{4,}|^\s*[\^~]+\s*$")  # the source line of a traceback's frame
FRAME = re.compile(r"^\s+\S|^\s*$")  # in a traceback, an indented line is not an error by itself
FILE = re.compile(r'^\s+File "[^"]*", line \d+')
BARE = re.compile(r"[\w.]+:?\s*")  # an exception's type without a message
CUDA = {int(number): re.compile(pattern) for number, pattern in _TEXTS["CUDA"].items()}
# A CUDA error's number; in the first form a number below 600 may be an HTTP status.
CUDA_NUMBER = re.compile(
    r"(?i)\bcu(?:da|dnn|[A-Z])\w*\b.{0,80}?\b(?:error|failure|code|status|err)\b[ :=(]{1,2}([6-9]\d\d)\b|"
    r"\berr (\d{3}) != CUDA_SUCCESS|\bError (80\d|999)\b"
)
CUDA_WORDS = re.compile("|".join(pattern.pattern for pattern in CUDA.values()))
CAUSED = re.compile(r"\s*(?:Caused by:|╰─▶) ")  # the second line of an error of uv
XID = re.compile(r"\bXid \((?:PCI:)?[\w:.]+\): (\d+)|\bXid[ :](\d+)\b")
ENDED = _pattern("ENDED")
SIGNALS = {"KILL": 9, "SEGV": 11, "ABRT": 6, "BUS": 7, "ILL": 4, "FPE": 8, "TERM": 15, "INT": 2, "HUP": 1}
KILLED = re.compile(r"status=\d+/(KILL|SEGV|ABRT|BUS|ILL|FPE)|\b(?:SIG|signal=)(KILL|SEGV|ABRT|BUS|ILL|FPE)\b")
SEGFAULT = re.compile(r"Segmentation fault|Segfault encountered|segfault at |\bsignal 11\b")
# A shell's message about a program that a signal ended: `run.sh: line 12:  4411 Killed   vllm serve …`; zsh's is in
# small letters: `[1]  + 51234 killed     vllm serve …`.
SHELL = re.compile(
    r"^(?:\S+: line \d+: +\d+ +|\[\d+\]\S? +(?:\d+ +)?)?"
    r"(Killed|Segmentation fault|Bus error|Illegal instruction|Aborted)\b|"
    r"^(?:zsh: |\[\d+\] +(?:[+-] +)?\d+ +)(killed|segmentation fault|bus error|illegal hardware instruction|abort)\b"
)
SHELL_SIGNALS = {"killed": 9, "segmentation fault": 11, "bus error": 7, "aborted": 6, "abort": 6}
SHELL_SIGNALS |= {"illegal instruction": 4, "illegal hardware instruction": 4}
FATAL = _pattern("FATAL")
LAST_WORDS = _pattern("LAST_WORDS")
KERNEL = _pattern("KERNEL")
NVRM = _pattern("NVRM")
DEATH = _pattern("DEATH")
AFTERMATH = _pattern("AFTERMATH")
CONSEQUENCE = _pattern("CONSEQUENCE")
NOISE = _pattern("NOISE")
# A start or download succeeded; the server took requests again; a new start of the server.
SUCCESS = re.compile(r"Application startup complete|^Fetching \d+ files: 100%|^Successfully installed ")
ALIVE = re.compile(r"\"(?:POST /\S+|GET /health) HTTP/[\d.]+\" 200")
BANNER = re.compile(r"non-default args:|vLLM API server version|Initializing a V1 LLM engine")
ORDERLY = _pattern("ORDERLY")
BLOCK = re.compile(r"^(?:✗ \S|FAIL [a-z0-9][a-z0-9-]+\s+\S)")
PART = re.compile(r"^\s+(why|next):\s*(.*)$")


@dataclass
class Line:
    """A line, without the prefixes of programs that passed it on, and its meaning.

    `level` is the log level, empty if the program has none; `exception` is the type of an exception, and `cause` the
    number of the line with the exception that led to it; `cuda` is a CUDA error's number; `code` and `signal` say how a
    process ended; `parts` has the `why` and `next` of a Sparkforge error; `survived` says that the server took requests
    afterwards, `harmless` that the start or download succeeded.
    """

    number: int
    text: str
    level: str = ""
    process: str = ""
    exception: str = ""
    cause: int = 0
    xid: int | None = None
    cuda: int | None = None
    code: int | None = None
    signal: int | None = None
    parts: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    count: int = 1
    survived: bool = False
    harmless: bool = False

    @property
    def quiet(self) -> bool:
        """Whether the line was logged as DEBUG or INFO; such a line may quote a prompt with any words."""
        return self.level in QUIET

    @property
    def is_fault(self) -> bool:
        """Whether the line reports a failure."""
        if self.quiet or self.level in {"WARNING", "FOREIGN"} or self.exception.endswith("Warning"):
            return False
        if NOISE.search(self.text):
            return False
        if self.level == "KERNEL":
            return self.xid is not None or bool(KERNEL.search(self.text) or NVRM.search(self.text))
        logged = self.level in {"ERROR", "CRITICAL", "FATAL"}
        return bool(
            self.xid is not None
            or (logged and not FRAME.search(self.text) and not CHAIN.search(self.text))
            or (self.exception and not NO_FAULT.search(self.exception))
            or (self.code is not None and self.code not in {0, 130, 143, 15, -15, 2, -2})
            or self.signal is not None
            or FATAL.search(self.text)
            or NVRM.search(self.text)
        )

    @property
    def are_last_words(self) -> bool:
        """Whether the line means a failure if it is the last line of a program's output."""
        return not self.level and bool(LAST_WORDS.search(self.text)) and not NOISE.search(self.text)

    @property
    def told(self) -> str:
        """The displayed text; without a message or ending in a colon, also the next line or the source's place."""
        following = strip(self.after[0])[0] if self.after else ""
        if not (BARE.fullmatch(self.text) or self.text.endswith(":")):
            return f"{self.shown} {following.strip()}"[:SHOWN] if CAUSED.match(following) else self.shown
        frames = [strip(text)[0] for text in self.before]
        place = next((match for text in reversed(frames) if (match := FILE.search(text))), None)
        if following.startswith(" ") and following.strip():
            return f"{self.shown} {following.strip()}"[:SHOWN]
        return f"{self.shown}, {place.string.strip()}"[:SHOWN] if place else self.shown

    @property
    def shown(self) -> str:
        """The displayed text."""
        return self.text.strip()[:SHOWN]


@dataclass
class Event:
    """A parsed log: its relevant lines in order, and the line numbers of some of them.

    These are the shutdown request, the first line that follows from the death of a process, and the last line.
    """

    lines: list[Line] = field(default_factory=list)
    ended: int = 0
    aftermath: int = 0
    length: int = 0

    @property
    def faults(self) -> list[Line]:
        """The lines with a fatal error, before an orderly shutdown."""
        return [
            line
            for line in self.lines
            if (line.is_fault or (line.number > self.length - END and line.are_last_words))
            and not (self.ended and line.number > self.ended)
            and (line.xid is not None or DEATH.search(line.text) or not line.survived)
        ]

    @property
    def decisive(self) -> Line | None:
        """The line with the reason: the last exception, Xid, NVRM or error line that no other line caused."""
        faults = self.faults
        causes = [line for line in faults if not CONSEQUENCE.search(line.text)] or faults
        causes = [line for line in causes if not self.aftermath or line.number < self.aftermath] or causes
        for kind in (
            [line for line in causes if line.exception],
            [line for line in causes if line.xid is not None or "NVRM" in line.text],
            [line for line in causes if line.level != "ERROR" and FATAL.search(line.text)],
            causes,
        ):
            if kind:
                return kind[-1]
        return None

    def chain(self, line: Line) -> list[Line]:
        """Return the exceptions that led to `line`, the root cause first, and then `line`."""
        by_number, chain = {entry.number: entry for entry in self.lines}, [line]
        while (cause := by_number.get(chain[0].cause)) and cause not in chain:
            chain.insert(0, cause)
        return chain


def read(chunks: Iterable[bytes]) -> Event:
    """Parse a log into an event. `chunks` are its bytes, cut anywhere."""
    reader = _Reader()
    for number, raw in _lines(chunks):
        reader.read(number, raw)
    lines = sorted((*reader.first, *reader.last, *reader.quiet), key=lambda line: line.number)
    return Event(lines, reader.ended, reader.aftermath, reader.length)


def read_text(text: str) -> Event:
    """Parse a log's text into an event."""
    return read([text.encode("utf-8", "replace")])


def _lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    number, rest = 1, b""
    for chunk in chunks:
        for line in io.BytesIO(rest + chunk):
            rest = line
            while len(rest) > TEXT:
                yield number, rest[:TEXT]
                rest = rest[TEXT - OVERLAP :]
            if rest.endswith(b"\n"):
                yield number, rest
                number, rest = number + 1, b""
    if rest:
        yield number, rest


class _Reader:
    """The state of reading a log: the lines so far, repeated ones, and an incomplete Sparkforge error."""

    def __init__(self) -> None:
        self.first: list[Line] = []
        self.last: deque[Line] = deque(maxlen=KEPT_LINES)
        self.quiet: deque[Line] = deque(maxlen=KEPT_LINES)
        self.seen: dict[int, Line | None] = {}
        self.ended = self.aftermath = self.length = 0
        self.pending: list[Line] = []  # faults since the last start; a success clears the list
        self.exception: dict[str, int] = {}  # by process: the line of its last exception
        self.chained: set[str] = set()
        self.ignored: set[str] = set()  # processes whose next exception Python ignored
        self.block: _Block | None = None
        self.before: deque[str] = deque(maxlen=3)  # the last lines of the log
        self.latest: deque[Line | None] = deque(maxlen=2)  # the last two lines parsed, None if not kept

    def read(self, number: int, raw: bytes) -> None:
        """Take the next line of the log. Carriage returns, which progress bars print, divide the line."""
        raw = raw.replace(b"\0", b"").removeprefix(codecs.BOM_UTF16_LE).removeprefix(codecs.BOM_UTF8)
        for part in raw.rstrip(b"\r\n").split(b"\r"):
            self._read(number, COLOUR.sub(b"", unwrap(part)))

    def _read(self, number: int, raw: bytes) -> None:
        shown = raw[:SHOWN].decode("utf-8", "replace")
        if self.block and self.block.ends_with(strip(raw.decode("utf-8", "replace"))[0]):
            self.block = None
        for latest in self.latest:
            if latest:
                latest.after = (*latest.after, shown)
        name, line = hash(NUMBERS.sub(b"0", raw)), None
        if name not in self.seen:
            if len(self.seen) >= REMEMBERED:
                self.seen.clear()
            line = self.seen[name] = self._parse(number, raw)
        elif same := self.seen[name]:
            same.count += 1
            self._notice(same, number)
        self.latest.append(line)
        self.before.append(shown)
        self.length = number

    def _parse(self, number: int, raw: bytes) -> Line | None:
        line = parse(raw.decode("utf-8", "replace"), number)
        if CODE.search(line.text) and any(FILE.search(strip(text)[0]) for text in self.before):
            return None
        if not (self.aftermath or line.quiet) and AFTERMATH.search(line.text):
            self.aftermath = number
        if line.text.startswith("Exception ignored in"):
            self.ignored.add(line.process)
        elif line.exception and line.process in self.ignored:
            self.ignored.discard(line.process)
            return None
        if line.exception and not line.quiet:  # note the exception of the same process that led to this one
            if line.process in self.chained:
                line.cause = self.exception.get(line.process, 0)
                self.chained.discard(line.process)
            self.exception[line.process] = line.number
        elif CHAIN.search(line.text) and not line.text.startswith("Traceback"):
            self.chained.add(line.process)
        self._notice(line, number)
        if BLOCK.search(line.text):
            self.block = _Block(line)
        if line.quiet:
            self.quiet.append(line)
            return line
        line.before = tuple(self.before)[-2:]
        (self.first if len(self.first) < KEPT_LINES else self.last).append(line)
        return line

    def _notice(self, line: Line, number: int) -> None:
        """Keep track of starts, successes and shutdowns, which decide whether a fault counts."""
        if succeeded := SUCCESS.search(line.text) or ALIVE.search(line.text):
            for pending in self.pending:
                pending.survived = True
                pending.harmless = pending.harmless or succeeded.re is SUCCESS
            self.pending.clear()
        elif line.is_fault or line.are_last_words or line.level == "WARNING":
            if len(self.pending) < KEPT_LINES:
                self.pending.append(line)
        elif BANNER.search(line.text):
            self.pending.clear()
            self.ended = 0
        elif not self.ended and ORDERLY.search(line.text):
            self.ended = number


@dataclass
class _Block:
    """A Sparkforge error of which `why:` or `next:` has not been read yet."""

    line: Line
    left: int = BLOCK_LINES
    part: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)

    def ends_with(self, text: str) -> bool:
        """Take the next line of the log; tell whether the error ends with it: `next:`, or an unrelated line."""
        self.left -= 1
        if part := PART.match(text):
            self.part = part[1]
            self.parts[self.part] = [part[2].strip()]
        elif self.part and text.startswith("        "):
            self.parts[self.part].append(text.strip())
        elif self.part or not text.startswith(" "):
            return True
        if self.part == "next":
            parts = {name: "; ".join(takewhile(bool, lines))[:SHOWN] for name, lines in self.parts.items()}
            self.line.parts = {"why": ""} | parts
        return self.part == "next" or not self.left


def strip(text: str) -> tuple[str, str, str]:
    """Return a line without prefixes, the log level, and the process; a program of the journal stays as `name: `."""
    process = level = ""
    if "%|" in text or "% Completed" in text:
        text = PROGRESS.sub("", text)
    for _ in range(8):
        if program := JOURNAL_ISO.match(text):
            text, level = _of_journal(program, text)
        elif match := PREFIXES.match(text):
            if found := PROCESS.match(match[0].strip()):
                process = found[1]
            elif DMESG.match(match[0]):
                level = "KERNEL"
            text = text[match.end() :]
        elif (match := LEVELS.match(text)) and not level:
            name = next(filter(None, match.groups()))
            level, text = LETTERS.get(name.upper(), name.upper()), text[match.end() :]
        elif (match := JOURNAL_TIME.match(text)) and (program := JOURNAL.match(text)):
            text, level = _of_journal(program, text)
        else:
            break
    return text, level, process


def _of_journal(program: re.Match[str], text: str) -> tuple[str, str]:
    """Return a program's message in the journal and the level; its name precedes it, except for kernel and server."""
    message = text[program.end() :]
    if program[1] == "kernel":
        return message, "KERNEL"
    if PROGRAMS.search(program[1]):
        return f"{program[1]}: {message}", ""
    return (message, "") if SERVERS.search(program[1]) else (f"{program[1]}: {message}", "FOREIGN")


def unwrap(raw: bytes) -> bytes:
    """Return the line inside a line of Docker's json-file log; any other line as it is."""
    if not raw.startswith(b'{"log":"'):
        return raw
    try:
        return str(json.loads(raw)["log"]).rstrip("\n").encode("utf-8", "replace")
    except (ValueError, RecursionError):  # a line that is cut
        return raw[len(b'{"log":"') :]


def _cuda_error(text: str) -> int | None:
    """Return the number of the CUDA error in a line; None if there is none."""
    if (match := CUDA_NUMBER.search(text)) and (number := int(match[1] or match[2] or match[3])) in CUDA:
        return number
    if not CUDA_WORDS.search(text) or text.startswith("Search for "):
        return None
    return next(number for number, pattern in CUDA.items() if pattern.search(text))


def _signal(text: str) -> int | None:
    """Return the number of the signal that ended a process according to a line; None if there is none."""
    if match := KILLED.search(text):
        return SIGNALS[match[1] or match[2]]
    if match := SHELL.match(text):
        return SHELL_SIGNALS[(match[1] or match[2]).lower()]
    return SIGNALS["SEGV"] if SEGFAULT.search(text) else None


def parse(text: str, number: int = 0) -> Line:
    """Parse one line of a log."""
    rest, level, process = strip(text)
    line = Line(number, rest[:TEXT], level, process)
    if line.quiet:
        return line
    if FOREIGN.match(rest):
        line.level = "FOREIGN"
        return line
    if match := EXCEPTION.match(rest):
        line.exception = match[1]
    line.cuda = _cuda_error(rest)
    if "Xid" in rest and (match := XID.search(rest)):
        line.xid = int(match[1] or match[2])
    line.signal = _signal(rest)
    if match := ENDED.search(rest):
        name, value = next((name, value) for name, value in match.groupdict().items() if value is not None)
        line.code = -int(value) if name == "f" else int(value)
        if line.code < 0 or 128 < line.code < 160:
            line.signal = line.signal or (-line.code if line.code < 0 else line.code - 128)
            if line.signal in {SIGNALS["TERM"], SIGNALS["INT"], SIGNALS["HUP"]}:
                line.signal = None
    return line
