"""`./inv chat`: one answer to a message, or a conversation, in which the model sees what was said before."""

import sys
from collections.abc import Iterator
from contextlib import closing, suppress

from sparkforge.core import interrupt
from sparkforge.core.console import echo, say, show_error, stream
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.serve.record import Server

PROMPT = "> "
ONCE_TOKENS, TOKENS = 64, 1024  # the longest answer by default: to one message, and in a conversation
LONGEST = 1 << 20  # characters of a message on stdin; a longer one is an error


class Conversation:
    """The messages between a user and a served model, and the next answer."""

    def __init__(self, server: Server, system: str, max_tokens: int) -> None:
        self.system, self.max_tokens, self._endpoint = system, max_tokens, server.endpoint
        self.messages: list[dict[str, str]] = []  # without the system prompt
        self._content, self._finish_reason = "", ""

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it comes, and remember both, unless the answer has reasoning only.

        After a ServerError both are forgotten; after a KeyboardInterrupt the received part of the answer is remembered.
        """
        question = {"role": "user", "content": text.encode("utf-8", "replace").decode()}
        self._content, self._finish_reason = "", ""
        try:
            stream(self._pieces(question))
            echo()
        except ServerError:
            self._content = ""
            raise
        finally:
            if self._content:
                self.messages += [question, {"role": "assistant", "content": self._content}]
        if self._finish_reason == "length":
            say(f"the answer was cut: --max-tokens is {self.max_tokens}, or the context is full")

    def _pieces(self, question: dict[str, str]) -> Iterator[str]:
        """Yield the answer's text; on a terminal a line break separates reasoning and content."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, question]
        reasoned = False
        with closing(self._endpoint.stream_chat(messages, self.max_tokens)) as pieces:
            for piece in pieces:
                if piece.text and not piece.reasoning:
                    if reasoned and not self._content and sys.stdout.isatty():
                        yield "\n"
                    self._content += piece.text
                reasoned |= piece.reasoning
                self._finish_reason = piece.finish_reason or self._finish_reason
                yield piece.text


def message_on_stdin() -> str:
    """Return the message from a pipe or a file; empty if stdin is a terminal. Raises UsageError."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        text = sys.stdin.read(LONGEST + 1)
        why = "it is empty" if not text.strip() else f"it has more than {LONGEST:,} characters"
    except (OSError, ValueError) as error:
        text, why = "", str(error)
    if not text.strip() or len(text) > LONGEST:
        raise UsageError("stdin holds no message", why, './inv chat "Hello"')
    return text


def converse(server: Server, system: str, max_tokens: int) -> None:
    """Talk until the user ends it. Raises ServerError once the server has ended."""
    with suppress(ImportError):  # a Python without it reads plain lines
        import readline  # noqa: F401, PLC0415 - `input` uses it once it is imported
    conversation = Conversation(server, system, max_tokens)
    say(f"{server.model_id} at {server.url} · Ctrl-C ends an answer, Ctrl-D the conversation")
    while (line := _next_line()) is not None:
        if not line.strip():
            continue
        try:
            conversation.ask(line)
        except KeyboardInterrupt:
            if interrupt.ending():
                raise
            echo()
            say("the answer was ended by Ctrl-C")
        except ServerError as error:
            echo()
            if not server.alive:
                raise
            show_error(error)


def _next_line() -> str | None:
    """Read the user's next line; return an empty one if there is nothing to send, None at the end."""
    try:
        return input(PROMPT if sys.stdout.isatty() else "")
    except EOFError:
        echo()
        return None
    except KeyboardInterrupt:
        if interrupt.ending():
            raise
        echo()
        say("Ctrl-D ends the conversation")
    except UnicodeDecodeError as error:
        say(f"this line is not text: {error.reason}")
    return ""
