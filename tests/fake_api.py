"""A small OpenAI API for tests without vLLM, with the right answer to each start-up test call.

It replaces only the server and generates nothing. Fake servers in separate processes import it too.
"""

import http.server
import json

JSON = '{"city": "Paris"}'
GOOD = {
    "choices": [{
        "text": "hi", "finish_reason": "stop",
        "message": {
            "role": "assistant", "content": JSON,
            "tool_calls": [{"function": {"name": "get_weather", "arguments": JSON}}],
        },
        "logprobs": {"content": [{"token": JSON, "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]}]},
        "prompt_logprobs": [None, {"1": {"logprob": -0.5}}],
    }],
    "id": "resp_1",
    "usage": {"prompt_tokens": 500, "completion_tokens": 1},
    "output": [{"type": "message", "content": [{"text": JSON}]}],
}  # fmt: skip
INVALID = 'Unsupported type "nonsense"'


def answer(body):  # noqa: PLR0911 - a line a kind of request
    """Return the status and the JSON of our server's answer to a request without a stream."""
    form = body.get("response_format", {})
    if body.get("previous_response_id", GOOD["id"]) != GOOD["id"]:
        message = "Response not found: it is not one of the last 1000. Send the whole conversation in `input`."
        return 404, {"error": {"message": message}}
    if "guided_json" in body or "web_search" in str(body.get("tools")):
        return 400, {"error": {"message": "`guided_json` is not supported, and 'web_search' is neither."}}
    if isinstance(body.get("messages", [{}])[0].get("content"), list):
        return 400, {"error": {"message": "Content of type 'image_url' is not supported: the model takes text only."}}
    if form.get("json_schema", {}).get("schema", {}).get("type") == "nonsense":
        return 400, {"error": {"message": INVALID}}
    if form.get("type") == "structural_tag":
        return 200, _message("Paris")
    if "stop" in body:
        call = {"function": {"name": "get_weather", "arguments": "{"}}
        return 200, _message(None, tool_calls=[call]) if "tools" in body else _message("{")
    return 200, {**GOOD, "usage": {**GOOD["usage"], "input_tokens": 60 if body.get("instructions") else 20}}


def stream(body):
    """Return the events of our server's answer to a request for a stream."""
    if "input" in body:
        return [{"type": "response.failed", "response": {"error": {"message": INVALID}}}]
    form = body.get("response_format", {})
    content = "Paris\nRome" if form.get("type") == "structural_tag" else ""
    if form.get("type") == "json_schema":
        content = json.dumps({"text": form["json_schema"]["schema"]["properties"]["text"]["enum"][0]})
    deltas = [{"delta": {"role": "assistant", "content": content}}, {"delta": {}, "finish_reason": "stop"}]
    return [{"choices": [{"text": "", **delta}]} for delta in deltas]


def stream_text(body):
    """Return events as sent over HTTP; the Responses API has no [DONE]."""
    lines = [f"event: {event.get('type', 'message')}\ndata: {json.dumps(event)}\n\n" for event in stream(body)]
    return "".join(lines) + ("" if "input" in body else "data: [DONE]\n\n")


def _message(content, **more):
    message = {"role": "assistant", "content": content, **more}
    return {**GOOD, "choices": [{**GOOD["choices"][0], "message": message}]}


class Server(http.server.ThreadingHTTPServer):
    """A server for the parallel start-up test calls; http.server's own queue has only 5 places."""

    request_queue_size = 64


class Api(http.server.BaseHTTPRequestHandler):
    """The handler of that API without a key: health, and an answer to every request."""

    def do_GET(self):
        self._send(200, "application/json", "{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            self._send(200, "text/event-stream", stream_text(body))
        else:
            status, value = answer(body)
            self._send(status, "application/json", json.dumps(value))

    def _send(self, status, kind, text):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
