"""An event: what a log says about a fault, whichever program wrote it. Read once, in memory that does not grow with it.

A server's log, journalctl, dmesg, `docker logs`, Compose, BuildKit and `docker inspect` are accepted, with colours,
bytes that are no text, endless lines and a last line without a line end. Lines that differ in long numbers only (times,
addresses, request ids) are one line with a count. `Event.faults` are the lines that say that something broke;
`Event.decisive` is the one that says why.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

PIECE = 1 << 18  # bytes
LONGEST = 1 << 16  # bytes of a line that is searched as one; a longer one is searched in parts that overlap
OVERLAP = 1 << 10
TEXT = 2000  # characters of a line that are kept
SHOWN = 300  # characters of a line that are shown
WINDOW = (400, 800)  # bytes before and after a word in a line that is longer than TEXT
END = 5  # lines at the end of a log in which LAST_WORDS count
KEPT = 1500  # different lines that are kept of the begin of a log, and as many of its end
SHORT = 500  # different lines
REMEMBERED = 20_000  # different lines that are recognised when they come again
BLOCK_LINES = 40  # after the first line of an error of ours, in which its `next:` must come

COLOUR = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
NUMBERS = re.compile(rb"\d[\d.:,/-]{3,}")
# After SHORT different lines, one without any of these words, in lower case, is not parsed: it says nothing of a fault.
WORDS = tuple(
    word.encode()
    for line in (
        "error|exception|fail|fatal|critical|panic|traceback|xid|nvrm|kill|abort|segfault|segmentation",
        "core dumped|signal|oom|memory|space|quota|denied|found|no such|not |no match|cannot|can't|couldn't",
        "unable|unsupported|mismatch|invalid|unknown|unrecognized|unexpected|undefined|incompatible|timeout",
        "timed out|lockup|stuck|hang|refused|unreachable|reset|already|exited|exit code|exitcode|status=|code=",
        "bug:|marlin|jit|lock|waiting|warn|!!!!|throttl|slowdown|power|clock|mhz|watchdog|pcie|too |larger",
        "greater|less than|exceed|insufficient|disabled|missing|no module|no kernel|available|require|socket|net/",
        "null|✗|shutdown|shutting|sigterm|startup|200 ok|non-default|uvicorn|bus |deadline|expired|limit|collect",
        "broken|died|dead|lost|interrupt|vocab|capability|multiprocessing|assert|nan|conflict|out of|closed",
        "version|manifest|platform|yaml|capturing|gated",
    )
    for word in line.split("|")
)

# What programs put before a line: Compose, Docker's and journald's times, dmesg, BuildKit, torchrun.
PREFIXES = re.compile(
    r"""^(?:
      [\w.-]+\s+\|\ (?=\S|\ )                                                  # Compose: a service
    | <\d>                                                                     # dmesg: a priority
    | \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\ +(?!-|\|)  # a time
    | \[\s*\d+\.\d+\]\ | \[\w{3}\ \w{3}\ +\d+\ [\d:]+\ \d{4}\]\ +               # dmesg: a time
    | \#\d+\ [\d.]+\ | \[rank\d+\]:\ ?                                          # BuildKit, torchrun
    | \(\w[\w.-]*(?:\ (?:pid|ip)=[\w.,\ =]+)?\)\                                # vLLM and Ray: a process
    )""",
    re.VERBOSE,
)
JOURNAL = re.compile(r"^(?:\w{3} [ \d]\d [\d:]{8} )?(?:[\w.-]+ )?([\w./@-]{2,60})(?:\[\d+\])?: ")
# Programs whose errors in a journal are about the server; a desktop's and sshd's are not.
PROGRAMS = re.compile(
    r"vllm|python|sparkforge|docker|containerd|podman|compose|systemd|nvidia|oom|guard|watchdog|nohang|^bash|^sh$|run"
)
JOURNAL_TIME = re.compile(r"^\w{3} [ \d]\d [\d:]{8} (?:[\w.-]+ )?")
PROCESS = re.compile(r"\((\w[\w.-]* pid=\d+)\)")
LEVELS = re.compile(
    r"""^(?:
      (?P<vllm>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\ +\d[\d-]+[\ T][\d:.,]+\ (?:\[[^\]]*\]\ ?)?
    | (?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL):\ +
    | \[(?P<glog>[IWEF])\d{4}\ [\d:.]+\ [^\]]*\]\ ?
    | (?P<klog>[IWEF])\d{4}\ [\d:.]+\ +\d+\ [^\]]*\]\ ?
    | (?:\d{4}-[\d: .,T-]+)?[|-]\ +(?:[\w.]+\ -\ )?(?P<logging>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ +[|-][ ]
    )""",
    re.VERBOSE,
)
LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
QUIET = {"DEBUG", "INFO"}
# `Type: message` or `package.Type: message`, not indented.
EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)+[A-Z]\w*|(?:[A-Z]\w*)?(?:Error|Exception|Exit|Interrupt|Expired|Fault|OutOfResources))"
    r"(?:: ?(.*))?$"
)
NO_FAULT = re.compile(
    r"(?:Warning|SystemExit|KeyboardInterrupt|CancelledError|StopIteration|GeneratorExit|StopAsyncIteration)$"
)
CHAIN = re.compile(r"^(?:Traceback|The above exception was the direct cause|During handling of the above exception)")
CODE = re.compile(r"^\s{4,}|^\s*[\^~]+\s*$")  # the source line of a traceback's frame
FRAME = re.compile(r"^\s+\S|^\s*$")  # in a traceback, what is indented is no error of its own
FILE = re.compile(r'^\s+File "[^"]*", line \d+')
XID = re.compile(r"\bXid \((?:PCI:)?[\w:.]+\): (\d+)|\bXid[ :](\d+)\b")
ENDED = re.compile(
    r"""exited\ with\ code\ (?P<a>\d+)|[Ee]xit(?:\ ?[Cc]ode|_code)"?[:= ]+(?P<b>-?\d+)|status=(?P<c>\d+)/[A-Z]|
        code=exited,\ status=(?P<d>\d+)|exit\ status\ (?P<e>\d+)|(?:':\ |returned\ )-(?P<f>\d+)\b""",
    re.VERBOSE,
)
SIGNALS = {"KILL": 9, "SEGV": 11, "ABRT": 6, "BUS": 7, "ILL": 4, "FPE": 8, "TERM": 15, "INT": 2, "HUP": 1}
KILLED = re.compile(r"status=\d+/(KILL|SEGV|ABRT|BUS|ILL|FPE)|\bSIG(KILL|SEGV|ABRT|BUS|ILL|FPE)\b")
# What a shell says of a program that a signal ended: `run.sh: line 12:  4411 Killed   vllm serve …`.
SHELL = re.compile(
    r"^(?:\S+: line \d+: +\d+ +|\[\d+\]\S? +(?:\d+ +)?)?"
    r"(Killed|Segmentation fault|Bus error|Illegal instruction|Aborted)\b"
)
SHELL_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Illegal instruction": 4, "Aborted": 6}
# A program's own way to say that it cannot go on.
FATAL = re.compile(
    r"""^(?:.{0,80}:\ )?(?:fatal\ error|fatal|panic|error|Error|FATAL|ERROR)(?:\ \[[^\]]*\])?\s*:\ |
        ^[\w+-]+\ (?:fatal|error)\s+:\ |[Pp]ermission\ denied\ while|
        Error\ response\ from\ daemon|panicked\ at|^terminate\ called|Fatal\ Python\ error|Segmentation\ fault|
        Segfault\ encountered|\(core\ dumped\)|command\ not\ found$|^Killed\b|:\ (?:Killed|Aborted|Bus\ error)\b|
        ^Aborted\b|^E:\ |^!!!!!!!\ """,
    re.VERBOSE,
)
# How a program ends that says no more than this; libraries say so of things that they do without, too.
LAST_WORDS = re.compile(
    r"^(?:[Ff]ailed|[Cc]annot|[Cc]an't|[Uu]nable|[Cc]ould(?: not|n't)|ERROR|Error)\b|[Pp]ermission denied"
)
# What a kernel says when something broke. It says `failed` and `error` in healthy starts, too.
KERNEL = re.compile(
    r"Out of memory: Killed process|Memory cgroup out of memory|^oom-kill:|severity=Uncorrectable|AER: Uncorrectable|"
    r"soft lockup|hard LOCKUP|Kernel panic|"
    r"^(?:BUG|Oops|Internal error):|blocked for more than \d+ seconds|segfault at |"
    r"I/O error|Hardware Error|traps: .* trap "
)
NVRM = re.compile(r"NVRM:.*(?:[Ff]ail|[Ee]rror|fallen|[Tt]imeout|assert|[Uu]nable)(?!.*NV_ERR_NO_MEMORY)")
# Deaths that nothing excuses, even if the program is started again and serves then.
DEATH = re.compile(
    r"EngineCore (?:encountered a fatal error|failed to start)|Engine core initialization failed|EngineDeadError|"
    r"died unexpectedly|WorkerProc (?:initialization failed|hit an exception)|Segmentation fault|Segfault encountered|"
    r"core dumped|panicked at|Fatal Python error|terminate called|Kernel panic|"
    r"Main process exited|Out of memory: Killed"
)
# What a death leads to: never the reason of it.
CONSEQUENCE = re.compile(
    r"EngineDeadError|Engine core initialization failed|EngineCore (?:failed to start|encountered a fatal error)|"
    r"Engine core proc|died unexpectedly|WorkerProc (?:initialization failed|hit an exception)|"
    r"^(?:ChildFailedError|torch\.distributed\.elastic\S*ChildFailedError)|AsyncLLM output_handler failed|"
    r"Worker failed with error|[Ss]ee (?:stack trace|root cause)|stack trace above|Call to \w+ method failed|"
    r"Dumping (?:input data|scheduler output)|non-zero exit status|ninja: build stopped|Exception in ASGI application|"
    r"Application startup failed|Process \w+:$|^Exception raised from |Search for `cuda|CUDA kernel errors might|"
    r"For debugging consider|Compile with `TORCH_USE_CUDA_DSA|resource_tracker|Invocation of \w+ method failed|"
    r"Main process exited|Failed with result|exited with code|error code: |^terminate called|"
    r"Fatal Python error: Aborted"
)
# ERROR lines of runs that go well, and of requests that were refused: their client has the answer.
NOISE = re.compile(
    r"Error retrieving safetensors|error=ErrorInfo\(|Error in preprocessing prompt inputs|Error with model |"
    r"maximum context length is|model `[^`]*` does not exist|jinja2\.exceptions|Invalid HTTP request received|"
    r"opentelemetry|Failed to export|client disconnected|ClientDisconnect|BrokenPipe|ConnectionResetError|"
    r"VLLMValidationError|VLLMNotFoundError|RequestValidationError|HTTPException|"
    r"(?:extract|pars)\w* (?:of )?tool call|tool call from JSON|"
    r"error(?:s|_count|_rate)?\s*[:=]\s*(?:0|None|null|\"\"|'')\b|errors?=0|\b0 errors?\b|No errors|not an error|"
    r"usage_lib|usage stats|^Failed requests:"
)
# The server took requests again; a new start of the server.
ALIVE = re.compile(r"Application startup complete|\"(?:POST /\S+|GET /health) HTTP/[\d.]+\" 200")
BANNER = re.compile(r"non-default args:|vLLM API server version|Initializing a V1 LLM engine")
VERSION = re.compile(r"(?:LLM engine \(v|API server version |^ *\S*.* version +)(\d+\.\d+\.\d+\S*?)\)?(?: |$)")
ORDERLY = re.compile(
    r"\[shutdown\] API server: shutdown triggered|^Shutting down$|[Rr]eceived (?:SIGTERM|SIGINT|signal 1?[25]\b)|"
    r"SIG(?:TERM|INT) received|^KeyboardInterrupt$|Stopping \S*(?:vllm|sparkforge)\S*|Gracefully stopping"
)
BLOCK = re.compile(r"^(?:✗ \S|FAIL [a-z0-9][a-z0-9-]+\s+\S)")
PART = re.compile(r"^\s+(why|next):\s*(.*)$")


@dataclass
class Line:
    """A line, without the prefixes of programs that passed it on, and what it says.

    `level` is the log level, empty where the program has none; `exception` the type of an exception; `cause` the number
    of the line with the exception that led to it; `code` and `signal` how a process ended; `parts` the `why` and `next`
    of an error of ours; `survived` says that the server took requests afterwards.
    """

    number: int
    text: str
    level: str = ""
    process: str = ""
    exception: str = ""
    cause: int = 0
    xid: int | None = None
    code: int | None = None
    signal: int | None = None
    parts: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    count: int = 1
    survived: bool = False

    @property
    def quiet(self) -> bool:
        """Whether it was logged as information: a prompt that was logged may hold any words."""
        return self.level in QUIET

    @property
    def is_fault(self) -> bool:
        """Whether it says that something broke."""
        if (
            self.quiet
            or self.level in {"WARNING", "FOREIGN"}
            or NOISE.search(self.text)
            or self.exception.endswith("Warning")
        ):
            return False
        if self.level == "KERNEL":
            return self.xid is not None or bool(KERNEL.search(self.text) or NVRM.search(self.text))
        return bool(
            self.xid is not None
            or (
                self.level in {"ERROR", "CRITICAL", "FATAL"}
                and not FRAME.search(self.text)
                and not CHAIN.search(self.text)
            )
            or (self.exception and not NO_FAULT.search(self.exception))
            or (self.code is not None and self.code not in {0, 130, 143, 15, -15, 2, -2})
            or self.signal is not None
            or FATAL.search(self.text)
            or NVRM.search(self.text)
        )

    @property
    def are_last_words(self) -> bool:
        """Whether a program that ended with it has failed."""
        return not self.level and bool(LAST_WORDS.search(self.text)) and not NOISE.search(self.text)

    @property
    def is_death(self) -> bool:
        """Whether it says that a process or the GPU is gone."""
        return self.xid is not None or bool(DEATH.search(self.text))

    @property
    def shown(self) -> str:
        """The text as it is shown."""
        return self.text.strip()[:SHOWN]


@dataclass
class Event:
    """What a log says: lines with a meaning, in order; the number of the one that asks for an end, and of the last."""

    lines: list[Line] = field(default_factory=list)
    ended: int = 0
    length: int = 0

    @property
    def vllm(self) -> str:
        """VLLM's version as the log names it, or an empty text."""
        return next((match[1] for line in self.lines if (match := VERSION.search(line.text))), "")

    @property
    def exceptions(self) -> list[Line]:
        """The exceptions, causes before their effects."""
        return [line for line in self.lines if line.exception and line.is_fault]

    @property
    def faults(self) -> list[Line]:
        """The lines that say that something broke, before an orderly end, which nobody survived."""
        return [
            line
            for line in self.lines
            if (line.is_fault or (line.number > self.length - END and line.are_last_words))
            and not (self.ended and line.number > self.ended)
            and (line.is_death or not line.survived)
        ]

    @property
    def decisive(self) -> Line | None:
        """The line that says why: the last exception, Xid, NVRM or error line that is no consequence of another."""
        faults = self.faults
        causes = [line for line in faults if not CONSEQUENCE.search(line.text)] or faults
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
        """Return the exceptions that led to `line`, the root first, and `line`."""
        by_number, chain = {entry.number: entry for entry in self.lines}, [line]
        while (cause := by_number.get(chain[0].cause)) and cause not in chain:
            chain.insert(0, cause)
        return chain


def read(chunks: Iterable[bytes]) -> Event:
    """Return what a log says. `chunks` are its bytes, cut anywhere."""
    reader = _Reader()
    for number, piece in _pieces(chunks):
        reader.read(number, COLOUR.sub(b"", piece) if b"\x1b" in piece else piece)
    return Event(
        sorted((*reader.first, *reader.last, *reader.quiet), key=lambda line: line.number), reader.ended, reader.length
    )


def read_text(text: str) -> Event:
    """Return what a text says."""
    return read([text.encode("utf-8", "replace")])


def _pieces(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of whole lines with the number of their first line; a line that does not end comes in parts."""
    number, rest = 1, b""
    for chunk in chunks:
        for begin in range(0, len(chunk), PIECE):
            piece = rest + chunk[begin : begin + PIECE]
            end = piece.rfind(b"\n") + 1
            if end:
                yield number, piece[:end]
                number += piece.count(b"\n", 0, end)
            rest = piece[end:]
            while len(rest) > LONGEST:
                yield number, rest[:LONGEST]
                rest = rest[LONGEST - OVERLAP :]
    if rest:
        yield number, rest


class _Reader:
    """The lines so far, those to be recognised again, and the errors of ours whose parts are still to come."""

    def __init__(self) -> None:
        self.first: list[Line] = []
        self.last: deque[Line] = deque(maxlen=KEPT)
        self.quiet: deque[Line] = deque(maxlen=KEPT)
        self.seen: dict[int, Line | None] = {}
        self.roles: dict[int, str] = {}
        self.ended = self.length = 0
        self.pending: list[Line] = []  # faults since the last start, which a sign of life excuses
        self.exception: dict[str, int] = {}  # by process: the line of its last exception
        self.chained: set[str] = set()
        self.open: list[_Open] = []
        self.before: list[bytes] = []

    def read(self, number: int, piece: bytes) -> None:
        """Take a piece whose first line is `number`."""
        lines = piece.removesuffix(b"\n").split(b"\n")
        keys = NUMBERS.sub(b"0", piece).removesuffix(b"\n").split(b"\n")
        for index, key in enumerate(keys):
            if self.open:
                self._continue(lines[index])
            name = hash(key)
            if name not in self.seen:
                if len(self.seen) >= REMEMBERED:
                    kept = {id(line) for line in self.first}
                    self.seen = {n: line for n, line in self.seen.items() if id(line) in kept}
                self.seen[name] = self._parse(number + index, index, lines)
                continue
            line = self.seen[name]
            if line is not None:
                line.count += 1
                self._notice(line, number + index)
        self.before, self.length = lines[-2:], number + len(lines) - 1

    def _parse(self, number: int, index: int, lines: list[bytes]) -> Line | None:
        raw = lines[index]
        lower = raw.lower()
        if len(self.seen) > SHORT and not any(word in lower for word in WORDS) and b"FAIL " not in raw:
            return None
        if len(raw) > TEXT:
            raw = _windows(raw, lower)
        line = parse(raw.decode("utf-8", "replace").rstrip("\r\n"), number)
        previous = (*self.before, *lines[max(0, index - 3) : index])[-3:]
        if CODE.search(line.text) and any(FILE.search(strip(text.decode("utf-8", "replace"))[0]) for text in previous):
            return None
        if not line.quiet:
            line.before = tuple(_decoded(text) for text in previous[-2:])
            line.after = tuple(_decoded(text) for text in lines[index + 1 : index + 3])
        self._link(line)
        self._notice(line, number)
        if BLOCK.search(line.text):
            self.open.append(_Open(line))
        if line.quiet:
            self.quiet.append(line)
        elif len(self.first) < KEPT:
            self.first.append(line)
        else:
            self.last.append(line)
        return line

    def _link(self, line: Line) -> None:
        """Note the exception of the same process that led to this one."""
        if line.exception and not line.quiet:
            if line.process in self.chained:
                line.cause = self.exception.get(line.process, 0)
                self.chained.discard(line.process)
            self.exception[line.process] = line.number
        elif CHAIN.search(line.text) and not line.text.startswith("Traceback"):
            self.chained.add(line.process)

    def _notice(self, line: Line, number: int) -> None:
        """Keep track of starts, signs of life and the end, which decide what a fault means."""
        if line.is_fault:
            if len(self.pending) < KEPT:
                self.pending.append(line)
        elif ALIVE.search(line.text):
            for fault in self.pending:
                fault.survived = True
            self.pending.clear()
        elif BANNER.search(line.text):
            self.pending.clear()
            self.ended = 0
        elif not self.ended and ORDERLY.search(line.text):
            self.ended = number

    def _continue(self, raw: bytes) -> None:
        """Add a line to the errors of ours that have not ended: a part, or more of the previous part."""
        text = strip(raw[:LONGEST].decode("utf-8", "replace").rstrip("\r\n"))[0]
        for block in self.open:
            block.add(text)
        self.open = [block for block in self.open if block.left > 0]


@dataclass
class _Open:
    """An error of ours whose `why:` and `next:` are still to come."""

    line: Line
    left: int = BLOCK_LINES
    part: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Take the next line of the log; `next:` ends the error, and so does a line of something else."""
        self.left -= 1
        if part := PART.match(text):
            self.part = part[1]
            self.parts[self.part] = [part[2].strip()]
        elif self.part and text.startswith("        "):
            self.parts[self.part].append(text.strip())
        elif self.part or not text.startswith(" "):
            self.left = 0
        if self.part == "next":
            self.left = 0
            self.line.parts = {"why": ""} | {
                name: "; ".join(takewhile(bool, lines))[:SHOWN] for name, lines in self.parts.items()
            }


def strip(text: str) -> tuple[str, str, str]:
    """Return a line without prefixes, the log level, and the process; journald's program stays as `name: `."""
    process = level = ""
    for _ in range(8):
        if match := PREFIXES.match(text):
            if found := PROCESS.match(match[0].strip()):
                process = found[1]
            elif match[0].startswith(("[ ", "[", "<")) and not match[0].startswith("[rank"):
                level = "KERNEL"
            text = text[match.end() :]
        elif (match := LEVELS.match(text)) and not level:
            name = next(filter(None, match.groups()))
            level, text = LETTERS.get(name, name), text[match.end() :]
        elif (match := JOURNAL_TIME.match(text)) and (program := JOURNAL.match(text)):
            text = f"{program[1]}: {text[program.end() :]}" if program[1] != "kernel" else text[program.end() :]
            level = "KERNEL" if program[1] == "kernel" else "" if PROGRAMS.search(program[1]) else "FOREIGN"
        else:
            break
    return text, level, process


def parse(text: str, number: int = 0) -> Line:
    """Return what one line says."""
    rest, level, process = strip(text)
    line = Line(number, rest[:TEXT], level, process)
    if line.quiet:
        return line
    if match := EXCEPTION.match(rest):
        line.exception = match[1]
    if "Xid" in rest and (match := XID.search(rest)):
        line.xid = int(match[1] or match[2])
    if match := KILLED.search(rest):
        line.signal = SIGNALS[match[1] or match[2]]
    elif match := SHELL.match(rest):
        line.signal = SHELL_SIGNALS[match[1]]
    if match := ENDED.search(rest):
        name, value = next((name, value) for name, value in match.groupdict().items() if value is not None)
        line.code = -int(value) if name == "f" else int(value)
        if line.code < 0 or 128 < line.code < 160:
            line.signal = line.signal or (-line.code if line.code < 0 else line.code - 128)
            if line.signal in {SIGNALS["TERM"], SIGNALS["INT"], SIGNALS["HUP"]}:
                line.signal = None
    return line


def _windows(raw: bytes, lower: bytes) -> bytes:
    places = (
        sorted({lower.find(word) for word in WORDS} - {-1})[:2] + sorted({lower.rfind(word) for word in WORDS})[-1:]
    )
    parts = [raw[max(0, place - WINDOW[0]) : place + WINDOW[1]] for place in dict.fromkeys(places)]
    return raw[:200] + b" " + b" ".join(parts)


def _decoded(raw: bytes) -> str:
    return raw[:SHOWN].decode("utf-8", "replace").rstrip("\r\n")
