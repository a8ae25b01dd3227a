"""Random regular expressions, schemas, grammars, structural tags and texts for every field that takes one.

`requests(seed, count)` yields path and body. A server may accept or refuse each, but must not fail (status 500).
"""

import json
import random

from sparkforge.serve.settings import TINY_ID

TEXTS = (
    "", " ", "\0", "a\0b", "\x01\x1b[31m", "\x7f", "é", "e\u0301", "\u200b", "\u202e", "\ufeff", "\uffff",
    "\ud800", "\udfff\ud800", "🦜", "👨‍👩‍👧", "\U0010ffff", "ß" * 40, "<|start|>", "<|end|>",
    "<|channel|>final<|message|>", "<|return|>", "<|endoftext|>", "<|constrain|>", "%s%n", "{}", "{{x}}",
    "{% raw %}", "../../etc", "'; --", '"', "\\", "\\u0000", "\\ud800", "null", "1e999", "a" * 300, "\n" * 30,
    "\t", "\r\n", "\uff10", "\u0131", "\u0130",
)  # fmt: skip
ATOMS = (
    "a", "[a-z]", "[^a]", "[]", "[^]", "[z-a]", "[a-", "[\\d\\s]", "[[:alpha:]]", "[🦜-🦞]", "[\\x00-\\x1f]",
    ".", "\\d", "\\w", "\\S", "\\b", "\\B", "\\A", "\\Z", "\\1", "\\0", "\\x41", "\\x4", "\\u0041",
    "\\u{1F99C}", "\\ud83e", "\\p{L}", "\\P{Lu}", "\\p{}", "\\pL", "\\Qa\\E", "\\c", "\\", "(?i)", "(?i:a)",
    "(?:a|b)", "(?=a)", "(?!a)", "(?<=a)", "(?<n>a)", "(?P<n>a)", "(?P=n)", "(?>a)", "(?#c)", "(", ")", "()",
    "(|a)", "^", "$", "|", "é", "\0", "\n", "/", "{", "}", '"', "-", "<|end|>",
)  # fmt: skip
REPEATS = (
    "*", "+", "?", "*?", "++", "{2}", "{0,300}", "{1,3}", "{3,1}", "{,3}", "{0}", "{0,0}", "{1,}",
    "{a}", "{99999999999}", "**", "{2}{3}",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 0.5, 1e308, -1e308, 10**30, 2**63, float("nan"), float("inf"), True, "1", None, [], {})
TYPES = ("string", "integer", "object", "array", "boolean", "nonsense", "", ["string", "null"], 1, None)
FORMATS = ("date", "date-time", "email", "uuid", "ipv4", "regex", "nonsense", 1)
REFERENCES = ("#", "#/$defs/a", "#/$defs/none", "http://x/y", "", "#/~1", 1)
SYMBOLS = (
    '"a"', "root", "x", "[a-z]", "[^", '"\\x00"', '"\\u{1F99C}"', "(", ")", "|", "*", "+", "?", "{2,3}", "::=",
    "\n", "#", '"', "start", ":", "/a+/", "/(?i)a/", "%ignore", "EOS", "Token(1)", "TagDispatch()", "(?=a)",
    '""', "é", "\0", "~", "!",
)  # fmt: skip


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def user(content="Hi"):
    return [{"role": "user", "content": content}]


def chat(**more):
    return CHAT, {"model": TINY_ID, "messages": user(), "max_tokens": 4, **more}


def completion(**more):
    return COMPLETIONS, {"model": TINY_ID, "prompt": "Hi", "max_tokens": 4, **more}


def responses(**more):
    return RESPONSES, {"model": TINY_ID, "input": "Hi", "max_output_tokens": 4, **more}


def messages(**more):
    return MESSAGES, {"model": TINY_ID, "messages": user(), "max_tokens": 4, **more}


class Dice(random.Random):
    """Makes random values that a client may send."""

    def text(self):
        return "".join(self.choices(TEXTS, k=self.choice((1, 1, 2, 3))))

    def regex(self):
        parts = [self.choice(ATOMS) + self.choice(("", "", *REPEATS)) for _ in range(self.randint(1, 4))]
        pattern = "".join(parts)
        return f"^{pattern}$" if self.random() < 0.6 else f"({pattern}){self.choice(REPEATS)}"

    def value(self):
        return self.choice((self.text(), self.choice(NUMBERS), self.choice(TYPES), {self.text(): 1}, [self.text()]))

    def schema(self, depth=3):
        if self.random() < 0.06 or not depth:
            return self.choice((True, False, {}, {"type": "string"}, self.value()))
        inner = lambda: self.schema(depth - 1)  # noqa: E731 - passed on many times below
        several = lambda: [inner() for _ in range(self.randint(0, 3))]  # noqa: E731
        named = lambda: {self.text() or "a": inner() for _ in range(self.randint(0, 3))}  # noqa: E731
        keywords = {
            "type": lambda: self.choice(TYPES),
            "enum": lambda: [self.value() for _ in range(self.randint(0, 3))],
            "const": self.value,
            "pattern": self.regex,
            "format": lambda: self.choice(FORMATS),
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
                             "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", "uniqueItems",
                             "minContains"), lambda: self.choice(NUMBERS)),
            **dict.fromkeys(("items", "additionalProperties", "unevaluatedProperties", "not", "if", "then", "else",
                             "contains", "propertyNames", "additionalItems"), inner),
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), several),
            **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), named),
            "required": lambda: [self.text(), "a", "a"],
            "$ref": lambda: self.choice(REFERENCES),
            "title": self.text,
            "description": self.text,
            "default": self.value,
        }  # fmt: skip
        schema = {name: keywords[name]() for name in self.sample(sorted(keywords), self.randint(1, 4))}
        if "pattern" in schema or "format" in schema or "minLength" in schema:
            schema.setdefault("type", "string")
        if "properties" in schema or "patternProperties" in schema:
            schema.setdefault("type", "object")
        if self.random() < 0.03:
            schema[self.choice(sorted(keywords))] = self.value()
        return schema

    def grammar(self):
        words = " ".join(self.choices(SYMBOLS, k=self.randint(1, 8)))
        return self.choice(("root ::= ", "root ::= x\nx ::= ", "start: ", "")) + words

    def structural_tag(self):
        structures = [{"begin": self.text(), "schema": self.schema(2), "end": self.text()}]
        forms = (
            {
                "type": "structural_tag",
                "format": {"type": self.text(), "content": self.schema(2), "begin": self.text()},
            },
            {"structures": structures, "triggers": [self.text()]},
            {"structures": structures, "triggers": [structures[0]["begin"][:3]]},
            {"structures": self.value(), "triggers": self.value()},
            self.value(),
        )
        return json.dumps(self.choice(forms))


def requests(seed, count):
    dice = Dice(seed)
    for _ in range(count):
        yield dice.choice(REQUESTS)(dice)


def _structured(dice):
    return dice.choice(
        (
            {"regex": dice.regex()},
            {"json": dice.schema()},
            {"json": json.dumps(dice.schema())},
            {"grammar": dice.grammar()},
            {"structural_tag": dice.structural_tag()},
            {"choice": [dice.text() for _ in range(dice.randint(0, 3))]},
        )
    )


def _format(dice):
    tag = json.loads(dice.structural_tag())
    forms = (
        {"type": "json_schema", "json_schema": {"name": dice.text(), "schema": dice.schema(), "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": dice.schema()}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": dice.regex()}}},
        {"type": dice.text()},
        tag if isinstance(tag, dict) else {"type": "structural_tag", "format": tag},
    )
    return dice.choice(forms)


def _tools(dice):
    name = dice.choice(("f", "get", dice.text()))
    function = {"name": name, "description": dice.text(), "parameters": dice.schema(), "strict": dice.random() < 0.7}
    return [{"type": "function", "function": function}]


def _conversation(dice):
    call = {"id": dice.text(), "type": "function", "function": {"name": dice.text(), "arguments": dice.text()}}
    turns = (
        {"role": "user", "content": dice.text()},
        {"role": "user", "content": [{"type": "text", "text": dice.text()}]},
        {"role": "system", "content": dice.text(), "name": dice.text()},
        {"role": "developer", "content": dice.text()},
        {"role": dice.text(), "content": "Hi"},
        {"role": "assistant", "content": dice.choice((None, dice.text())), "tool_calls": [call]},
        {"role": "assistant", "content": dice.text(), "reasoning": dice.text()},
        {"role": "tool", "tool_call_id": dice.text(), "content": dice.text()},
    )
    return dice.sample(turns, dice.randint(1, 4))


REQUESTS = (
    lambda dice: chat(response_format=_format(dice)),
    lambda dice: chat(structured_outputs=_structured(dice)),
    lambda dice: chat(tools=_tools(dice), tool_choice=dice.choice(("auto", "required", "none", dice.text()))),
    lambda dice: chat(tools=_tools(dice), response_format=_format(dice)),
    lambda dice: chat(messages=_conversation(dice)),
    lambda dice: chat(**{dice.choice(("stop", "user", "model", "reasoning_effort", "service_tier", "chat_template",
                                       "chat_template_kwargs", "bad_words", "logit_bias", "metadata")): dice.value()}),
    lambda dice: completion(structured_outputs=_structured(dice)),
    lambda dice: completion(response_format=_format(dice)),
    lambda dice: completion(prompt=dice.text(), logprobs=dice.choice((None, 2)), echo=dice.choice((True, False))),
    lambda dice: completion(**{dice.choice(("stop", "suffix", "bad_words", "logit_bias", "prompt", "stop_token_ids",
                                             "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs",
                                             "max_tokens", "repetition_penalty", "allowed_token_ids",
                                             "min_tokens")): dice.value()}),
    lambda dice: responses(input=dice.choice((dice.text(), [{"role": "user", "content": dice.text()}]))),
    lambda dice: responses(text={"format": {"type": "json_schema", "name": dice.text(), "schema": dice.schema()}}),
    lambda dice: responses(tools=[{"type": "function", **_tools(dice)[0]["function"]}], instructions=dice.text()),
    lambda dice: responses(**{dice.choice(("previous_response_id", "metadata", "user", "reasoning", "include",
                                            "truncation", "tool_choice")): dice.value()}),
    lambda dice: messages(messages=user(dice.text()), system=dice.text(), stop_sequences=[dice.text()]),
    lambda dice: messages(tools=[{"name": dice.text(), "input_schema": dice.schema()}]),
    lambda dice: messages(output_config={"format": {"type": "json_schema", "schema": dice.schema()}}),
    lambda dice: ("/tokenize", {"model": TINY_ID, "prompt": dice.text()}),
    lambda dice: ("/detokenize", {"model": TINY_ID, "tokens": [dice.choice((0, -1, 10**9, 200006, 2**40))]}),
    lambda dice: ("/v1/messages/count_tokens", {"model": TINY_ID, "messages": user(dice.text())}),
)  # fmt: skip
