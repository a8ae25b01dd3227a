"""The parser of each stack's vLLM accepts each flag of each serve profile with the intended value."""

import json

import pytest
import tiny_families

from sparkforge import pins
from sparkforge.core import vllm_flags
from sparkforge.plan import families
from sparkforge.serve import profiles
from validate.facts import deep_child

pytestmark = pytest.mark.integration
PROGRAM = """
import json, runpy, sys
from vllm import __version__ as version
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = runpy.run_path(sys.argv[2])["server_options"]().make_arg_parser(FlexibleArgumentParser())
actions = {option: action for action in parser._actions for option in action.option_strings}
short = {o: next(n for n in a.option_strings if n[:2] == "--") for o, a in actions.items() if o[1] != "-"}
answers = {"version": version, "short": short}
for name, words in json.loads(sys.argv[1]).items():
    options = parser.parse_args(["--model", "/x", *words])
    quantised = options.quantization_config
    answers[name] = {
        "moe": options.moe_backend, "attention": str(options.attention_backend), "seqs": options.max_num_seqs,
        "quantization": options.quantization,
        "activation": str(quantised.moe.activation) if quantised else "", "length": options.max_model_len,
        "sizes": options.compilation_config.cudagraph_capture_sizes, "share": options.gpu_memory_utilization,
        "strict": options.tool_strict_level,
    }
print(json.dumps(answers))
"""


# Texts that a grammar allows after `<|start|>assistant`, by vLLM's parser for Harmony and XGrammar.
GRAMMARS = """
import json, sys
import xgrammar
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
question = json.loads(sys.argv[2])
answers = {}
for level in question["levels"]:
    parser = ParserManager.get_parser("openai", "openai_gptoss", True, None, True, level, tokenizer)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=question["tools"])
    grammar = parser(tokenizer, request.tools).adjust_request(request).structured_outputs
    answers[level] = {}
    for name, text in question["texts"].items():
        matcher = grammar and xgrammar.GrammarMatcher(compiler.compile_structural_tag(grammar.structural_tag))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        answers[level][name] = all(matcher.accept_token(token) for token in tokens) if grammar else True
print(json.dumps(answers))
"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|return|>"  # the token that ends a grammar
TEXTS = {
    "right": CALL.format("weather", '{"city": "Oslo"}'),
    "answer": "<|channel|>final<|message|>It rains.<|return|>",
    "wrong arguments": CALL.format("weather", '{"town": 7}'),
    "unknown tool": CALL.format("wether", '{"city": "Oslo"}'),
}


def test_the_level_of_strict_tools_decides_what_a_call_may_be(release, vllm_process, random_model):
    words = profiles.load(stack=release.stack)["strict-tools"].arguments()
    (level,) = (word.partition("=")[2] for word in words if word.startswith("--tool-strict-level="))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    question = json.dumps({"levels": ["auto", "function", level], "tools": tools, "texts": TEXTS})
    answers = vllm_process(release.patched).answer(GRAMMARS, random_model, question)
    allowed = {name: {text for text, is_allowed in texts.items() if is_allowed} for name, texts in answers.items()}
    assert allowed["auto"] == set(TEXTS)
    assert allowed["function"] == set(TEXTS) - {"unknown tool"}
    assert allowed[level] == {"right", "answer"}


# The results of a family's parsers for an answer, with the tokens of all their formats in the vocabulary.
PARSERS = """
import json, sys
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
question = json.loads(sys.argv[2])
tokenizer.add_tokens(question["tokens"])
request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=[question["tool"]])
answers = {}
for name, (tools, reasoning, text) in question["families"].items():
    parser = ParserManager.get_parser(tools, reasoning, True, None, False, "auto", tokenizer)(tokenizer, request.tools)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    thought, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)
    answers[name] = [thought, content, [[call.name, json.loads(call.arguments)] for call in calls or ()]]
print(json.dumps(answers))
"""
DSML = "\uff5cDSML\uff5c"
AS_JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
AS_PAIRS = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
AS_XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
AS_DSML = (
    f'<{DSML}tool_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Oslo'
    f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>"
)
WRITTEN = {"ling": AS_PAIRS, "qwen3-moe": AS_JSON, "qwen3": AS_JSON, "glm4-moe-lite": AS_PAIRS, "qwen3_5-moe": AS_XML}
WRITTEN["deepseek-v4"] = AS_DSML


def test_each_familys_parsers_read_its_reasoning_and_its_calls(release, vllm_process, tmp_path):
    assert set(WRITTEN) == {name for name, row in families.load().items() if row.chat.asks_for_reasoning}
    chats = {name: families.load()[name].chat for name in WRITTEN}
    asked = {
        name: (chat.tool_call_parser.value, chat.reasoning_parser.value, f"It asks.</think>{WRITTEN[name]}")
        for name, chat in chats.items()
    }
    tokens = [DSML, *(f"<{slash}arg_{part}>" for slash in ("", "/") for part in ("key", "value"))]
    tokens += ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    question = json.dumps({"families": asked, "tokens": tokens, "tool": tool})
    folder = tiny_families.write_tokenizer(tmp_path)
    answers = vllm_process(release.patched).answer(PARSERS, folder, question)
    assert answers == {name: ["It asks.", None, [["weather", {"city": "Oslo"}]]] for name in WRITTEN}


@pytest.fixture(scope="module")
def parsed(release, vllm_process):
    arguments = json.dumps({name: profile.arguments() for name, profile in profiles.load(stack=release.stack).items()})
    answers = vllm_process(release.patched).answer(PROGRAM, arguments, deep_child.__file__)
    assert answers["version"].partition("+")[0] == pins.load().component(release.stack, "vllm").version
    return answers


def test_the_short_forms_of_flags_are_vllms(parsed):
    assert parsed["short"] == vllm_flags.SHORT


@pytest.mark.parametrize("name", ["safe", "fast", "long-context"])
def test_the_hardware_path_is_what_vllm_reads(parsed, name):
    options = parsed[name]
    assert options["moe"] == "flashinfer_cutlass"
    assert "FLASHINFER" in options["attention"]
    assert "f8e4m3fn" in options["activation"]
    assert "col=32" in options["activation"]  # blocks of 32, which is MX
    assert {5, 10} <= set(options["sizes"])
    assert options["sizes"][-1] >= options["seqs"]
    assert options["share"] <= 0.83


def test_our_experts_are_a_profile_of_their_own(parsed):
    options, safe = parsed["spark-mxfp4"], parsed["safe"]
    assert options["quantization"] == "spark-mxfp4"
    assert (options["moe"], options["activation"]) == ("auto", "")  # vLLM's own choice of experts is unchanged
    same = ("attention", "seqs", "length", "sizes", "share")
    assert [options[name] for name in same] == [safe[name] for name in same]
