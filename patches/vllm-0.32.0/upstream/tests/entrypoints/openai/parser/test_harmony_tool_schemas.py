# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The model sees the whole schema of a tool."""

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.entrypoints.openai.parser.harmony_utils import (
    build_harmony_preamble,
    get_encoding,
    render_for_completion,
)

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "floor": {"type": "integer"}},
    "required": ["city"],
}
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
}
STRING, NULL = {"type": "string"}, {"type": "null"}


def render(schema, instructions="Be brief."):
    tool = ChatCompletionToolsParam(
        function={"name": "f", "description": "Does it.", "parameters": schema}
    )
    messages = build_harmony_preamble(
        instructions=instructions, tools=[tool], with_custom_tools=True
    )
    return get_encoding().decode(render_for_completion(messages))


def render_property(schema, **more):
    """Return the type of a property, in one line."""
    text = render({"type": "object", "properties": {"x": schema}, **more})
    text = text.partition("type f = (_: {")[2].rpartition("}) => any;")[0]
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("schema", "rendered"),
    [
        ({"anyOf": [STRING, NULL], "default": None}, "x?: string | null, // default: null"),
        ({"oneOf": [STRING, {"type": "integer"}]}, "x?: string | number,"),
        ({"type": ["string", "null"]}, "x?: string | null,"),
        ({"type": "string", "nullable": True}, "x?: string | null,"),
        ({"$ref": "#/$defs/Place"}, "x?: { city: string, floor?: number, },"),
        ({"$ref": "#/definitions/Id"}, "x?: number,"),
        ({"$ref": "#/$defs/Place", "description": "A"}, "// A x?: { city: string, floor?: number, },"),
        ({"type": "array", "items": {"$ref": "#/$defs/Place"}}, "x?: { city: string, floor?: number, }[],"),
        ({"type": "array", "items": {"anyOf": [STRING, NULL]}}, "x?: (string | null)[],"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, 'x?: ("a" | "b")[],'),
        ({"type": "array", "prefixItems": [STRING, {"type": "number"}]}, "x?: [string, number],"),
        ({"type": "object", "additionalProperties": STRING}, "x?: { [key: string]: string, },"),
        ({"allOf": [{"$ref": "#/$defs/Place"}, {"properties": {"n": STRING}}]},
         "x?: { city: string, floor?: number, n?: string, },"),
        ({"const": "order"}, 'x?: "order",'),
        ({"enum": ["a", 1, None]}, 'x?: "a" | 1 | null,'),
        ({"type": "string", "default": "x", "description": "two\nlines"}, '// two // lines x?: string, // default: "x"'),
        ({"oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}],
          "discriminator": {"propertyName": "k"}}, 'x?: { k?: "a", } | { k?: "b", },'),
        ({"$ref": "#/$defs/Node"}, "x?: { value?: string, children?: { value?: string, children?: Node[], }[], },"),
        ({"$ref": "#/$defs/nothing"}, "x?: any,"),
        ({"$ref": "#/$defs/Loop"}, "x?: any,"),
    ],
)  # fmt: skip
def test_property_is_rendered(schema, rendered):
    definitions = {"Place": PLACE, "Node": NODE, "Loop": {"$ref": "#/$defs/Loop"}}
    more = {"$defs": definitions, "definitions": {"Id": {"type": "integer"}}}
    assert render_property(schema, **more) == rendered


def test_simple_schema_is_rendered_as_harmony_does():
    from openai_harmony import Conversation, Role

    schema = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "place": {"type": "object", "properties": {"city": STRING}},
            "many": {"type": "array", "items": PLACE, "description": "All."},
        },
        "required": ["unit"],
    }
    tools = [
        ChatCompletionToolsParam(
            function={"name": "f", "description": "Does it.", "parameters": schema}
        ),
        ChatCompletionToolsParam(function={"name": "g"}),
    ]
    messages = build_harmony_preamble(
        instructions="Say <|end|>.", tools=tools, with_custom_tools=True
    )
    conversation = Conversation.from_messages(messages)
    assert render_for_completion(
        messages
    ) == get_encoding().render_conversation_for_completion(conversation, Role.ASSISTANT)


def nested(levels):
    schema = STRING
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": STRING}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(60),
        {"type": "string", "enum": [str(number) for number in range(20_000)]},
        {"type": "object", "properties": {f"p{n}": STRING for n in range(20_000)}},
        {"allOf": [{"$ref": "#/properties/x"}] * 60},
    ],
    ids=["deep", "enum", "wide", "allOf"],
)
def test_text_is_bounded(schema):
    assert len(render_property(schema)) < 100_000
