// The npm package openai: chat, stream, tools, structured output, Responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ANSWER, CALL, DONE, JSON_CUE, OSLO, Weather, assert, baseURL, model, run } from "./conversations.mjs";

const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY, maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const request = (content, more) => ({ model, messages: [{ role: "user", content }], max_tokens: 100, ...more });
const calls = (message) => message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
const OSLO_CALL = [["weather", { city: "Oslo" }]];
const response_format = zodResponseFormat(Weather, "weather_report");

await run({
  chat: async () => {
    const response = await client.chat.completions.create(request(ANSWER));
    assert.equal(response.choices[0].message.content, DONE);
  },
  stream: async () => {
    let text = "";
    for await (const event of await client.chat.completions.create(request(ANSWER, { stream: true }))) {
      text += event.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, DONE);
  },
  tools: async () => {
    const response = await client.chat.completions.create(request(CALL, { tools }));
    assert.deepEqual(calls(response.choices[0].message), OSLO_CALL);
  },
  "structured output": async () => {
    const response = await client.chat.completions.parse(request(JSON_CUE, { response_format }));
    assert.deepEqual(response.choices[0].message.parsed, OSLO);
  },
  "tools with structured output": async () => {
    const both = { tools, response_format };
    const first = await client.chat.completions.create(request(CALL, both));
    assert.deepEqual(calls(first.choices[0].message), OSLO_CALL);
    const second = await client.chat.completions.create(request(JSON_CUE, both));
    assert.deepEqual(JSON.parse(second.choices[0].message.content), OSLO);
  },
  "Responses: tools with structured output": async () => {
    const both = {
      model, tools: [{ type: "function", name: "weather", parameters, strict: false }],
      text: { format: zodTextFormat(Weather, "weather_report") },
    };
    const first = await client.responses.create({ ...both, input: CALL });
    assert.deepEqual(first.output.map((item) => [item.name, JSON.parse(item.arguments)]), OSLO_CALL);
    const second = await client.responses.parse({ ...both, input: JSON_CUE });
    assert.deepEqual(second.output_parsed, OSLO);
  },
});
